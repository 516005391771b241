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
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from zero.base.errors import UserError
from zero.base.keys import INT64
from zero.corpus.format.index_files import Weight

SMALLEST_WEIGHT = 0.000001  # of a corpus that is read


class RowRange(NamedTuple):
    """Rows start to stop of a shard."""

    shard: int
    start: int
    stop: int


class _Line(NamedTuple):
    """The shards of an epoch in their order, and the number of rows until the end of each: int64 (shards,)."""

    shards: np.ndarray
    ends: np.ndarray


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
    _newest_line: dict[int, _Line] = field(default_factory=dict, init=False, repr=False, compare=False)  # by its epoch

    @property
    def total(self) -> int:
        """The rows of an epoch."""
        return int(self.first_rows[-1])

    @cached_property
    def first_rows(self) -> np.ndarray:
        """The number of rows before each shard, and before the end: int64 (shards + 1,)."""
        return np.concatenate([[0], np.cumsum(self.rows, dtype=np.int64)])

    def buffers(self, stream: int, row: int) -> Iterator[ShuffleBuffer]:
        """The shuffle buffers of a stream, beginning with its `row` (rows are counted over all epochs)."""
        total = self.total
        streams = self.streams
        # Stream s has given (e * N + s) // S rows before epoch e; over all streams that makes e * N.
        begin = row * streams // total  # or the epoch after it
        skip = row - (begin * total + stream) // streams
        for epoch in itertools.count(begin) if self.epochs is None else range(begin, self.epochs):
            first, last = (
                self._given((epoch + 1) * total, until) - self._given(epoch * total, until)
                for until in (stream, stream + 1)
            )
            for number, ranges in enumerate(self._cut(epoch, first, last)):
                rows = sum(part.stop - part.start for part in ranges)
                if skip < rows:
                    yield ShuffleBuffer(ranges, (self.seed or 0, epoch, stream, number), skip)
                skip = max(0, skip - rows)

    def _given(self, rows: int, streams: int) -> int:
        """How many of the first rows of all streams the first `streams` of them give: (rows + s) // S for each s."""
        each, rest = divmod(rows, self.streams)
        return each * streams + max(0, rest + streams - self.streams)

    def _line(self, epoch: int) -> _Line:
        """The shards of an epoch in order. It is kept for the other streams, which need it about the same time."""
        line = self._newest_line.get(epoch)
        if line is None:
            count = len(self.rows)
            shards = np.arange(count) if self.seed is None else permutation(count, self.seed, epoch)
            line = _Line(shards, np.cumsum(np.diff(self.first_rows)[shards]))
            self._newest_line.clear()
            self._newest_line[epoch] = line
        return line

    def _cut(self, epoch: int, first: int, last: int) -> Iterator[tuple[RowRange, ...]]:
        """Rows `first` to `last` of an epoch's line, as the row ranges of each shuffle buffer."""
        line = self._line(epoch)

        def range_at(place: int) -> RowRange:
            shard = int(line.shards[place])
            begin = int(line.ends[place]) - self.rows[shard]
            return RowRange(shard, max(first - begin, 0), min(last - begin, self.rows[shard]))

        begin = int(np.searchsorted(line.ends, first, "right"))
        places = range(begin, int(np.searchsorted(line.ends, last, "left")) + 1)
        for i in range(0, len(places), self.buffer_shards):
            yield tuple(map(range_at, places[i : i + self.buffer_shards]))


@dataclass(frozen=True)
class Mixture:
    """Determines the corpus of each row of a stream."""

    weights: tuple[Fraction, ...]  # of each corpus; they sum to 1
    streams: int

    @cached_property
    def _shares(self) -> list[Fraction]:
        """The share of each corpus but the last in the rows that the corpora before it leave."""
        shares = []
        left = Fraction(1)
        for weight in self.weights[:-1]:
            shares.append(weight / left if weight else weight)  # nothing is left after the last one that has a weight
            left -= weight
        return shares

    def counts(self, stream: int, row: int, count: int = 0) -> np.ndarray:
        """How many of the first n rows of a stream are of each corpus, for n from row to row + count.

        int64 `(corpora, 1 + count)`.

        The first corpus takes its share of the rows, rounded down, the second its share of the rest, and so on: no
        count ever decreases, and none drifts from its weight. Streams round at different rows, so that batches are
        mixed alike.
        """
        rows_left = row + np.arange(1 + count)
        counts = []
        for share in self._shares:
            counts.append(self._rounded_down(share, stream, rows_left))
            rows_left = rows_left - counts[-1]
        return np.stack([*counts, rows_left])

    def _rounded_down(self, share: Fraction, stream: int, rows: np.ndarray) -> np.ndarray:
        """`share * n + stream / streams`, rounded down, for each n of ascending `rows` (n,).

        Shares may have hundreds of digits, so that products are Python's integers: one for each row that is taken.
        """
        part, whole = share.numerator * self.streams, share.denominator * self.streams
        offset = stream * share.denominator
        before, after = ((n * part + offset) // whole for n in (int(rows[0]), int(rows[-1])))
        # The smallest n with `c` rows, for each number c that is reached.
        reached = [-((offset - c * whole) // part) for c in range(before + 1, after + 1)]
        return before + np.searchsorted(np.array(reached, np.int64), rows, "right")

    def overflowed_at(self, count: int) -> bool:
        """Whether `counts` of so many rows may have been wrong in versions that computed it in int64 alone."""
        parts = [share.numerator * self.streams for share in self._shares]
        wholes = [share.denominator * self.streams for share in self._shares]
        # A larger whole was an error, so that no run has it; another one wrapped around after some rows.
        largest = max((whole + count * part for part, whole in zip(parts, wholes, strict=True)), default=0)
        return max(wholes, default=0) <= INT64 < largest


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
    """The weights divided by their sum, each rounded to the nearest fraction with a denominator of at most a million.

    Numbers of six decimals are such fractions. Others are off by a millionth of themselves at most.

    Raises:
      UserError: no weight is positive, or one is so small that it would be rounded to nothing.

    >>> exact_weights([0.5, 0.25, 0.25])
    (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4))
    """
    for weight in weights:
        if 0 < weight < SMALLEST_WEIGHT:
            raise UserError(
                f"the weights of a mixture: expected 0, or at least {SMALLEST_WEIGHT}, not {weight}. Multiply all of "
                "them by the same number; 0 leaves a corpus out"
            )
    exact = [Fraction(str(weight)).limit_denominator(10**6) for weight in weights]
    if not sum(exact):
        raise UserError("the weights of a mixture must be positive, one of them at least at each step")
    return tuple(weight / sum(exact) for weight in exact)
