"""The contents of plain, .gz, .xz, .bz2 and .zst files (zstandard)."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import zstandard

from zero.base.errors import UserError, first_line
from zero.corpus.preparing.kinds_of_files import HEAD_BYTES, what_it_is

_COMPRESSED_BYTES = 1 << 16  # decompressed at once
_ZSTD_BYTES = 1 << 9  # the same of zstandard, which makes up to 128 KiB of 4 bytes and returns all of them
CUT = b"\xff\xfe..."  # at the end of a line that was cut; no text of UTF-8 ends so
_BEGINS = {  # by the suffix
    ".gz": rb"\x1f\x8b",
    ".tgz": rb"\x1f\x8b",
    ".xz": rb"\xfd7zXZ\x00",
    ".bz2": rb"BZh",
    ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # or a frame to be skipped
}
_LONGEST_BEGIN = 6


def decompressed_blocks(file: BinaryIO, path: str, size: int) -> Iterator[bytes]:
    """The contents of a file in blocks of about `size` bytes, decompressed by its suffix."""
    with damage_named(path):
        content = decompressed(file, path)
        while block := content.read(size):
            yield block


def decompressed(file: BinaryIO, path: str) -> BinaryIO:
    """A compressed file to read decompressed, by its suffix; any other as it is. Use it within `damage_named`.

    Raises:
      UserError: the file begins otherwise than one of its suffix.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _BEGINS:
        head = file.read(_LONGEST_BEGIN)
        file.seek(0)
        if head and re.match(_BEGINS[suffix], head, re.DOTALL) is None:
            raise UserError(
                f"{path} is not compressed with {suffix}, judging by its first bytes; remove {suffix} from its name, "
                "or copy it again"
            )
    match suffix:
        case ".gz" | ".tgz":
            return gzip.open(file)  # type: ignore[return-value]
        case ".xz":
            return lzma.open(file)  # type: ignore[return-value]
        case ".bz2":
            return bz2.open(file)  # type: ignore[return-value]
        case ".zst":
            return io.BufferedReader(_Blocks(_decompress_zstd(file)), _COMPRESSED_BYTES)
    return file


def checked_blocks(blocks: Iterable[bytes], path: str) -> Iterator[bytes]:
    """The blocks of a whole file; raises UserError where the first one shows that it is no text."""
    for number, block in enumerate(blocks):
        if number == 0 and (kind := what_it_is(block[:HEAD_BYTES], path)) is not None:
            raise UserError(f"{path} {kind}")
        yield block


def cut_lines(blocks: Iterable[bytes], most: int) -> Iterator[bytes]:
    r"""The blocks without what follows the first `most` bytes of a line, whatever memory all of it would take.

    Lines within a block stay as they are.

    >>> list(cut_lines([b"a\nbc", b"def", b"g\nh", b"i"], 4))
    [b'a\nbc', b'de\xff\xfe...', b'\nh', b'i']
    """
    size = 0  # of the line that an earlier block has begun
    was_cut = False
    for block in blocks:
        end = block.find(b"\n")
        length = len(block) if end < 0 else end
        kept = block
        if size and size + length > most:
            kept = (b"" if was_cut else block[: max(0, most - size)] + CUT) + block[length:]
            was_cut = True
        if end < 0:
            size += length
        else:
            size = len(block) - block.rfind(b"\n") - 1
            was_cut = False
        if kept:
            yield kept


def is_cut(line: bytes) -> bool:
    """Whether `cut_lines` has left out the end of a line."""
    return line.endswith(CUT)


class _Blocks(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks = blocks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left = memoryview(block)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


@contextmanager
def damage_named(path: str) -> Iterator[None]:
    """Raises UserError, which names the file, for what decompressors and parsers raise of its bytes."""
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        if isinstance(error, gzip.BadGzipFile) and str(error).startswith("Not a gzipped file"):  # after a whole one
            raise UserError(
                f"{path} continues with other bytes after the end of its gzip data: copy it again, or leave them out "
                f"with zcat {path}"
            ) from error
        raise UserError(f"{path} is truncated or damaged: {first_line(error)}; copy it again") from error


def _decompress_zstd(file: BinaryIO) -> Iterator[bytes]:
    """All frames of a file. zstandard's own stream reader does not notice a file that ends within a frame."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # for files of `zstd --long=31`
    frame = None
    while block := file.read(_ZSTD_BYTES):
        while block:
            if frame is None:
                frame = decompressor.decompressobj()
            yield frame.decompress(block)
            if not frame.eof:
                break
            block = frame.unused_data
            frame = None
    if frame is not None:
        raise EOFError("the file ends within a frame")
