"""One training step at any stage of ZeRO, for one pmap: the table of `zero.partition.stages` around a GPT.

From stage 1 on the training state is always sharded; stage 0 is the same code with a layout that splits nothing. All
of this is called inside pmap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from zero.models.experts import ResidualStream, Routing, no_routing, routing_metrics
from zero.models.gated_unit import CODEBOOK
from zero.partition.layout import Layout, PyTree, derive_layout
from zero.partition.sharded_optimizer import global_norm, on_shards
from zero.partition.stages import shard
from zero.training.batch import Batch, row_keys
from zero.training.fused_update import Guard, backward_and_update, unless
from zero.training.optimizer import scaled
from zero.training.running_averages import add_to_running, is_spike, update_codebook, update_ema, with_commitment
from zero.training.sharded_gpt import ShardedGPT, group_size


class TrainState(NamedTuple):
    """What one device holds between steps.

    Attributes:
      step: updates attempted, int32.
      params: shards, in the dtypes of the model's layout.
      opt_state: shards.
      skipped: updates skipped so far, int32.
      skipped_in_a_row: updates skipped since the last one that was made, int32.
      skipped_spikes: those among `skipped` that were spikes, int32.
      running: statistics of the updates that were made, float32 `(2, 3)`, as `add_to_running` keeps them.
      ema: the moving average of the parameters, float32 shards, or None where none is kept.
      codebook: that of vector-quantised keys, whole and the same on every device, or None where there is none.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    skipped_spikes: jax.Array
    running: jax.Array
    ema: PyTree = None
    codebook: PyTree = None

    @property
    def weights(self) -> PyTree:
        """As `ShardedGPT.join` makes them."""
        return ShardedGPT.join(self.params, self.codebook)

    @property
    def averaged_weights(self) -> PyTree:
        """The same with the moving average in place of the parameters."""
        return ShardedGPT.join(self.ema, self.codebook)


def new_state(weights: PyTree, tx: optax.GradientTransformation, has_ema: bool = False) -> TrainState:
    """The state of a run that starts with these weights: whole, or shards where `tx` is for shards."""
    params, codebook = ShardedGPT.split(weights)
    zero, running = jnp.int32(0), jnp.zeros((2, 3), jnp.float32)
    ema = jax.tree.map(lambda p: p.astype(jnp.float32), params) if has_ema else None
    return TrainState(zero, params, tx.init(params), zero, zero, zero, running, ema, codebook)


