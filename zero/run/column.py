"""A column: values beside the rows of a corpus that an objective reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zero.corpus.format.row_blocks import RowValues
from zero.partition.layout import PyTree


@dataclass(frozen=True)
class Column:
    """Values stored beside the index files, or computed for each batch.

    Attributes:
      stored: arrays `(rows, ...)`, keyed by index file and then by entry.
      identity: digests of the values for training, with spaces between them; a resumed run needs these. Empty: checked
        elsewhere.
      sets_identity: the same of the values for validation.
      compute: maps `(frozen parameters, tokens of this host's devices)` to the entries of these devices.
    """

    stored: Mapping[str, Mapping[str, RowValues]] = field(default_factory=dict)
    compute: Callable[[PyTree, Any], dict[str, Any]] | None = None
    identity: str = ""
    sets_identity: str = ""


@dataclass(frozen=True)
class ColumnInputs:
    """The inputs of columns, besides the job and the position of a run.

    Attributes:
      training: the index files for training.
      sets: those for validation.
      context: tokens per text.
      weights: `model.model_path`, the location of the reference and of the base.
      ema: whether to use the moving average of its weights.
      scores: the values of the keys that scores depend on.
    """

    training: tuple[str, ...]
    sets: tuple[str, ...]
    context: int
    weights: str
    ema: bool
    scores: Mapping[str, Any]

    @property
    def indices(self) -> tuple[str, ...]:
        """All index files, each once."""
        return tuple(dict.fromkeys((*self.training, *self.sets)))
