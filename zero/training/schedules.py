"""What changes with the step: the learning rate and the context."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
from jax.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """Linear warmup to `peak` over `warmup_steps`, then a cosine to `end` at `total_steps`.

    Called with the number of updates attempted before this one: the first update already moves, the last one is made
    at `end`.

    >>> float(LearningRate(1.0, 0.1, warmup_steps=4, total_steps=10)(0))
    0.25
    """

    peak: float
    end: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: ArrayLike) -> jax.Array:
        schedule = optax.warmup_cosine_decay_schedule(0.0, self.peak, self.warmup_steps, self.total_steps, self.end)
        return schedule(step + 1)


@dataclasses.dataclass(frozen=True)
class Context:
    """Staged sequence-length warmup: short sequences first, at an unchanged number of tokens per step.

    Source: Li et al., The Stability-Efficiency Dilemma, arXiv 2108.06084.

    Attributes:
      full: tokens of a sequence after the warmup, `max_context`.
      warmup: tokens of a sequence during the warmup; divides `full`.
      warmup_steps: steps with the short context.
    """

    full: int
    warmup: int
    warmup_steps: int

    def __post_init__(self) -> None:
        if self.warmup_steps and self.full % self.warmup:
            raise ValueError(f"max_context {self.full} does not divide into warmup_train_context {self.warmup}")

    def at(self, step: int) -> int:
        """Tokens of a sequence at this step."""
        return self.warmup if step < self.warmup_steps else self.full

    def cut(self, tokens: np.ndarray, step: int) -> np.ndarray:
        """Cuts rows `(B, full)` into `(B * full / context, context)`; the pieces of a row stay neighbours."""
        return tokens.reshape(-1, self.at(step))
