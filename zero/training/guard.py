"""Which updates are skipped: those whose gradient is not finite, and spikes of the loss or of the gradient norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# As OLMo-core's SkipStepOptimizer: of the last 128 updates, and no update is judged by fewer than 64.
_DECAY, _JUDGED_BY = 1 - 1 / 128, 64


class GuardState(NamedTuple):
    """What is known of the updates so far, the same on every device.

    Attributes:
      skipped_steps: updates skipped so far, int32.
      skipped_in_a_row: updates skipped since the last one that was made, int32.
      skipped_spikes: those among `skipped_steps` that were spikes, int32.
      running: statistics of loss and gradient norm of the updates that were made, float32 `(2, 3)`, as
        `add_to_running` keeps them.
    """

    skipped_steps: jax.Array
    skipped_in_a_row: jax.Array
    skipped_spikes: jax.Array
    running: jax.Array

    @property
    def counters(self) -> dict[str, jax.Array]:
        """By the names of metrics."""
        return {name: x for name, x in self._asdict().items() if name != "running"}


class Guard(NamedTuple):
    """A pair of pure functions.

    Attributes:
      init: to the state before the first update.
      judge: `(state, loss, gradient norm, whether the gradient is not finite)` to whether the update is skipped, and
        the next state. The former is False, not an array, where nothing is ever skipped.
    """

    init: Callable[[], GuardState]
    judge: Callable[[GuardState, jax.Array, jax.Array, jax.Array], tuple[jax.Array | bool, GuardState]]


def init_guard() -> GuardState:
    """Before the first update; the same whatever is skipped."""
    zero = jnp.int32(0)
    return GuardState(zero, zero, zero, jnp.zeros((2, 3), jnp.float32))


def make_guard(skip_bad_steps: bool, skip_spikes: float | None) -> Guard:
    """Decides from sums over all devices, so that the decision is the same everywhere; options as of `StepOptions`."""

    def judge(
        state: GuardState, loss: jax.Array, norm: jax.Array, is_bad: jax.Array
    ) -> tuple[jax.Array | bool, GuardState]:
        seen = jnp.stack([loss, norm])
        is_high: jax.Array | bool = False
        if skip_spikes is not None:
            is_high = jnp.isfinite(norm) & is_spike(state.running, seen, skip_spikes)
        is_skipped = is_bad | is_high if skip_bad_steps else is_high
        skipped = jnp.asarray(is_skipped, jnp.int32)
        is_counted = jnp.isfinite(seen).all() & (skipped == 0)
        return is_skipped, GuardState(
            state.skipped_steps + skipped,
            skipped * (state.skipped_in_a_row + 1),
            state.skipped_spikes + jnp.asarray(is_high, jnp.int32),
            jnp.where(is_counted, add_to_running(state.running, seen), state.running),
        )

    return Guard(init_guard, judge)


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
