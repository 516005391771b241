"""The contents of plain, .gz, .xz and .zst files as blocks of bytes (zstandard)."""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import zstandard

from zero.errors import UserError

_COMPRESSED_BYTES = 1 << 16  # decompressed at once


def decompressed_blocks(file: BinaryIO, path: str, size: int) -> Iterator[bytes]:
    """The contents of a file in blocks of about `size` bytes, decompressed by its suffix."""
    with damage_named(path):
        if os.path.splitext(path)[1].lower() == ".zst":
            yield from _decompress_zstd(file)
        else:
            content = decompressed(file, path)
            while block := content.read(size):
                yield block


def decompressed(file: BinaryIO, path: str) -> BinaryIO:
    """A .gz, .tgz or .xz file to read decompressed; any other as it is. Use it within `damage_named`."""
    match os.path.splitext(path)[1].lower():
        case ".gz" | ".tgz":
            return gzip.open(file)  # type: ignore[return-value]
        case ".xz":
            return lzma.open(file)  # type: ignore[return-value]
    return file


@contextmanager
def damage_named(path: str) -> Iterator[None]:
    """Raises UserError, which names the file, for what decompressors raise."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
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
