"""The contents of plain, .gz and .zst files as blocks of bytes (zstandard)."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from zero.runtime.errors import UserError

_COMPRESSED_BYTES = 1 << 16  # decompressed at once


def decompressed_blocks(file: BinaryIO, path: Path, size: int) -> Iterator[bytes]:
    """The contents of a file in blocks of about `size` bytes, decompressed by its suffix."""
    try:
        match path.suffix.lower():
            case ".gz":
                with gzip.open(file) as content:
                    while block := content.read(size):
                        yield block
            case ".zst":
                yield from _decompress_zstd(file)
            case _:
                while block := file.read(size):
                    yield block
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path} is truncated or damaged: {error}") from error


def _decompress_zstd(file: BinaryIO) -> Iterator[bytes]:
    """All frames of a file. zstandard's own stream reader does not notice a file that ends within a frame."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # for files of `zstd --long=31`
    frame = None
    while block := file.read(_COMPRESSED_BYTES):
        while block:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(block)
            block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("the file ends within a frame")
