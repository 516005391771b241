"""Rows as a PyTorch dataset (torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from zero.base.errors import UserError
from zero.corpus.rows import Rows


class TorchRows(IterableDataset):
    """Batches as tensors, for `DataLoader(TorchRows(rows), batch_size=None)`.

    `state_dict` and `load_state_dict` are `Rows`'s own. torchdata's StatefulDataLoader calls them where the dataset
    is; a plain DataLoader with a worker leaves the state in it, so give that one `num_workers=0`.

    Raises:
      UserError: from a loader with several workers, because each would return all batches. `Rows` itself reads ahead.
    """

    def __init__(self, rows: Rows):
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise UserError(f"num_workers={worker.num_workers}: expected 0 or 1, because rows have one order")
        for tokens in self.rows:
            yield torch.from_numpy(tokens)

    def state_dict(self) -> dict[str, Any]:
        return self.rows.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows.restore(state)
