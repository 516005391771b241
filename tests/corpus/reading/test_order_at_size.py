"""2,048 hosts, simulated: the order of the data is arithmetic, so that no host has to be there."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from tests.helpers.shards import Unsliced
from zero.corpus.reading import order as order_module
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


def test_shards_are_ordered_once_per_epoch(monkeypatch: pytest.MonkeyPatch):
    """All streams share the order of an epoch, and what is before a shard is added up once."""
    ordered = []
    drawn = order_module.permutation

    def counted(n: int, *key: int) -> np.ndarray:
        ordered.append(key)
        return drawn(n, *key)

    monkeypatch.setattr(order_module, "permutation", counted)
    order = Order(Unsliced(random_rows(600, 0)), 8, 2, seed=3, epochs=3)
    streams = [order.buffers(stream, 0) for stream in range(8)]
    for buffers in itertools.zip_longest(*streams):
        for buffer in filter(None, buffers):
            assert all(order.first_rows[part.shard + 1] <= order.total for part in buffer.ranges)
    assert ordered == [(3, 0), (3, 1), (3, 2)]


@pytest.mark.parametrize("edge", [2**31, 2**32, 2**53, 2**63, 2**64])
def test_positions_at_the_edges_of_integers(edge: int):
    """Rows that all streams have given so far, below, at and above numbers that fixed integers or floats end at."""
    order = Order((5, 3, 9, 2), 4, 1, seed=1, epochs=None)
    for first in (edge // 19 * 19 - 19 * 2, edge // 19 * 19):  # whole epochs of all streams
        for stream in range(4):
            row = (first + stream) // 4
            buffer = next(order.buffers(stream, row))
            assert buffer.key[1:3] == (first // 19, stream) and buffer.skip == 0
        of_streams = [list(itertools.islice(order.buffers(stream, (first + stream) // 4), 40)) for stream in range(4)]
        epochs = [
            [part for buffer in buffers if buffer.key[1] == first // 19 for part in buffer.ranges]
            for buffers in of_streams
        ]
        assert (times_read(order, list(itertools.chain.from_iterable(epochs))) == 1).all()


def test_shards_of_many_rows():
    """A corpus of 2^53 rows in shards of 2^31 - 1, as many as a shard of a bucket may have."""
    order = Order((2**31 - 1,) * 2**22, 16, 1, seed=None, epochs=1)
    assert order.total == (2**31 - 1) * 2**22
    last = next(order.buffers(15, order.total // 16 - 1)).ranges[-1]
    assert last == (2**22 - 1, last.start, 2**31 - 1)
