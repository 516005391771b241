"""Which losses and gradient norms are far above their running means."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# As OLMo-core's SkipStepOptimizer: of the last 128 updates, and no update is judged by fewer than 64.
_DECAY, _JUDGED_BY = 1 - 1 / 128, 64


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
