"""Which tokens of a row become sequences, where rows are longer than the context.

Shapes: n rows of a sample, R tokens of a row, T tokens of a sequence (the context), k sequences of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

Draw = Callable[[int], np.ndarray]  # a number to raw random bits, uint64, that depend on the row and the epoch only


def _first(lengths: np.ndarray, row_tokens: int, context: int, draw: Draw) -> np.ndarray:
    return np.zeros((len(lengths), 1), np.int64)


def _all(lengths: np.ndarray, row_tokens: int, context: int, draw: Draw) -> np.ndarray:
    starts = np.arange(0, row_tokens - context + 1, context)
    return np.broadcast_to(starts, (len(lengths), len(starts)))


def _random(lengths: np.ndarray, row_tokens: int, context: int, draw: Draw) -> np.ndarray:
    # Where a row ends in padding, no sequence begins in it.
    choices = np.maximum(lengths, context).astype(np.uint64) - np.uint64(context - 1)
    return (draw(len(lengths)) % choices).astype(np.int64)[:, None]


# Values of data.crop, and `(lengths (n,), R, T, draw)` to the first token of each sequence, (n, k).
CROPS: Mapping[str, Callable[[np.ndarray, int, int, Draw], np.ndarray]] = MappingProxyType(
    {"first": _first, "all": _all, "random": _random}
)


@dataclass(frozen=True)
class Crop:
    """How the rows of a corpus are cut: a key of `CROPS`, and the number of sequences that each row gives.

    >>> Crop.of_rows("all", 1024, 256), Crop.of_rows("first", 1024, 256)
    (Crop(name='all', sequences=4), Crop(name='first', sequences=1))
    """

    name: str = "first"
    sequences: int = 1

    @classmethod
    def of_rows(cls, name: str, row_tokens: int, context: int) -> Crop:
        """The cut of rows of this length. Rows shorter than the context, which a reader refuses, count as one."""
        return cls(name, max(1, row_tokens // context) if name == "all" else 1)

    def starts(self, lengths: np.ndarray, row_tokens: int, context: int, draw: Draw) -> np.ndarray:
        """The first token of each sequence, (n, k), of rows that hold `lengths` (n,) tokens and then padding.

        Raises:
          ValueError: the rows give another number of sequences than those that the order was made for.
        """
        starts = CROPS[self.name](lengths, row_tokens, context, draw)
        if starts.shape[1] != self.sequences:
            raise ValueError(
                f"{starts.shape[1]} sequences of {context} tokens, and the first row gives {self.sequences}"
            )
        return starts


def cut(array: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """The sequences (n * k, T) of rows (n, R) that begin at `starts` (n, k).

    >>> cut(np.arange(10).reshape(2, 5), np.array([[0], [2]]), 3).tolist()
    [[0, 1, 2], [7, 8, 9]]
    """
    if starts.shape[1] == 1 and not starts.any():
        return array[:, :context]
    windows = np.lib.stride_tricks.sliding_window_view(array, context, axis=1)
    return windows[np.arange(len(array))[:, None], starts].reshape(-1, context)


def lengths_after(lengths: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """The number of tokens of each sequence (n * k,) that are not padding."""
    return np.clip(lengths[:, None] - starts, 0, context).reshape(-1)
