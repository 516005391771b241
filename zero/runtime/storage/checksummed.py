"""A stream over byte ranges of one object that is compared with the object's crc32c (google-crc32c)."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from zero.runtime.storage.backend import ChecksumMismatch, FileStat

CHUNK = 8 << 20  # bytes per request: a bucket sends them in about 50 ms, as long as it takes to answer a request


@contextmanager
def open_checksummed(
    url: str, stat: FileStat, read_range: Callable[[int, int], bytes], copy_to: Callable[[bytes], None] | None = None
) -> Iterator[BinaryIO]:
    """A buffered stream over `read_range(start, size)`, which returns at most `size` bytes.

    Leaving the block, also by an exception, reads what is left and compares the checksum, unless a seek has skipped
    bytes: a parser never sees damaged bytes without a ChecksumMismatch. `copy_to` is called with all bytes
    in their order.
    """
    size = max(1, min(CHUNK, stat.size))  # a larger buffer would only cost the time of allocating it
    with _ChecksummedRaw(url, stat, read_range, copy_to) as raw, io.BufferedReader(raw, size) as stream:
        try:
            yield stream
        finally:
            while raw.has_seen_all and stream.read(CHUNK):
                pass


class _ChecksummedRaw(io.RawIOBase):
    def __init__(
        self, url: str, stat: FileStat, read_range: Callable[[int, int], bytes], copy_to: Callable[[bytes], None] | None
    ):
        import google_crc32c

        self._url, self._stat, self._read_range, self._copy_to = url, stat, read_range, copy_to
        self._position = 0
        self._checksum, self._checksummed = google_crc32c.Checksum(), 0

    @property
    def has_seen_all(self) -> bool:
        """Whether all bytes before the position were read, in order."""
        return self._checksummed == self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._stat.size}[whence]
        return self._position

    def readall(self) -> bytes:
        data = bytearray()
        while block := self.read(CHUNK):
            data += block
        return bytes(data)

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._stat.size - self._position)
        if wanted <= 0:
            return 0
        data = self._read_range(self._position, wanted)
        if not 0 < len(data) <= wanted:
            raise ChecksumMismatch(f"{self._url}: received {len(data)} bytes instead of {wanted}")
        if self.has_seen_all:
            self._checksum.update(data)
            self._checksummed += len(data)
            if self._copy_to is not None:
                self._copy_to(data)
        self._position += len(data)
        if self._checksummed == self._stat.size:
            found = base64.b64encode(self._checksum.digest()).decode()
            if found != self._stat.crc32c:
                raise ChecksumMismatch(f"{self._url}: crc32c is {found}, expected {self._stat.crc32c}")
        buffer[: len(data)] = data
        return len(data)
