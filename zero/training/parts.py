"""The parts of a training step: its state, its options, and the contracts of attempt, guard and average.

Each part is a few pure functions that run inside pmap. A new feature is a file with such functions, and one entry where
they are chosen: `make_step` for attempts, `averages_of` for averages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zero.base.keys import SMALLEST, Check, at_least, key
from zero.partition.layout import PyTree
from zero.training.batch import Batch
from zero.training.objectives.objective import LIKELIHOOD, Objective


class GuardState(NamedTuple):
    """Counters and statistics of the updates so far, the same on every device.

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
        """The counters, by metric name."""
        return {name: x for name, x in self._asdict().items() if name != "running"}


class TrainState(NamedTuple):
    """The state of one device between steps.

    Attributes:
      clock: updates attempted so far, int32.
      params: shards, in the dtypes of the model's layout.
      opt_state: shards.
      averages: the state of each average, by name.
      guard: counters and statistics that decide which updates are skipped.
    """

    clock: jax.Array
    params: PyTree
    opt_state: PyTree
    averages: dict[str, PyTree]
    guard: GuardState


@dataclasses.dataclass(frozen=True)
class GradientKeys:
    """The keys of a step's gradient, in section `training`."""

    gradient_accumulation_steps: int = key(
        1,
        at_least(1),
        "Micro-batches per optimizer step; more of them need less memory for activations.",
    )
    max_gradient_norm: float | None = key(
        1.0,
        Check(lambda value: value >= SMALLEST, "more than 0 in float32"),
        "Gradients are clipped to this global norm; null: off.",
    )
    max_gradient_value: float | None = key(
        None,
        Check(lambda value: value >= SMALLEST, "more than 0 in float32"),
        "Each element of the gradient is clipped to this absolute value, after the norm; null: off.",
    )


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a training step, each checked by the part that uses it.

    Attributes:
      learning_rate: maps the number of updates attempted so far to the rate.
      seed: seed of dropout and of all other random draws of a step.
      micro_batches: parts of a device's rows whose gradients are added up before the update.
      max_gradient_norm: gradients are clipped to this global norm; None: no clipping.
      max_gradient_value: each element of the gradient is then clipped to this absolute value; None: no clipping.
      skip_bad_steps: skip updates whose gradient is not finite, on all devices alike.
      skip_spikes: skip updates whose loss or gradient norm exceeds its running mean by this many running standard
        deviations; None: never.
      fused_update: update each layer inside the backward pass.
      streams_state: with `fused_update`, keep the layers' optimizer state in host memory between updates.
      ema_decay: decay per update of a moving average of the parameters; None: no average.
      objective: what a step minimizes.
      parts: updates per batch of rows; each takes the next part of every row. A model with memory
        remembers the parts before, and no gradient flows to these. 1: each update takes whole rows.
    """

    learning_rate: Callable[[jax.Array], jax.Array]
    seed: int = 0
    micro_batches: int = 1
    max_gradient_norm: float | None = None
    max_gradient_value: float | None = None
    skip_bad_steps: bool = True
    skip_spikes: float | None = None
    fused_update: bool = False
    streams_state: bool = False
    ema_decay: float | None = None
    objective: Objective = LIKELIHOOD
    parts: int = 1


class UpdateResult(NamedTuple):
    """The result of one attempted update. All but the shards are the same on every device.

    Attributes:
      params, opt_state: shards.
      loss: the objective, a mean over the global batch.
      norm: the gradient norm before clipping.
      is_bad: whether the gradient is not finite.
      collection_gradients: the gradient of each of the model's collections, summed over devices.
      metrics: further scalars to log.
      memory: the model's memory after a part of its rows; None for whole rows.
    """

    params: PyTree
    opt_state: PyTree
    loss: jax.Array
    norm: jax.Array
    is_bad: jax.Array
    collection_gradients: dict[str, PyTree]
    metrics: dict[str, jax.Array]
    memory: PyTree = None


class Update(NamedTuple):
    """How an update is computed.

    Attributes:
      compute: `(state, frozen parameters, this device's rows, learning rate, the step's random key)` to an
        `UpdateResult`.
      accept: `(is_skipped, result, state)` to the parameters and optimizer state to keep: the old ones if skipped.
        `is_skipped` is a traced bool, or the constant False where nothing is ever skipped.
    """

    compute: Callable[[TrainState, PyTree, Batch, jax.Array, jax.Array], UpdateResult]
    accept: Callable[[jax.Array | bool, UpdateResult, TrainState], tuple[PyTree, PyTree]]


# Which updates are skipped: `(its state, result)` to `is_skipped`, the same on every device, and its next state.
Guard = Callable[[GuardState, UpdateResult], tuple[jax.Array | bool, GuardState]]


class Average(NamedTuple):
    """State that follows the parameters; a skipped update leaves it unchanged.

    Attributes:
      init: from parameters, whole or shards, and the model's collections to its state.
      update: `(its state, result, updates made so far with this one, the step's random key)` to its next state.
    """

    init: Callable[[PyTree, dict[str, PyTree]], PyTree]
    update: Callable[[PyTree, UpdateResult, jax.Array, jax.Array], PyTree]


def unless(condition: jax.Array | bool, new: PyTree, old: PyTree) -> PyTree:
    """The old tree if the condition holds, else the new one; the constant False costs nothing."""
    if condition is False:
        return new
    return jax.tree.map(lambda new, old: jnp.where(condition, old, new), new, old)
