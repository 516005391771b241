"""What a step minimises.

A new objective is a file with its keys, a `Keys` that makes an `Objective`, and an entry of `zero.training.objectives`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from zero.config.keys import named
from zero.training.batch import Rows
from zero.training.sharded_gpt import ShardedGPT


@dataclasses.dataclass(frozen=True)
class Objective:
    """A mean of terms over the global batch, computed from the losses of tokens. Its functions run inside pmap.

    Attributes:
      count: `(model, tokens (R, T))` to the number of terms in this device's rows, int32. A psum counts each term once.
      total: `(model, losses, tokens, reference)` to the sum of these terms, and sums over them of the metrics. Per
        device: `losses` of `ShardedGPT.scores`, `tokens` and `reference` as in `Batch`. In a group that takes the same
        rows, values and gradients of all its devices add up to those of the rows.
      metrics: the names of further means over terms.
      rows: rows of a `Batch` that a row of the data consists of.
      has_reference: whether `total` needs the log-probabilities of a reference model.
    """

    count: Callable[[ShardedGPT, Rows], jax.Array]
    total: Callable[[ShardedGPT, jax.Array, Rows, Rows | None], tuple[jax.Array, dict[str, jax.Array]]]
    metrics: tuple[str, ...] = ()
    rows: int = 1
    has_reference: bool = False

    def count_all(self, model: ShardedGPT, tokens: Rows) -> jax.Array:
        """The terms of all devices, as a divisor: float32, at least 1."""
        return jnp.maximum(lax.psum(self.count(model, tokens), model.axis.name).astype(jnp.float32), 1)

    def means(self, model: ShardedGPT, sums: dict[str, jax.Array], terms: jax.Array) -> dict[str, jax.Array]:
        """`metrics` over all devices, from the sums of each."""
        return {name: lax.psum(x, model.axis.name) / terms for name, x in sums.items()}


# The mean negative log-likelihood of the scored tokens, in nats.
LIKELIHOOD = Objective(
    count=ShardedGPT.count_scored,
    total=lambda model, losses, tokens, reference: (model.sum_scored(losses, tokens), {}),
)


@dataclasses.dataclass
class Keys:
    """What all choices of the group `objective` have."""

    name: str

    def make(self) -> Objective:
        """The objective that these keys describe."""
        raise NotImplementedError


@dataclasses.dataclass
class Likelihood(Keys):
    """The likelihood of tokens."""

    name: str = named("likelihood")

    def make(self) -> Objective:
        return LIKELIHOOD