def state_layout(model: ShardedGPT, tx: optax.GradientTransformation, has_ema: bool = False) -> Layout:
    """How the whole state is split; the same logical arrays at every stage."""

    def start(params: PyTree) -> TrainState:
        return new_state(model.join(params, model.new_codebook(jax.random.key(0))), tx, has_ema)

    return derive_layout(start, model.layout)


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: ShardedGPT,
    tx: optax.GradientTransformation,
    learning_rate: Callable[[jax.Array], jax.Array],
    seed: int,
    micro_batches: int,
    max_gradient_norm: float | None,
    skip_bad_steps: bool = True,
    skip_spikes: float | None = None,
    fused_update: bool = False,
    ema_decay: float | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One attempted update from this device's rows, and its metrics, which are the same on every device.

    The loss is the mean over all tokens scored in the global batch. With `skip_bad_steps` a gradient that is not finite
    leaves parameters and optimizer state as they were, on all devices alike; with `skip_spikes` so does a loss or a
    gradient norm that exceeds its running mean by so many running standard deviations. Every update that is applied
    also moves the average of the parameters, `ema`, with `ema_decay`, and the codebook of vector-quantised keys, if the
    model has one, by all keys of the global batch.

    Raises:
      NotElementwiseError: `tx` would be wrong on shards, or layer by layer where the update is fused.
      ValueError: `fused_update` beside what it cannot do exactly.
    """
    keys = row_keys(seed, state.step, batch) if model.config.has_dropout else None
    scored = lax.psum(model.count_scored(batch.tokens), model.axis.name).astype(jnp.float32)
    scored, rate = jnp.maximum(scored, 1), learning_rate(state.step)
    tx = scaled(tx, rate, state.step)

    is_bad, is_high = jnp.bool_(False), jnp.bool_(False)
    found = None
    if fused_update:
        if state.codebook is not None:
            raise ValueError("fused_update does not sum what a codebook of keys needs")
        if model.stage != 3 or model.remat not in ("full", "nested") or micro_batches > 1 or skip_spikes is not None:
            raise ValueError("fused_update needs stage 3, full or nested remat, one micro-batch and no skip_spikes")
        guard, model = Guard(max_gradient_norm, skip_bad_steps), dataclasses.replace(model, sums_copies=True)
        loss, params, opt_state, norm, is_bad, routing = _fused(state, batch.tokens, keys, scored, model, tx, guard)
    else:
        loss, grads, routing, found = _loss_and_gradients(model, state, batch.tokens, keys, scored, micro_batches)
        layout, axis = model.layout, model.axis
        if model.stage == 0 and axis.tensor == 1:
            # From slices here too: the same sums in the same order as at the other stages, so equal bit for bit.
            norm = global_norm(shard(grads, model.sharded_layout, axis), model.sharded_layout, axis)
        else:
            norm = global_norm(grads, layout, axis)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        if max_gradient_norm is not None:
            shrink = jnp.minimum(1.0, max_gradient_norm / norm)
            grads = jax.tree.map(lambda g: g * shrink, grads)

        updates, opt_state = on_shards(tx, layout, axis).update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # Of sums over all devices: the decision is the same everywhere.
        if skip_bad_steps:
            is_bad = ~jnp.isfinite(norm)
        if skip_spikes is not None:
            is_high = jnp.isfinite(norm) & is_spike(state.running, jnp.stack([loss, norm]), skip_spikes)
        if skip_bad_steps or skip_spikes is not None:
            params, opt_state = unless(is_bad | is_high, (params, opt_state), (state.params, state.opt_state))
    ema = state.ema
    if ema_decay is not None:
        ema = update_ema(ema, params, ema_decay, state.step + 1 - state.skipped, is_bad | is_high)
    codebook = state.codebook
    if codebook is not None:
        moved = update_codebook(codebook, found, jax.random.fold_in(jax.random.key(seed), state.step))
        codebook = unless(is_bad | is_high, moved, codebook)
    state = _next_state(state, params, opt_state, ema, codebook, is_bad, is_high, jnp.stack([loss, norm]))
    metrics = {
        "loss": loss,
        "gradient_norm": norm,
        "learning_rate": rate,
        "skipped_steps": state.skipped,
        "skipped_in_a_row": state.skipped_in_a_row,
        "skipped_spikes": state.skipped_spikes,
    }
    return state, metrics | _routing_metrics(routing, batch, model)


def _routing_metrics(routing: Routing | None, batch: Batch, model: ShardedGPT) -> dict[str, jax.Array]:
    """Over the rows of all devices; nothing where there are no experts.

    Each device of a tensor group counts all its tokens.
    """
    if routing is None:
        return {}
    penalty_B, *sums = routing
    return routing_metrics(Routing(penalty_B, *lax.psum(sums, model.axis.name)), batch.tokens.size * model.axis.size)


def _loss_and_gradients(
    model: ShardedGPT,
    state: TrainState,
    tokens: jax.Array | np.ndarray,
    keys: jax.Array | None,
    scored: jax.Array,
    micro_batches: int,
) -> tuple[jax.Array, PyTree, Routing | None, PyTree | None]:
    """The mean loss of the global batch, its gradient as shards (whole at stage 0) in `gradient_dtype`, and routing.

    And counts and sums of all keys of the global batch by code, where there is a codebook: as its gradient, see
    `zero.models.gated_unit.quantise`.
    """
    codebook = state.codebook
    if codebook is not None:
        codebook = with_commitment(codebook, model.axis.size * tokens.size)
    variables = model.enter(model.join(state.params, codebook))
    names = [model.differentiated] if codebook is None else [model.differentiated, CODEBOOK]

    def loss_of(
        differentiated: dict[str, PyTree], tokens: jax.Array, keys: jax.Array | None
    ) -> tuple[jax.Array, Routing | None]:
        loss, routing = model.losses({**variables, **differentiated}, tokens, keys)
        return loss / scored, routing

    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
    zeros = jnp.float32(0), no_routing(model.config, len(tokens) // micro_batches)
    differentiated = {name: variables[name] for name in names}
    (loss, routing), grads = _accumulate(value_and_grad, zeros, differentiated, tokens, keys, micro_batches)
    found = None if codebook is None else lax.psum(grads[CODEBOOK], model.axis.name)
    return lax.psum(loss, model.axis.name), model.leave(grads[model.differentiated]), routing, found


def _next_state(
    state: TrainState,
    params: PyTree,
    opt_state: PyTree,
    ema: PyTree | None,
    codebook: PyTree | None,
    is_bad: jax.Array,
    is_high: jax.Array,
    judged: jax.Array,
) -> TrainState:
    """The state after an update, or after one that was skipped because it was bad or high, with its counters."""
    skipped = (is_bad | is_high).astype(jnp.int32)
    is_counted = jnp.isfinite(judged).all() & (skipped == 0)
    return TrainState(
        state.step + 1,
        params,
        opt_state,
        state.skipped + skipped,
        skipped * (state.skipped_in_a_row + 1),
        state.skipped_spikes + is_high.astype(jnp.int32),
        jnp.where(is_counted, add_to_running(state.running, judged), state.running),
        ema,
        codebook,
    )


def _fused(
    state: TrainState,
    tokens: jax.Array | np.ndarray,
    keys: jax.Array | None,
    scored: jax.Array,
    model: ShardedGPT,
    tx: optax.GradientTransformation,
    guard: Guard,
) -> tuple[jax.Array, PyTree, PyTree, jax.Array, jax.Array, Routing | None]:
    """One step with the update of each layer inside the backward pass; returns what `backward_and_update` returns."""
    tokens_in, targets, starts = model.inputs(tokens)

    def embed(params: PyTree) -> ResidualStream:
        return model.apply({"params": params}, tokens_in, keys, starts, method="embed")

    def block(params: PyTree, stream: ResidualStream, layer: jax.Array) -> ResidualStream:
        return model.block({"params": params}, stream, layer, keys, starts)

    def score(params: PyTree, stream: ResidualStream) -> tuple[jax.Array, Routing | None]:
        losses, _, routing = model.apply({"params": params}, stream, targets, method="score")
        return model.sum_scored(losses, tokens) / scored, routing

    size = group_size(model.config.scanned_layers) if model.remat == "nested" else 1
    placement: Any = {"layout": model.layout, "axis": model.axis, "group": size, "guard": guard}
    return backward_and_update(embed, block, score, tx, optax.apply_updates, state.params, state.opt_state, **placement)


def _accumulate(
    value_and_grad: Callable[..., tuple[PyTree, PyTree]],
    zeros: PyTree,
    params: PyTree,
    tokens: jax.Array | np.ndarray,
    keys: jax.Array | None,
    micro_batches: int,
) -> tuple[PyTree, PyTree]:
    """Sums of values and gradients over micro-batches, one after the other; gradients add up in float32.

    Args:
      value_and_grad: from parameters, and the tokens and keys of a micro-batch.
      zeros: to which values are added.
      params, tokens, keys: its arguments, of all micro-batches.
      micro_batches: their number.
    """
    if micro_batches == 1:
        return value_and_grad(params, tokens, keys)

    def add(sums: tuple[PyTree, PyTree], micro_batch: tuple[jax.Array, jax.Array | None]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, value_and_grad(params, *micro_batch)), None

    zero_grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    split = jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), (tokens, keys))
    return lax.scan(add, (zeros, zero_grads), split)[0]
