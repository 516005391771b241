"""A column: values beside the rows of a corpus that an objective reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zero.partition.layout import PyTree


@dataclass(frozen=True)
class Column:
    """Values that are stored beside the index files, or computed for each batch.

    Attributes:
      stored: of each index file, by its name, arrays `(rows, ...)` by the names of their entries.
      identity: what tells these values from others; the run continues only with them. Empty: others see to it.
      compute: `(frozen parameters, tokens of this host's devices)` to entries for each of these devices.
    """

    stored: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    compute: Callable[[PyTree, Any], dict[str, Any]] | None = None
    identity: str = ""


@dataclass(frozen=True)
class ColumnInputs:
    """What columns are made from, beside the job and the position of a run.

    Attributes:
      indices: the index files that the run trains on and is evaluated on.
      context: tokens of a text.
      weights: `model.model_path`, where reference and base are.
      ema: whether the moving average of its weights is meant.
      scores: the values of the keys on which scores depend.
    """

    indices: tuple[str, ...]
    context: int
    weights: str
    ema: bool
    scores: Mapping[str, Any]
