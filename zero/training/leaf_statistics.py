"""Statistics of each leaf, from its weights before and after an update and its gradient: a table of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class LeafStatistic(NamedTuple):
    """One statistic of a leaf, an entry of `OF_LEAVES`.

    Attributes:
      title, unit: of its curves in the report.
      terms: `(weights before, weights after, gradient)`, float32, to arrays of their shape, which are added up.
      value: `(*totals, learning rate)` to the statistic.
      is_mean: totals are divided by the number of elements.
    """

    title: str
    unit: str
    terms: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]
    value: Callable[..., jax.Array]
    is_mean: bool = False


def _norm(total: jax.Array, rate: jax.Array) -> jax.Array:
    return jnp.sqrt(total)


def _ratio(change: jax.Array, weight: jax.Array, rate: jax.Array) -> jax.Array:
    """The root of the ratio of two totals; 0 if all weights are 0, like biases at first."""
    return jnp.where(weight > 0, jnp.sqrt(change / jnp.where(weight > 0, weight, 1)), 0)


# By the name of their metric. The gradient is that before clipping.
OF_LEAVES = {
    "change": LeafStatistic(
        "Change of each leaf",
        "mean |change| / learning rate",
        lambda before, after, gradient: (jnp.abs(after - before),),
        lambda mean, rate: mean / rate,
        is_mean=True,
    ),
    "gradient_norm": LeafStatistic(
        "Gradient of each leaf", "norm", lambda before, after, gradient: (jnp.square(gradient),), _norm
    ),
    "weight_norm": LeafStatistic(
        "Weights of each leaf", "norm", lambda before, after, gradient: (jnp.square(before),), _norm
    ),
    "update_ratio": LeafStatistic(  # about 1e-3 where a learning rate fits
        "Update of each leaf",
        "norm of the change / norm of the weights",
        lambda before, after, gradient: (jnp.square(after - before), jnp.square(before)),
        _ratio,
    ),
}
