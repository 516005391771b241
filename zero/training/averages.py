"""Moving averages: of the weights, and of losses and gradient norms, by which a spike is judged."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax

from zero.partition.layout import PyTree

# As OLMo-core's SkipStepOptimizer: of the last 128 updates, and no update is judged by fewer than 64.
_DECAY, _JUDGED_BY = 1 - 1 / 128, 64


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


def add_to_running(running: jax.Array, values: jax.Array) -> jax.Array:
    """Exponentially decaying statistics with one more value of each kind.

    `(kinds, 3)` and `(kinds,)` in: mean and variance without the bias of a start at zero, and the sum of all weights,
    1 - decay^n after n values. The first value finds zeros.

    Source: Finch, Incremental calculation of weighted mean and variance (2009), section 9; weights as in Adam.
    """
    mean, variance, weight = running.T
    weight = _DECAY * weight + (1 - _DECAY)
    share = (1 - _DECAY) / weight
    delta = values - mean
    return jnp.stack([mean + share * delta, (1 - share) * (variance + share * delta**2), weight], axis=1)


def is_spike(running: jax.Array, values: jax.Array, deviations: float) -> jax.Array:
    """Whether any value exceeds its running mean by so many running standard deviations.

    Too few values judge nothing, and a NaN is no spike. PaLM (Chowdhery et al., arXiv 2204.02311, section 5.1) skipped
    the batches around a spike by hand; the rule is that of OLMo-core's SkipStepOptimizer, for what is too large alone.
    """
    mean, variance, weight = running.T
    is_judged = weight > 1 - _DECAY ** (_JUDGED_BY - 0.5)  # between two counts: sums of weights are rounded
    return jnp.any(is_judged & (values > mean + deviations * jnp.sqrt(variance)))
