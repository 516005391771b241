"""The order of the data: arithmetic on the number of rows in each shard, without reading any file.

A position is one number, and any position is found in the same time (reasons: docs/decisions/data-order.md):

- An epoch is a line of all rows, shard after shard, the shards in an order drawn from (seed, epoch).
- The line is cut into S *streams* of equal length, where S divides the global batch. Row r of every batch comes from
  stream r * S // global_rows, so a host opens only the shards of its own streams.
- A stream goes through its part of the line in *shuffle buffers* of a few neighboring shards and permutes the rows of
  each buffer. A resume reads one buffer per stream again.
- Streams continue from epoch to epoch. Rows that do not divide by S go to another stream in each epoch, so that all
  streams have given the same number of rows whenever a batch is full, and no row is repeated or lost.
- In a mixture every corpus has its own streams, and (weights, s, n) determine the corpus of row n of stream s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from zero.base.errors import UserError
from zero.corpus.format.index_files import Weight


class RowRange(NamedTuple):
    """Rows start to stop of a shard."""

    shard: int
    start: int
    stop: int


class ShuffleBuffer(NamedTuple):
    """Row ranges whose rows are permuted together; the first `skip` rows of the result were already used."""

    ranges: tuple[RowRange, ...]
    key: tuple[int, ...]  # of the permutation
    skip: int


def permutation(n: int, *key: int) -> np.ndarray:
    # numpy guarantees the raw bits of a generator in all versions, but the results of its shuffle only within one.
    return np.argsort(np.random.PCG64(key).random_raw(n), kind="stable")


@dataclass(frozen=True)
class Order:
    rows: tuple[int, ...]  # of each shard
    streams: int
    buffer_shards: int  # in one shuffle buffer of one stream
    seed: int | None  # None: in the order of the shards
    epochs: int | None  # None: without end

    def buffers(self, stream: int, row: int) -> Iterator[ShuffleBuffer]:
        """The shuffle buffers of a stream, beginning with its `row` (rows are counted over all epochs)."""
        total = sum(self.rows)
        streams = self.streams
        # Stream s has given (e * N + s) // S rows before epoch e; over all streams that makes e * N.
        begin = row * streams // total  # or the epoch after it
        skip = row - (begin * total + stream) // streams
        for epoch in itertools.count(begin) if self.epochs is None else range(begin, self.epochs):
            before, after = (np.arange(streams) + e * total for e in (epoch, epoch + 1))
            ends = np.cumsum(after // streams - before // streams)
            first = int(ends[stream - 1]) if stream else 0
            last = int(ends[stream])
            for number, ranges in enumerate(self._cut(epoch, first, last)):
                rows = sum(part.stop - part.start for part in ranges)
                if skip < rows:
                    yield ShuffleBuffer(ranges, (self.seed or 0, epoch, stream, number), skip)
                skip = max(0, skip - rows)

    def _cut(self, epoch: int, first: int, last: int) -> Iterator[tuple[RowRange, ...]]:
        """Rows `first` to `last` of an epoch's line, as the row ranges of each shuffle buffer."""
        count = len(self.rows)
        order = np.arange(count) if self.seed is None else permutation(count, self.seed, epoch)
        ends = np.cumsum(np.asarray(self.rows)[order])
        ranges = []
        for place in range(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last, "left")) + 1):
            shard = int(order[place])
            begin = int(ends[place]) - self.rows[shard]
            ranges.append(RowRange(shard, max(first - begin, 0), min(last - begin, self.rows[shard])))
        for i in range(0, len(ranges), self.buffer_shards):
            yield tuple(ranges[i : i + self.buffer_shards])


@dataclass(frozen=True)
class Mixture:
    """Determines the corpus of each row of a stream."""

    weights: tuple[Fraction, ...]  # of each corpus; they sum to 1
    streams: int

    def counts(self, stream: int, row: int, count: int = 0) -> np.ndarray:
        """How many of the first n rows of a stream are of each corpus, for n from row to row + count.

        Shape `(corpora, 1 + count)`.

        The first corpus takes its share of the rows, rounded down, the second its share of the rest, and so on: no
        count ever decreases, and none drifts from its weight. Streams round at different rows, so that batches are
        mixed alike.
        """
        rows_left = row + np.arange(1 + count)
        weight_left = Fraction(1)
        counts = []
        for weight in self.weights[:-1]:
            share = weight / weight_left if weight else weight  # no weight is left after the last corpus that has one
            step = share.numerator * self.streams
            whole = share.denominator * self.streams
            first = int(rows_left[0])  # exact, however large: Python's integers
            quotient, remainder = divmod(first * step + stream * share.denominator, whole)
            counts.append(quotient + (remainder + (rows_left - first) * step) // whole)
            rows_left = rows_left - counts[-1]
            weight_left = weight_left - weight
        return np.stack([*counts, rows_left])


@dataclass(frozen=True)
class StagedMixture:
    """Mixtures in order: the first row of a stream that each determines, from 0 on, and its weights."""

    stages: tuple[tuple[int, Mixture], ...]

    def counts(self, stream: int, row: int, count: int = 0) -> np.ndarray:
        """Like `Mixture.counts`; each stage counts on from where the one before ended.

        >>> half, first = Mixture(exact_weights([1, 1]), 1), Mixture(exact_weights([1, 0]), 1)
        >>> StagedMixture(((0, half), (4, first))).counts(0, 2, 5).tolist()
        [[1, 1, 2, 3, 4, 5], [1, 2, 2, 2, 2, 2]]
        """
        total: np.ndarray | None = None
        ends = [first for first, _ in self.stages[1:]] + [row + count]
        for (first, mixture), end in zip(self.stages, ends, strict=True):
            start = min(max(row, first), max(end, first)) - first
            stop = min(max(row + count, first), max(end, first)) - first
            before = min(max(first - row, 0), count)
            after = count - before - (stop - start)
            part = np.pad(mixture.counts(stream, start, stop - start), ((0, 0), (before, after)), mode="edge")
            total = part if total is None else total + part
        assert total is not None
        return total


def weight_stages(weights: Iterable[Weight]) -> list[tuple[int, list[float]]]:
    """The steps from which other weights hold, and the weight of each corpus from then on.

    >>> weight_stages([0.7, [[0, 0.3], [500, 1]]])
    [(0, [0.7, 0.3]), (500, [0.7, 1])]
    """
    curves = [_curve(weight) for weight in weights]
    for curve in curves:
        lowest = min(curve.values())
        if lowest < 0 or not any(curve.values()):
            raise UserError(f"the weights of a mixture must be positive, not {lowest}")
    steps = sorted(set().union(*curves))
    return [(step, [_weight_at(curve, step) for curve in curves]) for step in steps]


def _curve(weight: Weight) -> dict[int, float]:
    """The weights of a corpus by the steps at which they begin."""
    if isinstance(weight, int | float):
        return {0: weight}
    return {int(step): value for step, value in weight}


def _weight_at(curve: dict[int, float], step: int) -> float:
    """The weight that holds at a step.

    >>> _weight_at({0: 0.3, 500: 1}, 499)
    0.3
    """
    return curve[max(first for first in curve if first <= step)]


def exact_weights(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """The weights, to a millionth as they are written in decimal, divided by their sum."""
    exact = [Fraction(str(weight)).limit_denominator(10**6) for weight in weights]
    if not sum(exact):
        raise UserError("the weights of a mixture must be positive, one of them at least at each step")
    return tuple(weight / sum(exact) for weight in exact)
