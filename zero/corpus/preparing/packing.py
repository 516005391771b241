"""Packs documents into rows: which ones fill a row together.

Shapes: n tokens of a shard, m pieces of its documents, r rows, T tokens of a row.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np


@dataclass(frozen=True)
class Packed:
    """The index of each token (n,) in rows (r, T); the last `T - lengths` (r,) positions of a row are empty."""

    places: np.ndarray
    lengths: np.ndarray
    row_tokens: int
    truncations: int  # cuts of documents

    def rows(self, values: np.ndarray, filler: int) -> np.ndarray:
        """One value of each token (n,) as rows (r, T)."""
        rows = np.full((len(self.lengths), self.row_tokens), filler, values.dtype)
        rows.reshape(-1)[self.places] = values
        return rows


def best_fit(starts: np.ndarray, row_tokens: int) -> Packed:
    """Best-fit packing (arXiv 2404.10830, section 3) of documents that begin where `starts` (n,) is not 0.

    Documents longer than a row are cut into whole rows and a rest. Then each piece, the longest first, gets into the
    row with the least room that it fits into, or into a new one. Rows and their pieces keep the order of the source.
    """
    bounds = np.append(np.flatnonzero(starts), len(starts))
    first = [np.arange(start, stop, row_tokens) for start, stop in itertools.pairwise(bounds)]
    begins = np.concatenate([*first, np.zeros(0, np.int64)])  # of the pieces
    sizes = np.diff(np.append(begins, len(starts)))
    row_of = _rows(sizes, row_tokens)
    order = np.lexsort((begins, row_of))
    row_sizes = np.bincount(row_of, sizes).astype(np.int64)
    # The pieces of a row follow one another from its first column.
    ends = np.cumsum(sizes[order])
    before = (np.cumsum(row_sizes) - row_sizes)[row_of[order]]
    targets = np.empty_like(begins)
    targets[order] = row_of[order] * row_tokens + ends - sizes[order] - before
    places = np.arange(len(starts)) + np.repeat(targets - begins, sizes)
    return Packed(places, row_sizes.astype(np.int32), row_tokens, len(begins) - len(first))


def _rows(sizes: np.ndarray, row_tokens: int) -> np.ndarray:
    """The row of each piece (m,), numbered by their first pieces.

    >>> _rows(np.array([2, 5, 4, 3, 6]), 8).tolist()
    [0, 1, 2, 1, 0]
    """
    rooms: list[int] = []  # those that some row has left, in order
    rows_with: dict[int, list[int]] = {}  # by their room
    rows = 0
    row_of = np.empty(len(sizes), np.int64)
    for piece in np.argsort(-sizes, kind="stable"):
        size = int(sizes[piece])
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            row = rows
            room = row_tokens
            rows += 1
        else:
            room = rooms[at]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rooms[at]
        row_of[piece] = row
        if left := room - size:
            others = rows_with.setdefault(left, [])
            if not others:
                bisect.insort(rooms, left)
            others.append(row)
    _, firsts = np.unique(row_of, return_index=True)
    return np.argsort(np.argsort(firsts))[row_of]


# Values of --pack, besides `JOINED`.
PACKINGS: Mapping[str, Callable[[np.ndarray, int], Packed]] = MappingProxyType({"best-fit": best_fit})
DEFAULT = "best-fit"  # of completions
JOINED = "joined"  # documents follow each other without regard to rows
