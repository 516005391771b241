"""What a training step is composed of: its state, its options, and the contracts of attempt, guard and average.

Each part is a few pure functions that run inside pmap. A new feature is a file with such functions, and one entry where
they are chosen: `make_step` for attempts, `averages_of` for averages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zero.partition.layout import PyTree
from zero.training.batch import Batch


class GuardState(NamedTuple):
    """What is known of the updates so far, the same on every device.

    Attributes:
      skipped_steps: updates skipped so far, int32.
      skipped_in_a_row: updates skipped since the last one that was made, int32.
      skipped_spikes: those among `skipped_steps` that were spikes, int32.
      running: statistics of loss and gradient norm of the updates that were made, float32 `(2, 3)`, as
        `zero.training.guard.add_to_running` keeps them.
    """

    skipped_steps: jax.Array
    skipped_in_a_row: jax.Array
    skipped_spikes: jax.Array
    running: jax.Array

    @property
    def counters(self) -> dict[str, jax.Array]:
        """By the names of metrics."""
        return {name: x for name, x in self._asdict().items() if name != "running"}


class TrainState(NamedTuple):
    """What one device holds between steps.

    Attributes:
      clock: updates attempted so far, int32.
      params: shards, in the dtypes of the model's layout.
      opt_state: shards.
      averages: the state of each average, by name.
      guard: counters and statistics by which updates are skipped.
    """

    clock: jax.Array
    params: PyTree
    opt_state: PyTree
    averages: dict[str, PyTree]
    guard: GuardState


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What a step does besides computing a gradient and updating. Checked by the parts that they are for.

    Attributes:
      learning_rate: from the number of updates attempted so far to the rate.
      seed: of dropout, and of whatever else is drawn during a step.
      micro_batches: parts of a device's rows whose gradients are added up before the update.
      max_gradient_norm: gradients are clipped to this global norm; None: no clipping.
      skip_bad_steps: an update whose gradient is not finite leaves everything as it was, on all devices alike.
      skip_spikes: so does one whose loss or gradient norm exceeds its running mean by so many running standard
        deviations; None: no such update is skipped.
      fused_update: update each layer inside the backward pass.
      ema_decay: per update, of a moving average of the parameters; None: there is none.
    """

    learning_rate: Callable[[jax.Array], jax.Array]
    seed: int = 0
    micro_batches: int = 1
    max_gradient_norm: float | None = None
    skip_bad_steps: bool = True
    skip_spikes: float | None = None
    fused_update: bool = False
    ema_decay: float | None = None


class Tried(NamedTuple):
    """What one attempted update has made. All but the shards are the same on every device.

    Attributes:
      params, opt_state: shards.
      loss: the mean over all tokens scored in the global batch.
      norm: of the gradient before it was clipped.
      is_bad: whether the gradient is not finite.
      found: of each of the model's collections its gradient, summed over devices.
      metrics: what else is logged of this update, one scalar each.
    """

    params: PyTree
    opt_state: PyTree
    loss: jax.Array
    norm: jax.Array
    is_bad: jax.Array
    found: dict[str, PyTree]
    metrics: dict[str, jax.Array]


class Attempt(NamedTuple):
    """How an update is computed.

    Attributes:
      run: `(state, this device's rows, learning rate, the step's random key)` to the update.
      settle: `(is_skipped, update, state)` to the parameters and optimizer state after it: those of before where it is
        skipped. `is_skipped` is a bool on every device, or False where nothing is ever skipped.
    """

    run: Callable[[TrainState, Batch, jax.Array, jax.Array], Tried]
    settle: Callable[[jax.Array | bool, Tried, TrainState], tuple[PyTree, PyTree]]


class Guard(NamedTuple):
    """Which updates are skipped.

    Attributes:
      init: to the state before the first update.
      judge: `(its state, the update)` to whether the update is skipped, and its next state. The former is a bool, the
        same on every device; False, not an array, where nothing is ever skipped.
    """

    init: Callable[[], GuardState]
    judge: Callable[[GuardState, Tried], tuple[jax.Array | bool, GuardState]]


class Average(NamedTuple):
    """Something that follows the training, and that a skipped update leaves as it was.

    Attributes:
      init: from parameters, whole or shards, and the model's collections to its state.
      update: `(its state, the update, updates made so far with this one, the step's random key)` to its next state.
    """

    init: Callable[[PyTree, dict[str, PyTree]], PyTree]
    update: Callable[[PyTree, Tried, jax.Array, jax.Array], PyTree]


def unless(condition: jax.Array | bool, new: PyTree, old: PyTree) -> PyTree:
    """The new tree, or the old one where a condition holds; False, not an array, costs nothing."""
    if condition is False:
        return new
    return jax.tree.map(lambda new, old: jnp.where(condition, old, new), new, old)
