"""Rows as a Grain dataset (grain)."""

from __future__ import annotations

from typing import Any

import grain
import numpy as np

from zero.corpus.rows import Rows


class GrainRows(grain.IterDataset[np.ndarray]):
    """Batches for Grain's transformations, such as `GrainRows(rows).map(shift)`.

    `get_state` and `set_state` of its iterators are `Rows`'s own, so that Orbax saves them with
    `grain.checkpoint.CheckpointSave`. Each iterator has its own rows, which start at the position of the dataset.
    """

    def __init__(self, rows: Rows):
        super().__init__()
        self._rows = rows

    def __iter__(self) -> grain.DatasetIterator[np.ndarray]:
        rows, arguments = self._rows.__reduce__()
        return _GrainIterator(rows(*arguments))


class _GrainIterator(grain.DatasetIterator[np.ndarray]):
    def __init__(self, rows: Rows):
        super().__init__()
        self._rows = rows
        self._batches = iter(rows)

    def __next__(self) -> np.ndarray:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        return self._rows.state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._rows.restore(state)
        self._batches = iter(self._rows)
