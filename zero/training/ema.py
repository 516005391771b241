"""A moving average of the parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from zero.base.keys import ONE, Check, key
from zero.partition.layout import PyTree
from zero.training.parts import Average

EMA = "ema"  # its name among the averages of a state


@dataclass(frozen=True)
class EmaKeys:
    """The key of the average, in section `training`."""

    ema: float | None = key(
        None,
        Check(lambda value: 0 < value < ONE, "more than 0, less than 1 in float32"),
        "Decay per update of a moving average of the weights, such as 0.999; its loss is logged as "
        "validation/ema_loss; null: off.",
        fixed=True,
    )


def make_ema(decay: float) -> Average:
    """A float32 average of the parameters, updated by `update_ema`."""
    return Average(
        init=lambda params, collections: jax.tree.map(lambda p: p.astype(jnp.float32), params),
        update=lambda ema, result, updates, key: update_ema(ema, result.params, decay, updates),
    )


def update_ema(ema: PyTree, params: PyTree, decay: float, updates: jax.Array | int) -> PyTree:
    """The average with the newest parameters added, as `optax.ema(decay, debias=True)` after `updates` updates.

    The weight of the newest is (1 - decay) / (1 - decay^updates): 1 at the first update, 1 - decay after many. So the
    initial parameters never enter, and the average is usable after one update.

    Element-wise: shards or whole arrays in and out, no communication.

    Source: Polyak and Juditsky (1992) for the average; Adam, arXiv 1412.6980, section 3, for the correction.

    >>> ema = update_ema({"w": 5.0}, {"w": 1.0}, 0.5, updates=1)
    >>> float(update_ema(ema, {"w": 4.0}, 0.5, updates=2)["w"])  # (0.25 * 1 + 0.5 * 4) / 0.75
    3.0
    """
    # expm1, because 1 - decay^updates loses precision if the decay is near 1.
    newest = (1 - decay) / -jnp.expm1(jnp.maximum(updates, 1) * math.log(decay))
    return optax.incremental_update(params, ema, jnp.minimum(newest, 1.0))
