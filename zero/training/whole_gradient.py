"""An attempt that computes the whole gradient, from one or more micro-batches, before the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zero.models.experts import no_routing
from zero.partition.layout import PyTree
from zero.partition.sharded_optimizer import clip, on_shards
from zero.training.batch import Batch
from zero.training.optimizers.optimizer import clip_values, scaled
from zero.training.parts import StepOptions, TrainState, Update, UpdateResult, unless
from zero.training.sharded_gpt import ShardedGPT


def whole_gradient(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions) -> Update:
    """An attempt that clips by the norm of the whole gradient; it needs memory for all gradient shards.

    `compute` raises:
      NotElementwiseError: `tx` would be wrong on shards.
    """

    def compute(state: TrainState, frozen: PyTree, batch: Batch, rate: jax.Array, key: jax.Array) -> UpdateResult:
        loss, grads, collection_grads, metrics, memory = loss_and_gradients(model, state, frozen, batch, key, options)
        norm = model.gradient_norm(grads)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        if options.max_gradient_norm is not None:
            grads = clip(grads, norm, options.max_gradient_norm)
        if options.max_gradient_value is not None:
            grads = clip_values(grads, options.max_gradient_value)
        optimizer = on_shards(scaled(tx, rate, state.clock), model.layout, model.axis)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        for name, collection in model.collections.items():
            metrics |= collection.metrics(state.averages[name])
        return UpdateResult(params, opt_state, loss, norm, ~jnp.isfinite(norm), collection_grads, metrics, memory)

    def accept(is_skipped: jax.Array | bool, result: UpdateResult, state: TrainState) -> tuple[PyTree, PyTree]:
        params, opt_state = unless(is_skipped, (result.params, result.opt_state), (state.params, state.opt_state))
        return params, opt_state

    return Update(compute, accept)


def loss_and_gradients(
    model: ShardedGPT, state: TrainState, frozen: PyTree, batch: Batch, key: jax.Array, options: StepOptions
) -> tuple[jax.Array, PyTree, dict[str, PyTree], dict[str, jax.Array], PyTree]:
    """The objective of the global batch, its gradient as shards (whole at stage 0) in `gradient_dtype`, and more.

    Further results: the gradients of the model's collections, summed over devices; metrics of routing and of the
    objective; and what the model remembers after a part of its rows, None of whole rows.
    """
    objective = options.objective
    micro_batches = options.micro_batches
    if micro_batches == 1 and model.axis.replicas > 1:  # a layer's sum crosses while other layers compute
        model = dataclasses.replace(model, sums_copies=True)
    tokens = batch.tokens
    keys = model.dropout_keys(key, batch)
    terms = objective.count_all(model, batch.tokens)
    positions = model.axis.size // model.axis.row_group * len(tokens) * model.positions_in(tokens)
    prepared = {
        name: collection.prepare(state.averages[name], positions) for name, collection in model.collections.items()
    }
    variables = model.gather_params(model.weights(state.params, prepared, frozen))

    def loss_of(
        differentiated: dict[str, PyTree],
        memory: PyTree,
        tokens: jax.Array,
        keys: jax.Array | None,
        extra: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, Any]:
        part = None if batch.part is None else batch.part._replace(memory=memory)
        rows = batch._replace(tokens=tokens, extra=extra)
        inputs = objective.inputs(model, rows)
        scores, memory = model.scores_and_memory({**variables, **differentiated}, tokens, keys, part, inputs)
        total, sums = objective.sum_losses(model, scores, rows)
        return total / terms, (scores.routing, sums, memory)

    def value_and_grad(*arguments: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        (loss, (routing, sums, memory)), grads = jax.value_and_grad(loss_of, has_aux=True)(*arguments)
        return (loss, routing, sums), grads, memory

    zeros = jnp.float32(0), no_routing(model.config, len(tokens) // micro_batches), objective.zeros()
    differentiated = {name: variables[name] for name in (model.differentiated, *model.collections)}
    memory = None if batch.part is None else batch.part.memory
    rows = (tokens, keys, batch.extra)
    (loss, routing, sums), grads, memory = _accumulate(
        value_and_grad, zeros, differentiated, memory, rows, micro_batches
    )
    collection_grads = {name: lax.psum(grads[name], model.axis.name) for name in model.collections}
    metrics = model.metrics(routing, batch) | objective.means(model, sums, terms)
    return (
        lax.psum(loss, model.axis.name),
        model.reduce_grads(grads[model.differentiated]),
        collection_grads,
        metrics,
        memory,
    )


def _accumulate(
    value_and_grad: Callable[..., tuple[PyTree, PyTree, PyTree]],
    zeros: PyTree,
    params: PyTree,
    memory: PyTree,
    rows: PyTree,
    micro_batches: int,
) -> tuple[PyTree, PyTree, PyTree]:
    """Sums of values and gradients over micro-batches, in sequence, and their memories; gradients in float32.

    Args:
      value_and_grad: function of parameters, and the memory and the rows of a micro-batch, to values, gradients, and
        the next memory.
      zeros: initial sums of the values.
      memory: of each micro-batch, arrays of `(micro_batches, ...)`; or None.
      rows: its further arguments for all micro-batches, arrays of `(rows, ...)` or None.
    """
    if micro_batches == 1:
        values, grads, memory = value_and_grad(params, jax.tree.map(lambda x: x[0], memory), *rows)
        return values, grads, jax.tree.map(lambda x: x[None], memory)

    def add(sums: tuple[PyTree, PyTree], xs: tuple[PyTree, PyTree]) -> tuple[tuple[PyTree, PyTree], PyTree]:
        memory, micro_batch = xs
        values, grads, memory = value_and_grad(params, memory, *micro_batch)
        return jax.tree.map(jnp.add, sums, (values, grads)), memory

    zero_grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    split = jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), rows)
    (values, grads), memory = lax.scan(add, (zeros, zero_grads), (memory, split))
    return values, grads, memory
