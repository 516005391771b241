"""The interface of an output: one thing that `mode=evaluate` makes of trained weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from zero.base.keys import Mistakes
from zero.inference.scoring import Scorer
from zero.models.config import GPTConfig


class Output(ABC):
    """One thing that `mode=evaluate` makes of trained weights; `zero.inference.config.outputs` is their table.

    An output is made of sections of the configuration. Its own keys are a dataclass `Keys` in it, which the section
    `evaluate` inherits. Made before any weights are read, it refuses keys that contradict each other or the model.

    Attributes:
      key: the key that asks for it, as messages name it.
      is_of_one_model: files are written for one set of weights: neither for each checkpoint of a run nor for several
        adapters.
    """

    key: ClassVar[str]
    is_of_one_model: ClassVar[bool] = False

    @property
    @abstractmethod
    def is_asked(self) -> bool:
        """Whether the keys ask for it; otherwise only `mistakes` is called."""

    def mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        """The contradictions between its keys, or beside the model: a key, and what was expected."""
        yield from ()

    def identity(self) -> dict[str, Any]:
        """What its scores depend on but for the weights and the keys with `in_scores`, as JSON."""
        return {}

    @abstractmethod
    def evaluate(self, scorer: Scorer) -> dict[str, Any]:
        """Its part of evaluation.json, for the weights of the scorer. All hosts call it."""
