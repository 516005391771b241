"""One training step at any stage of ZeRO, for one pmap: the table of `zero.partition.stages` around a GPT.

From stage 1 on the training state is always sharded; stage 0 is the same code with a layout that splits nothing. Call
inside pmap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero.partition.layout import Layout, PyTree, derive_layout
from zero.training.averages import averages_of
from zero.training.batch import Batch
from zero.training.fused_update import fused_update
from zero.training.guard import init_guard, make_guard
from zero.training.parts import StepOptions, TrainState, UpdateResult, unless
from zero.training.sharded_gpt import ShardedGPT
from zero.training.whole_gradient import whole_gradient

Step = Callable[..., tuple[TrainState, dict[str, jax.Array]]]
UpdateFunction = Callable[[TrainState, Batch, PyTree], tuple[TrainState, dict[str, jax.Array], PyTree]]


def make_step(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions) -> Step:
    """Composes the step: one attempted update from a device's rows, and metrics that are the same on every device.

    Its third argument are the frozen parameters of `model.tuning`, by default none.

    Raises:
      ValueError: options cannot be combined.

    The step raises:
      NotElementwiseError: `tx` would be wrong on shards, or layer by layer where the update is fused.
    """
    update = make_update(model, tx, options)

    def step(state: TrainState, batch: Batch, frozen: PyTree = None) -> tuple[TrainState, dict[str, jax.Array]]:
        state, metrics, _ = update(state, batch, frozen)
        return state, metrics

    return step


def make_update(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions) -> UpdateFunction:
    """An attempted update: `(state, batch, frozen parameters)` to the next state, metrics and `UpdateResult.memory`."""
    rule = (fused_update if options.fused_update else whole_gradient)(model, tx, options)
    finish = make_finish(model, options)

    def update(state: TrainState, batch: Batch, frozen: PyTree) -> tuple[TrainState, dict[str, jax.Array], PyTree]:
        key = jax.random.fold_in(jax.random.key(options.seed), state.clock)
        key_of_rows = jax.random.fold_in(jax.random.key(options.seed), batch.first_clock(state.clock))
        rate = options.learning_rate(state.clock)
        result = rule.compute(state, frozen, batch, rate, key_of_rows)
        state, metrics = finish(state, result, rule.accept, rate, key)
        return state, metrics, result.memory

    return update


def make_finish(model: ShardedGPT, options: StepOptions) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """What follows an attempt: `(state, result, Update.accept, learning rate, key)` to the next state and metrics."""
    guard = make_guard(options)
    averages = averages_of(model, options)

    def finish(
        state: TrainState, result: UpdateResult, accept: Callable[..., Any], rate: jax.Array, key: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        is_skipped, guard_state = guard(state.guard, result)
        params, opt_state = accept(is_skipped, result, state)
        updates = state.clock + 1 - state.guard.skipped_steps
        moved = {name: a.update(state.averages[name], result, updates, key) for name, a in averages.items()}
        moved = unless(is_skipped, moved, state.averages)
        metrics = {"loss": result.loss, "gradient_norm": result.norm, "learning_rate": rate}
        state = TrainState(state.clock + 1, params, opt_state, moved, guard_state)
        return state, metrics | guard_state.counters | result.metrics

    return finish


def new_state(
    weights: PyTree, tx: optax.GradientTransformation, model: ShardedGPT, options: StepOptions | None
) -> TrainState:
    """The initial state for these weights: whole, or shards if `tx` is for shards."""
    params, collections = model.split(weights)
    started = {name: average.init(params, collections) for name, average in averages_of(model, options).items()}
    return TrainState(jnp.int32(0), params, tx.init(params), started, init_guard())


def state_layout(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions | None = None) -> Layout:
    """The layout of the state; its arrays are the same at every stage. Options may add averages to the model's."""

    def start(params: PyTree) -> TrainState:
        return new_state({**params, **model.new_collections(jax.random.key(0))}, tx, model, options)

    return derive_layout(start, model.layout)
