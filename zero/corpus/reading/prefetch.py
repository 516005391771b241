"""Reading ahead in background threads: the next shuffle buffer of a stream, and the next batches of a loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from zero.corpus.format.shards import RowArrays
from zero.corpus.reading.order import ShuffleBuffer

_Item = TypeVar("_Item")


class RowStream:
    """The rows of one stream in order. The next shuffle buffer is read while one is in use.

    Args:
      read: from a shuffle buffer and rows that were used, whose memory it may take, to its rows.
    """

    def __init__(
        self,
        buffers: Iterator[ShuffleBuffer],
        read: Callable[[ShuffleBuffer, RowArrays], RowArrays],
        pool: ThreadPoolExecutor,
    ):
        self._buffers = buffers
        self._read = read
        self._pool = pool
        self._rows = RowArrays(np.empty((0, 0)), np.empty(0), {})  # the shuffle buffer in use
        self._used = 0  # rows of it
        self._next = self._read_ahead(self._rows)

    def _read_ahead(self, used: RowArrays) -> Future[RowArrays] | None:
        buffer = next(self._buffers, None)
        if buffer is None:
            return None
        return self._pool.submit(self._read, buffer, used)

    @property
    def left(self) -> int:
        """Rows of the shuffle buffer in use that are still to be taken."""
        return len(self._rows.lengths) - self._used

    def take(self, count: int) -> RowArrays:
        """The next rows; after the end, rows without tokens.

        They are views of the shuffle buffer if it has all of them, valid until the next call.
        """
        parts: list[RowArrays] = []
        while count:
            if not self.left:
                if self._next is None:
                    parts.append(self._rows.empty(count))
                    break
                parts = [part.copy() for part in parts]  # because others are read into their memory
                used = self._rows
                self._rows = self._next.result()
                self._used = 0
                self._next = self._read_ahead(used)
                continue
            ready = min(count, self.left)
            parts.append(self._rows.at(slice(self._used, self._used + ready)))
            self._used += ready
            count -= ready
        return RowArrays.concatenated(parts)


def prefetch(iterator: Iterator[_Item], depth: int = 2, stop: Sequence[Any] = ()) -> Generator[_Item, None, None]:
    """The same items, up to `depth` of them made ahead in a background thread.

    An exception of the iterator is raised here, in its place. When the consumer stops, so do the thread and the
    iterator. As soon as `stop` is not empty the generator ends without waiting for the item that is being made.

    >>> list(prefetch(iter("abc")))
    ['a', 'b', 'c']
    """
    end: Any = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead = deque(pool.submit(next, iterator, end) for _ in range(depth))
        while True:
            next_one = ahead.popleft()
            while not wait([next_one], timeout=0.1).done:
                if stop:
                    return
            if (item := next_one.result()) is end:
                return
            ahead.append(pool.submit(next, iterator, end))
            yield item
    finally:
        pool.shutdown(wait=not stop, cancel_futures=True)
        if isinstance(iterator, Generator) and not stop:
            iterator.close()
