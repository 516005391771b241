"""One training step at any stage of ZeRO, for one pmap: the table of `zero.partition.stages` around a GPT.

From stage 1 on the training state is always sharded; stage 0 is the same code with a layout that splits nothing. Call
inside pmap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from zero.partition.layout import Layout, PyTree, derive_layout
from zero.training.averages import averages_of
from zero.training.batch import Batch, Part
from zero.training.fused_update import fused_update
from zero.training.guard import init_guard, make_guard
from zero.training.parts import StepOptions, TrainState, Tried, unless
from zero.training.sharded_gpt import ShardedGPT
from zero.training.whole_gradient import whole_gradient

Step = Callable[..., tuple[TrainState, dict[str, jax.Array]]]


def make_step(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions) -> Step:
    """Composes the step: one attempted update from a device's rows, and metrics that are the same on every device.

    Its third argument are the frozen parameters of `model.tuning`, by default none. With `options.parts` it makes so
    many updates, and its metrics are `(parts,)`.

    Raises:
      ValueError: options cannot be combined.

    The step raises:
      NotElementwiseError: `tx` would be wrong on shards, or layer by layer where the update is fused.
    """
    if options.parts > 1:
        return _updates_by_part(model, tx, options)
    update = _make_update(model, tx, options)

    def step(state: TrainState, batch: Batch, frozen: PyTree = None) -> tuple[TrainState, dict[str, jax.Array]]:
        state, metrics, _ = update(state, batch, frozen)
        return state, metrics

    return step


def _updates_by_part(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions) -> Step:
    """One update after the other on the parts of each row.

    Source: `train_op` of Transformer-VQ (`ops/train.py`, branch main).

    Raises:
      ValueError: the model remembers nothing, or an option needs whole rows.
    """
    if model.config.layer != "gated_units" or options.fused_update:
        raise ValueError("updates on parts of rows need gated units, and no fused_update")
    # Every part has one token more than positions: the first of the next part is the target of its last position.
    of_parts = dataclasses.replace(model, last_target=True)
    update = _make_update(of_parts, tx, options)

    def step(state: TrainState, batch: Batch, frozen: PyTree = None) -> tuple[TrainState, dict[str, jax.Array]]:
        tokens = jnp.asarray(batch.tokens)
        if not model.last_target:
            tokens = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=-1)
        length = of_parts.positions_in(tokens) // options.parts
        columns = np.arange(options.parts)[:, None] * length + np.arange(length + 1)[None]
        tokens_of_parts = jnp.moveaxis(tokens[:, columns], 1, 0)
        empty = model.empty_memory(len(tokens) // options.micro_batches)
        memory = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (options.micro_batches, *x.shape)), empty)

        def update_on_part(carry: tuple[TrainState, PyTree], xs: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
            state, memory = carry
            tokens, number = xs
            part = batch._replace(tokens=tokens, part=Part(number, memory))
            state, metrics, memory = update(state, part, frozen)
            return (state, memory), metrics

        (state, _), metrics = lax.scan(update_on_part, (state, memory), (tokens_of_parts, jnp.arange(options.parts)))
        return state, metrics

    return step


def _make_update(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions) -> Callable[..., Any]:
    """An attempted update: `(state, batch, frozen parameters)` to the next state, metrics and `Tried.memory`."""
    attempt = (fused_update if options.fused_update else whole_gradient)(model, tx, options)
    conclude = make_conclusion(model, options)

    def update(state: TrainState, batch: Batch, frozen: PyTree) -> tuple[TrainState, dict[str, jax.Array], PyTree]:
        key = jax.random.fold_in(jax.random.key(options.seed), state.clock)
        key_of_rows = key
        if batch.part is not None:  # masks of a row are those of all its parts
            key_of_rows = jax.random.fold_in(jax.random.key(options.seed), state.clock - batch.part.number)
        rate = options.learning_rate(state.clock)
        tried = attempt.run(state, frozen, batch, rate, key_of_rows)
        state, metrics = conclude(state, tried, attempt.settle, rate, key)
        return state, metrics, tried.memory

    return update


def make_conclusion(model: ShardedGPT, options: StepOptions) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """What follows an attempt: `(state, tried, Attempt.settle, learning rate, key)` to the next state and metrics."""
    guard = make_guard(options)
    averages = averages_of(model, options)

    def conclude(
        state: TrainState, tried: Tried, settle: Callable[..., Any], rate: jax.Array, key: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        is_skipped, guard_state = guard(state.guard, tried)
        params, opt_state = settle(is_skipped, tried, state)
        updates = state.clock + 1 - state.guard.skipped_steps
        moved = {name: a.update(state.averages[name], tried, updates, key) for name, a in averages.items()}
        moved = unless(is_skipped, moved, state.averages)
        metrics = {"loss": tried.loss, "gradient_norm": tried.norm, "learning_rate": rate}
        state = TrainState(state.clock + 1, params, opt_state, moved, guard_state)
        return state, metrics | guard_state.counters | tried.metrics

    return conclude


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
