"""Decides which updates to skip: non-finite gradients, and spikes of the loss or of the gradient norm."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from zero.base.keys import Mistakes, at_least, key, positive
from zero.training.parts import Guard, GuardState, StepOptions, UpdateResult

# As in OLMo-core's SkipStepOptimizer: statistics of about 128 updates, used from the 64th on.
_DECAY = 1 - 1 / 128
_JUDGED_BY = 64


@dataclass(frozen=True)
class GuardKeys:
    """Which updates are skipped: keys of section `training`."""

    max_skipped_in_a_row: int = key(
        20,
        at_least(0),
        "A step whose gradient is not finite is skipped: weights and optimizer stay unchanged. More skipped steps in "
        "a row than this end the run with an error; 0: no step is skipped, and the first such step ends the run.",
    )
    skip_spikes: float | None = key(
        None,
        positive(),
        "Skip updates whose loss or gradient norm is more than this many standard deviations above its running mean, "
        "such as 6; null: off.",
    )

    @property
    def skips_bad_steps(self) -> bool:
        """Whether a step whose gradient is not finite leaves the state as it was."""
        return self.max_skipped_in_a_row > 0

    def skip_mistakes(self) -> Mistakes:
        if self.skip_spikes is not None and not self.max_skipped_in_a_row:
            yield "training.max_skipped_in_a_row", f"at least 1, as training.skip_spikes={self.skip_spikes}"


def init_guard() -> GuardState:
    """The state before the first update."""
    zero = jnp.int32(0)
    return GuardState(zero, zero, zero, jnp.zeros((2, 3), jnp.float32))


def make_guard(options: StepOptions) -> Guard:
    """A guard that decides from sums over all devices, so that all decide alike."""

    def judge(state: GuardState, result: UpdateResult) -> tuple[jax.Array | bool, GuardState]:
        seen = jnp.stack([result.loss, result.norm])
        is_spiking: jax.Array | bool = False
        if options.skip_spikes is not None:
            is_spiking = jnp.isfinite(result.norm) & is_spike(state.running, seen, options.skip_spikes)
        is_skipped = result.is_bad | is_spiking if options.skip_bad_steps else is_spiking
        skipped = jnp.asarray(is_skipped, jnp.int32)
        is_counted = jnp.isfinite(seen).all() & (skipped == 0)
        return is_skipped, GuardState(
            state.skipped_steps + skipped,
            skipped * (state.skipped_in_a_row + 1),
            state.skipped_spikes + jnp.asarray(is_spiking, jnp.int32),
            jnp.where(is_counted, add_to_running(state.running, seen), state.running),
        )

    return judge


def add_to_running(running: jax.Array, values: jax.Array) -> jax.Array:
    """Exponentially decaying statistics with one more value of each kind.

    `(kinds, 3)` and `(kinds,)` in: mean and variance without the bias of a start at zero, and the sum of all weights,
    1 - decay^n after n values. Start from zeros.

    Source: Finch, Incremental calculation of weighted mean and variance (2009), section 9; weights as in Adam.
    """
    mean, variance, weight = running.T
    weight = _DECAY * weight + (1 - _DECAY)
    share = (1 - _DECAY) / weight
    delta = values - mean
    return jnp.stack([mean + share * delta, (1 - share) * (variance + share * delta**2), weight], axis=1)


def is_spike(running: jax.Array, values: jax.Array, deviations: float) -> jax.Array:
    """Whether any value exceeds its running mean by this many running standard deviations.

    False for a NaN, and while there are too few values. PaLM (Chowdhery et al., arXiv 2204.02311, section 5.1) skipped
    the batches around a spike by hand; the rule is OLMo-core's SkipStepOptimizer's, for large values only.
    """
    mean, variance, weight = running.T
    is_judged = weight > 1 - _DECAY ** (_JUDGED_BY - 0.5)  # halfway between counts: sums of weights are rounded
    return jnp.any(is_judged & (values > mean + deviations * jnp.sqrt(variance)))
