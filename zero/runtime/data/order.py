"""The order of the data: arithmetic on the number of rows in each shard, no files.

A position is a single number, and finding it reads nothing (docs/decisions/data-order.md says why):

- An epoch lays all rows in a line, shard after shard in an order drawn from (seed, epoch).
- The line is cut into S *streams* of equal length, S a divisor of the global batch. Row r of every batch comes from
  stream r * S // global_rows, so a host opens the shards of its own streams only.
- A stream takes its part of the line in *windows* of a few shards, and permutes each window whole. To resume is to read
  one window a stream again.
- Streams run on from epoch to epoch. A row that does not divide goes to another stream in each epoch, so all streams
  have given the same number of rows whenever a batch is full, and no row is ever twice or missing.
- In a mixture every corpus has streams of its own, and row n of stream s is of the corpus that (weights, s, n) say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from zero.runtime.errors import UserError


class Piece(NamedTuple):
    """Rows start to stop of a shard."""

    shard: int
    start: int
    stop: int


class Window(NamedTuple):
    """Pieces that are permuted as one; `skip` rows of the result were already used."""

    pieces: tuple[Piece, ...]
    key: tuple[int, ...]
    skip: int


def permutation(n: int, *key: int) -> np.ndarray:
    # numpy promises the raw bits of a generator for ever, and the results of its shuffle for one version only.
    return np.argsort(np.random.PCG64(key).random_raw(n), kind="stable")


@dataclass(frozen=True)
class Order:
    rows: tuple[int, ...]  # of each shard
    streams: int
    window: int  # shards in a window of one stream
    seed: int | None  # None: as the shards stand
    epochs: int | None  # None: without end

    def windows(self, stream: int, row: int) -> Iterator[Window]:
        """The windows of a stream from its `row` on (rows are counted over all epochs)."""
        total, streams = sum(self.rows), self.streams
        # Stream s has given (e * N + s) // S rows before epoch e; over all streams that makes e * N.
        begin = row * streams // total  # or the epoch after it
        skip = row - (begin * total + stream) // streams
        for epoch in itertools.count(begin) if self.epochs is None else range(begin, self.epochs):
            before, after = (np.arange(streams) + e * total for e in (epoch, epoch + 1))
            ends = np.cumsum(after // streams - before // streams)
            first, last = (int(ends[stream - 1]) if stream else 0), int(ends[stream])
            for number, pieces in enumerate(self._cut(epoch, first, last)):
                rows = sum(piece.stop - piece.start for piece in pieces)
                if skip < rows:
                    yield Window(pieces, (self.seed or 0, epoch, stream, number), skip)
                skip = max(0, skip - rows)

    def _cut(self, epoch: int, first: int, last: int) -> Iterator[tuple[Piece, ...]]:
        """The windows that make up rows `first` to `last` of an epoch's line."""
        count = len(self.rows)
        order = np.arange(count) if self.seed is None else permutation(count, self.seed, epoch)
        ends = np.cumsum(np.asarray(self.rows)[order])
        pieces = []
        for place in range(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last, "left")) + 1):
            shard = int(order[place])
            begin = int(ends[place]) - self.rows[shard]
            pieces.append(Piece(shard, max(first - begin, 0), min(last - begin, self.rows[shard])))
        for i in range(0, len(pieces), self.window):
            yield tuple(pieces[i : i + self.window])


@dataclass(frozen=True)
class Mixture:
    """Which corpus each row of a stream is from."""

    weights: tuple[Fraction, ...]  # of each corpus; they sum to 1
    streams: int

    def counts(self, stream: int, row: int, count: int = 0) -> np.ndarray:
        """(corpora, 1 + count): how many rows of each corpus are among the first row, row + 1, ... of a stream.

        The first corpus takes its share of the rows, rounded down, the second its share of what that leaves, and so on:
        no count ever falls, and none drifts. Streams round at different rows, so that batches mix alike.
        """
        left, weight = row + np.arange(1 + count), Fraction(1)
        counts = []
        for own in self.weights[:-1]:
            share = own / weight
            step, whole = share.numerator * self.streams, share.denominator * self.streams
            first = int(left[0])  # exact, however large: Python's integers
            taken, rest = divmod(first * step + stream * share.denominator, whole)
            counts.append(taken + (rest + (left - first) * step) // whole)
            left, weight = left - counts[-1], weight - own
        return np.stack([*counts, left])


def normalised(weights: list[float]) -> tuple[Fraction, ...]:
    """Weights that sum to 1, exactly: as they are written, to a millionth."""
    exact = [Fraction(str(weight)).limit_denominator(10**6) for weight in weights]
    if min(exact) <= 0:
        raise UserError(f"the weights of a mixture must be positive, not {min(weights)}")
    return tuple(weight / sum(exact) for weight in exact)
