"""An exponential moving average of the weights, kept in shards as they are."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax

from zero.partition.layout import PyTree


def update_ema(
    ema: PyTree, params: PyTree, decay: float, updates: jax.Array | int, is_skipped: jax.Array | bool = False
) -> PyTree:
    """The average with the newest parameters added: after `updates` of them that of `optax.ema(decay, debias=True)`.

    The weight of the newest is (1 - decay) / (1 - decay^updates): 1 at the first update, 1 - decay after many. So the
    average never contains the parameters of before the first update, and is usable at once.

    Element-wise: shards or whole arrays in and out, no communication. A skipped update leaves the average as it was.

    Source: Polyak and Juditsky (1992) for the average; Adam, arXiv 1412.6980, section 3, for the correction.

    >>> ema = update_ema({"w": 5.0}, {"w": 1.0}, 0.5, updates=1)
    >>> float(update_ema(ema, {"w": 4.0}, 0.5, updates=2)["w"])  # (0.25 * 1 + 0.5 * 4) / 0.75
    3.0
    """
    # expm1, because 1 - decay^updates loses its digits where the decay is near 1.
    newest = (1 - decay) / -jnp.expm1(jnp.maximum(updates, 1) * math.log(decay))
    moved = optax.incremental_update(params, ema, jnp.minimum(newest, 1.0))
    return jax.tree.map(lambda new, old: jnp.where(is_skipped, old, new), moved, ema)
