"""Shards in memory: read whole, at once, into memory that is used again."""

from __future__ import annotations

import io
import os
import threading
from typing import BinaryIO, Protocol

import numpy as np


class Stream(Protocol):
    """What a tar is read from: a file, or `Memory`."""

    def read(self, size: int, /) -> bytes | memoryview: ...
    def seek(self, offset: int, whence: int, /) -> int: ...


class ReadBuffer(threading.local):
    """Memory of each thread, into which it reads one file after the other.

    The pages of new memory cost more than the reading, because the kernel clears them.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def read(self, file: BinaryIO) -> memoryview:
        """All bytes of a file that was just opened, until the next call in the same thread."""
        if isinstance(file, io.BytesIO):  # it is in memory already
            return memoryview(file.getvalue())
        size = os.fstat(file.fileno()).st_size
        if size > len(self._memory):
            self._memory = np.empty(size, np.uint8).data
        data = self._memory[: file.readinto(self._memory[:size])]  # type: ignore[attr-defined]
        more = file.read()  # of a file that has grown, or whose size is not known
        if not more:
            return data
        return memoryview(bytes(data) + more)


class Memory:
    """A shard whose bytes are in memory; its members are views, which copy nothing.

    >>> memory = Memory(memoryview(b"header and rows"))
    >>> memory.seek(11, os.SEEK_CUR), bytes(memory.read(9))
    (11, b'rows')
    """

    def __init__(self, data: memoryview):
        self.data = data
        self.at = 0

    def read(self, size: int) -> memoryview:
        part = self.data[self.at : self.at + size]
        self.at += len(part)
        return part

    def seek(self, offset: int, whence: int) -> int:
        self.at += offset
        return self.at


def reused(array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array in the memory of another, whose contents it overwrites, or in new memory if that one does not suffice.

    >>> before = np.zeros((4, 2), np.int32)
    >>> reused(before[1:], (3, 2), before.dtype).base is before, reused(before, (5, 2), before.dtype).base is before
    (True, False)
    """
    whole = array if array.base is None else array.base
    size = int(np.prod(shape))
    if not isinstance(whole, np.ndarray) or whole.dtype != dtype or whole.size < size:
        return np.empty(shape, dtype)
    return whole.reshape(-1)[:size].reshape(shape)
