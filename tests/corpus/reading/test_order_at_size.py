"""2,048 hosts, simulated: the order of the data is arithmetic, so that no host has to be there."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from zero.corpus.reading.order import Mixture, Order

HOSTS = 2048  # with a stream each


def random_rows(shards: int, key: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(key).integers(1, 400, shards).tolist())


def reads(order: Order, stream: int, start: int, count: int) -> list[tuple[int, int, int]]:
    """The ranges of rows that a stream reads for its rows from `start` on; the last buffer may hold more."""
    ranges: list[tuple[int, int, int]] = []
    left = count
    for buffer in order.buffers(stream, start):
        rows = sum(part.stop - part.start for part in buffer.ranges) - buffer.skip
        assert rows <= left, "an epoch does not end within a buffer"
        ranges += buffer.ranges
        left -= rows
        if not left:
            break
    return ranges


def times_read(order: Order, ranges: list[tuple[int, int, int]]) -> np.ndarray:
    """How often each row of the corpus is in one of the ranges (N,)."""
    begins = np.concatenate([[0], np.cumsum(order.rows)])
    changes = np.zeros(begins[-1] + 1, np.int64)
    for shard, start, stop in ranges:
        changes[begins[shard] + start] += 1
        changes[begins[shard] + stop] -= 1
    return np.cumsum(changes)[:-1]


@pytest.mark.wide
def test_each_row_is_read_by_one_host_per_epoch():
    order = Order(random_rows(4500, 0), HOSTS, 1, seed=3, epochs=2)
    total = sum(order.rows)
    for epoch in range(2):
        bounds = [
            ((epoch * total + stream) // HOSTS, ((epoch + 1) * total + stream) // HOSTS) for stream in range(HOSTS)
        ]
        of_hosts = [reads(order, stream, first, last - first) for stream, (first, last) in enumerate(bounds)]
        assert (times_read(order, list(itertools.chain.from_iterable(of_hosts))) == 1).all()
    assert max(len(ranges) for ranges in of_hosts) < 12  # of 4,500 shards


@pytest.mark.wide
def test_mixture_of_fifty_corpora():
    """After some batches no host has read a row that another one has, and each corpus has its share of the rows."""
    corpora = [Order(random_rows(2100 + number, number), HOSTS, 1, seed=number, epochs=1) for number in range(3)]
    weights = tuple(Fraction(number + 1, 1275) for number in range(50))  # they sum to 1
    mixture = Mixture(weights, HOSTS)
    rows_per_stream = 90
    counts = np.stack([mixture.counts(stream, 0, rows_per_stream) for stream in range(0, HOSTS, 64)])
    assert (counts.sum(axis=1) == np.arange(rows_per_stream + 1)).all()
    assert (np.diff(counts, axis=2) >= 0).all()
    share = counts[..., -1].mean(axis=0) / rows_per_stream
    assert np.abs(share - [float(weight) for weight in weights]).max() < 1 / rows_per_stream
    for corpus, number in zip(corpora, (0, 25, 49), strict=True):
        begun = [next(corpus.buffers(stream, 0)).ranges for stream in range(HOSTS)]  # what a host opens first
        assert times_read(corpus, list(itertools.chain.from_iterable(begun))).max() == 1, number
