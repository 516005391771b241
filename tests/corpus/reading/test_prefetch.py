"""Prefetching: ahead of the consumer, and gone with it."""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.helpers.shards import loader
from zero.base.errors import UserError
from zero.corpus.format.memory import reused
from zero.corpus.format.shards import RowArrays
from zero.corpus.reading.order import ShuffleBuffer
from zero.corpus.reading.prefetch import RowStream, prefetch


def test_prefetch_works_ahead_and_stops():
    made: list[int] = []
    closed = threading.Event()

    def numbers():
        try:
            for i in itertools.count():
                made.append(i)
                yield i
        finally:
            closed.set()

    source = numbers()
    ahead = prefetch(source, depth=3)
    assert next(ahead) == 0
    deadline = time.monotonic() + 900
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [next(ahead), next(ahead)] == [1, 2]
    ahead.close()
    assert closed.is_set()
    assert len(made) <= 6
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_prefetch_hands_errors_on():
    def numbers():
        yield 1
        raise UserError("shard x is bad")

    ahead = prefetch(numbers())
    assert next(ahead) == 1
    with pytest.raises(UserError, match="shard x is bad"):
        next(ahead)


def test_loader_threads_end_with_the_consumer(corpus):
    before = set(threading.enumerate())
    ahead = prefetch(loader(corpus([5, 4, 2])).batches())
    next(ahead)
    assert len(threading.enumerate()) > len(before)
    ahead.close()
    assert set(threading.enumerate()) <= before


def test_prefetch_stops_at_once() -> None:
    """A prefetch that is told to stop does not wait."""
    released = threading.Event()

    def slow() -> Iterator[int]:
        yield 1
        released.wait(900)
        yield 2

    stop: list[int] = []
    items = prefetch(slow(), stop=stop)
    assert next(items) == 1
    threading.Timer(0.3, stop.append, [15]).start()
    assert list(items) == []  # it would wait for 2
    assert not released.is_set()
    released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("prefetch"):
            thread.join()


def test_rows_across_two_buffers_outlive_the_first():
    """Rows of a buffer that ends are taken together with those of the next, while others are read into its memory."""
    memories: list[np.ndarray] = []

    def read(buffer: ShuffleBuffer, used: RowArrays) -> RowArrays:
        tokens = reused(used.tokens, (3, 2), np.dtype(np.int32))
        tokens[:] = buffer.skip
        memories.append(tokens)
        return RowArrays(tokens, np.full(3, 2, np.int32), {})

    class AtOnce(ThreadPoolExecutor):
        """Reads ahead before the rows are used: the worst case of a race."""

        def submit(self, *call):  # type: ignore[override]
            future = super().submit(*call)
            future.result()
            return future

    with AtOnce(1) as pool:
        stream = RowStream((ShuffleBuffer((), (), number) for number in range(5)), read, pool)
        taken = [stream.take(2).tokens[:, 0].tolist() for _ in range(7)]
    assert taken == [[0, 0], [0, 1], [1, 1], [2, 2], [2, 3], [3, 3], [4, 4]]
    assert len({tokens.ctypes.data for tokens in memories}) == 2  # and no other memory is taken
