"""AdEMAMix: Adam with a second, slow mean of gradients, which remembers thousands of steps (arXiv 2409.03137)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from zero.base.keys import at_least, fraction_below_one, key, named, zero_or_more
from zero.models.axes import Axes
from zero.training.optimizers import optimizer_keys as keys
from zero.training.optimizers.optimizer_keys import Optimizer
from zero.training.optimizers.weight_decay import decayed, decoupled


@dataclass(frozen=True)
class AdEMAMix(Optimizer):
    """AdamW with a second, slow mean of gradients, 12 bytes of state per parameter (arXiv 2409.03137)."""

    name: str = named("ademamix")
    b1: float = keys.b1(0.9)
    b2: float = keys.b2(0.999)
    b3: float = key(0.9999, fraction_below_one(), "Decay of the slow mean.", fixed=True)
    alpha: float = key(5.0, zero_or_more(), "Weight of the slow mean.", fixed=True)
    eps: float = keys.eps(1e-8)
    slow_warmup: int | None = key(
        None,
        at_least(1),
        "Steps over which alpha and the half-life of the slow mean grow to their values; null: constant.",
        "The paper uses all steps of the run.",
        fixed=True,
    )


def ademamix(
    weight_decay: float,
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.9999,
    alpha: float = 5.0,
    eps: float = 1e-8,
    slow_warmup: int | None = None,
    *,
    axes: Mapping[str, Axes],
) -> optax.GradientTransformation:
    """AdEMAMix without a learning rate: element-wise, and so correct on shards; three values of state per parameter.

    Args:
      weight_decay: for matrices and the vocabulary, multiplied by the learning rate.
      b1, b2, eps: as for Adam.
      b3: decay of the slow mean.
      alpha: the slow mean counts this many times.
      slow_warmup: steps until `alpha` and the half-life of the slow mean have grown to their values (section 3, from 0
        and from `b1`'s); None: they are constant.
      axes: of the parameters, by name.
    """
    if slow_warmup is None:
        return decoupled(optax.contrib.scale_by_ademamix(b1, b2, b3, alpha, eps), weight_decay, decayed(axes))
    logs = math.log(b1), math.log(b3)

    def share(count: jax.Array) -> jax.Array:
        return jnp.minimum((count + 1) / slow_warmup, 1.0)

    def decay_at(count: jax.Array) -> jax.Array:
        """The half-life, -ln 2 / ln b, grows by equal steps."""
        of_b1, of_b3 = logs
        return jnp.exp(of_b1 * of_b3 / ((1 - share(count)) * of_b3 + share(count) * of_b1))

    adam = optax.contrib.scale_by_ademamix(b1, b2, decay_at, lambda count: alpha * share(count), eps)
    return decoupled(adam, weight_decay, decayed(axes))
