"""The contents of plain, .gz, .xz, .bz2 and .zst files (zstandard)."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import zstandard

from zero.base.errors import UserError

_COMPRESSED_BYTES = 1 << 16  # decompressed at once


def decompressed_blocks(file: BinaryIO, path: str, size: int) -> Iterator[bytes]:
    """The contents of a file in blocks of about `size` bytes, decompressed by its suffix."""
    with damage_named(path):
        content = decompressed(file, path)
        while block := content.read(size):
            yield block


def decompressed(file: BinaryIO, path: str) -> BinaryIO:
    """A compressed file to read decompressed, by its suffix; any other as it is. Use it within `damage_named`."""
    match os.path.splitext(path)[1].lower():
        case ".gz" | ".tgz":
            return gzip.open(file)  # type: ignore[return-value]
        case ".xz":
            return lzma.open(file)  # type: ignore[return-value]
        case ".bz2":
            return bz2.open(file)  # type: ignore[return-value]
        case ".zst":
            return io.BufferedReader(_Blocks(_decompress_zstd(file)), _COMPRESSED_BYTES)
    return file


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
    """Raises UserError, which names the file, for what decompressors raise."""
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise UserError(f"{path} is truncated or damaged: {error}; copy it again") from error


def _decompress_zstd(file: BinaryIO) -> Iterator[bytes]:
    """All frames of a file. zstandard's own stream reader does not notice a file that ends within a frame."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # for files of `zstd --long=31`
    frame = None
    while block := file.read(_COMPRESSED_BYTES):
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
