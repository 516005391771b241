"""Arrays of one entry per row, stored beside a corpus: a digest of each block of rows, compared when it is read first.

A start costs no more for a larger array, and no value is used before it has been compared.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from zero.base.errors import UserError

_BLOCK_BYTES = 4 << 20


class RowValues(Protocol):
    """What a loader reads beside rows: an array `(rows, ...)`, or what reads its rows from a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def __getitem__(self, rows: Any) -> np.ndarray: ...


def rows_per_block(shape: Sequence[int]) -> int:
    """Rows of four-byte numbers in a block of about 4 MiB.

    >>> rows_per_block((1_000_000, 2048, 32)), rows_per_block((10, 2, 1))
    (16, 524288)
    """
    return max(1, _BLOCK_BYTES // (4 * max(1, math.prod(shape[1:]))))


class BlockDigests:
    """The SHA-256 of each block of so many rows, which arrive in order and in portions of any size."""

    def __init__(self, block_rows: int) -> None:
        self._block_rows = block_rows
        self._rows = 0  # of the block in progress
        self._digest = hashlib.sha256()
        self._finished: list[str] = []

    def add(self, rows: np.ndarray) -> None:
        while len(rows):
            part = rows[: self._block_rows - self._rows]
            self._digest.update(np.ascontiguousarray(part).data)
            self._rows += len(part)
            rows = rows[len(part) :]
            if self._rows == self._block_rows:
                self._finish()

    def _finish(self) -> None:
        self._finished.append(self._digest.hexdigest())
        self._digest = hashlib.sha256()
        self._rows = 0

    def finish(self) -> list[str]:
        """The digests of all blocks; the last one may be shorter."""
        if self._rows:
            self._finish()
        return self._finished


@dataclass(frozen=True)
class CheckedRows:
    """An array on a disk whose blocks of rows are compared with their digests, each when it is read first.

    Attributes:
      array: `(rows, ...)`, usually a memory map.
      digests: of the blocks; empty if an earlier version has stored none.
      path, remedy: for messages.
      problem: says what is wrong with the values of a block, if anything is.
      last: of the last dimension only so many are read; None: all.
    """

    array: np.ndarray
    digests: Sequence[str]
    block_rows: int
    path: str
    remedy: str
    problem: Callable[[np.ndarray], str | None] | None = None
    last: int | None = None
    _compared: set[int] = field(default_factory=set)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape if self.last is None else (*self.array.shape[:-1], self.last)

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def cut(self, last: int) -> CheckedRows:
        """The same rows with the first `last` entries of the last dimension."""
        return replace(self, last=last, _compared=set())

    def __getitem__(self, rows: slice) -> np.ndarray:
        """These rows.

        Raises:
          UserError: a block of them is not what was stored, or holds impossible values.
        """
        start, stop, _ = rows.indices(len(self.array))
        for block in range(start // self.block_rows, -(-stop // self.block_rows)):
            if block not in self._compared:
                self._compare(block)
                self._compared.add(block)
        return self._used(self.array[start:stop])

    def _used(self, values: np.ndarray) -> np.ndarray:
        return values if self.last is None else values[..., : self.last]

    def _compare(self, block: int) -> None:
        values = self.array[block * self.block_rows : (block + 1) * self.block_rows]
        first = block * self.block_rows
        place = f"{self.path}, rows {first} to {first + len(values) - 1}"
        if self.digests and hashlib.sha256(np.ascontiguousarray(values).data).hexdigest() != self.digests[block]:
            raise UserError(f"{place}: other values than were stored, by their SHA-256; {self.remedy}")
        if self.problem is not None and (problem := self.problem(self._used(values))):
            raise UserError(f"{place}: {problem}; {self.remedy}")


class JoinedRows:
    """The rows of several arrays, one after the other; each is read from its own."""

    def __init__(self, parts: Sequence[RowValues]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.shape[0] for part in parts))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._ends[-1], *self._parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return np.result_type(*(part.dtype for part in self._parts))

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self._ends[-1])
        pieces = []
        for number in range(bisect_right(self._ends, start), len(self._parts)):
            before = self._ends[number] - self._parts[number].shape[0]
            if before >= stop:
                break
            pieces.append(self._parts[number][max(0, start - before) : stop - before])
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces)
