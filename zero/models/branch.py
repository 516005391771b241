"""The interface of branches: parts of a model beside its layers, whose outputs some objectives need.

Shapes are named by suffix: B rows, T positions, D embedding
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax

from zero.models.experts import ResidualStream
from zero.partition.model_parallel import ModelParallel


class Place(NamedTuple):
    """The rows that a model sees; the first four as for `zero.models.gpt.GPT.scores`.

    Attributes:
      row_group: the group that shares these rows.
    """

    keys_B: jax.Array | None
    starts_BT: jax.Array | None
    position: jax.Array | int
    row_group: ModelParallel


class Branch(ABC):
    """A part of a model beside its layers: from the output of the last one to an entry of `Scores.extra`.

    A model has it if a key says so. An objective names it among its `needs`. Sampling and exports of the model leave it
    out. `zero.models.branches.BRANCHES` lists all of them.

    Attributes:
      key: of the model that makes it, and the name of its entry of `Scores.extra`.
      noun: what messages call it.
      example: a value of its key that makes it.
      subtrees: of its parameters, at the top.
      stack: the one of `subtrees` that is a stack of layers; None if it has none.
      is_left_out: exports leave it out unless an option `--with-KEY` names it, because transformers does not read it.
      words: of this option.
    """

    key: ClassVar[str]
    noun: ClassVar[str]
    example: ClassVar[str] = "true"
    subtrees: ClassVar[tuple[str, ...]]
    stack: ClassVar[str | None] = None
    is_left_out: ClassVar[bool] = False
    words: ClassVar[str] = ""

    @abstractmethod
    def modules(self, model: Any) -> Mapping[str, nn.Module]:
        """Its modules, by the names in `subtrees`; called in the `setup` of a `GPT`, whose attributes they become."""

    @abstractmethod
    def init(self, model: Any, hidden_BTD: jax.Array, place: Place) -> None:
        """Makes its parameters, from the output of the model's last norm."""

    @abstractmethod
    def output(self, model: Any, stream: ResidualStream, inputs: Any, place: Place) -> tuple[jax.Array, ResidualStream]:
        """Its entry of `Scores.extra`, and the stream with the routing of its own layers.

        Args:
          model: the `GPT`, with `modules` as attributes.
          stream: the output of the last layer.
          inputs: as the objective gives them (`zero.training.objectives.objective.Need`), of this device's positions.
        """

    @abstractmethod
    def inputs_like(self, tokens_BT: jax.Array) -> Any:
        """Inputs of the shapes for these tokens, to count products."""
