"""Prefetching: ahead of the consumer, and gone with it."""

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from tests.helpers.shards import loader
from zero.base.errors import UserError
from zero.corpus.reading.prefetch import prefetch


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
