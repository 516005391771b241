"""One training step at any stage of ZeRO, for one pmap: the table of `zero.partition.stages` around a GPT.

State is always sharded; at stage 0 it is sharded by a layout that splits nothing. All of this is called inside pmap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from zero.models.block import Block
from zero.models.config import BLOCKS, GPTConfig, tensor_dim
from zero.models.cut import WHOLE, Cut
from zero.models.gpt import GPT
from zero.partition.collectives.axis import Axis
from zero.partition.collectives.tensor_group import TensorGroup
from zero.partition.layout import Layout, PyTree, derive_layout, make_layout
from zero.partition.optimizer import global_norm, on_shards
from zero.partition.stages import fully_shard, gather, scatter_sum, shard, sum_copies
from zero.training.averages import add_to_running, is_spike, update_ema
from zero.training.batch import Batch, document_starts, next_tokens, row_keys, token_ids
from zero.training.fused_update import Guard, backward_and_update, unless
from zero.training.nested_remat import group_size, nested_layers
from zero.training.optimizer import decayed, scaled


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
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    skipped_spikes: jax.Array
    running: jax.Array
    ema: PyTree = None


@dataclasses.dataclass(frozen=True)
class ShardedGPT:
    """A GPT whose parameters are held, gathered and differentiated as one stage says.

    Attributes:
      config: the model.
      axis: the pmap axis.
      stage: 0 to 3.
      compute_dtype: of whole parameters and of matrix products.
      wire_dtype: of gradients on the wire; int8 in blocks with a scale, as `zero.scatter_sum` sends them.
      reduce_dtype: in which gradients are summed over devices.
      gradient_dtype: in which the sums are held until the update; micro-batches add up in float32 all the same.
      remat: what the backward pass computes again, as for `GPT`; "nested" keeps the inputs of groups of layers alone.
      blockwise_from: the number of query positions from which attention is blockwise, as for `GPT`.
      master_dtype: of the parameters that are held, where weight decay applies to them; the others are float32.
      end_of_text: the token that separates documents, to keep attention and positions within a document; None for rows
        that are one segment each.
      gather_dtype: int8 for parameters that travel in blocks with a scale, as `zero.gather` sends them; None for
        parameters that travel in `compute_dtype`, or as they are held if that is narrower.
      sums_copies: whether stages 2 and 3 sum gradients over copies of the state layer by layer, which a fused update
        needs, and not once per step.
    """

    config: GPTConfig
    axis: Axis
    stage: int
    compute_dtype: DTypeLike = jnp.float32
    wire_dtype: DTypeLike = jnp.float32
    reduce_dtype: DTypeLike = jnp.float32
    gradient_dtype: DTypeLike = jnp.float32
    remat: str = "full"
    blockwise_from: int | None = None
    master_dtype: DTypeLike = jnp.float32
    end_of_text: int | None = None
    gather_dtype: DTypeLike | None = None
    sums_copies: bool = False

    @property
    def cut(self) -> Cut:
        """What of a model this device computes."""
        return TensorGroup(self.axis) if self.axis.tensor > 1 else WHOLE

    @cached_property
    def _sharded_by_parts(self) -> Layout:
        tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
        params = jax.eval_shape(partial(self._plain.init, method="hidden"), jax.random.key(0), tokens, None)["params"]
        held = jax.tree.map(
            lambda p, is_matrix: jax.ShapeDtypeStruct(p.shape, self.master_dtype if is_matrix else p.dtype),
            params,
            decayed(params),
        )
        tensor: Any = {"tensor": self.axis.tensor, "tensor_dim": tensor_dim}
        return make_layout(held, self.axis.shards, stacked=self.config.stacked, **tensor)

    @cached_property
    def layout_by_parts(self) -> Layout:
        """`layout`, in which what tensor groups compute in parts is gathered in parts."""
        return self._sharded_by_parts if self.stage else self._sharded_by_parts.whole()

    @property
    def sharded_layout(self) -> Layout:
        """How stages 1 to 3 split the parameters."""
        return self._sharded_by_parts.without_parts()

    @cached_property
    def layout(self) -> Layout:
        """How this stage splits them."""
        return self.layout_by_parts.without_parts()

    @cached_property
    def _plain(self) -> GPT:
        return GPT(self.config, self.compute_dtype, remat=self.remat, blockwise_from=self.blockwise_from, cut=self.cut)

    def _lift(self, module_class: type[nn.Module], name: str) -> type[nn.Module]:
        dtypes: Any = {"dtype": self.compute_dtype, "wire_dtype": self.wire_dtype, "reduce_dtype": self.reduce_dtype}
        axis = dataclasses.replace(self.axis, sums_copies=self.sums_copies)
        return fully_shard(module_class, self.layout_by_parts.at(name), axis, gather_dtype=self.gather_dtype, **dtypes)

    @cached_property
    def _lifted(self) -> GPT:
        return GPT(self.config, self.compute_dtype, self._lift, self.remat, self.blockwise_from, self.cut)

    def block(
        self,
        variables: dict[str, PyTree],
        x: jax.Array,
        layer: jax.Array,
        keys: jax.Array | None,
        starts: jax.Array | None,
    ) -> jax.Array:
        """One layer, from its own part of the variables."""
        module_class = self._lift(Block, BLOCKS) if self.stage >= 2 else Block
        module = module_class(self.config, self.compute_dtype, self.blockwise_from, None, self.cut)
        (x, _), _ = module.apply(variables, (x, None), layer, keys, 0, starts)
        return x

    def init(self, key: jax.Array) -> PyTree:
        """Shards of new parameters, made layer by layer; their values do not depend on the number of devices."""
        return self._lifted.init(key, jnp.zeros((1, 2), jnp.int32), None, method="hidden")["params"]

    @property
    def differentiated(self) -> str:
        """The collection of variables that gradients are taken of.

        A gradient has the dtype of what it is the gradient of: to be held in another than the shards' own, it flows to
        "gradients", which has that dtype and no other use.
        """
        is_own = all(leaf.dtype == self.gradient_dtype for leaf in self.layout.leaves)
        return "params" if self.stage < 2 or is_own else "gradients"

    def enter(self, params: PyTree) -> dict[str, PyTree]:
        """Flax variables for a step, from shards."""
        variables = {"params": params}
        if self.stage < 3:
            full = gather(params, self.layout_by_parts, self.axis, self.compute_dtype, wire_dtype=self.gather_dtype)
            variables["gathered" if self.stage == 2 else "params"] = full
        if self.differentiated == "gradients":
            variables["gradients"] = jax.tree.map(lambda p: jnp.zeros(p.shape, self.gradient_dtype), params)
        return variables

    def leave(self, grads: PyTree) -> PyTree:
        """Shards of the gradient summed over devices, from the gradients of what is differentiated."""
        if self.stage >= 2:
            return grads if self.sums_copies else sum_copies(grads, self.layout, self.axis)
        dtypes: Any = {"wire_dtype": self.wire_dtype, "reduce_dtype": self.reduce_dtype}
        grads = scatter_sum(grads, self.layout_by_parts, self.axis, **dtypes)
        return jax.tree.map(lambda g: g.astype(self.gradient_dtype), grads)

    def apply(self, variables: dict[str, PyTree], *args: Any, **kwargs: Any) -> Any:
        model = self._lifted if self.stage >= 2 else self._plain
        return model.apply(variables, *args, **kwargs)

    def losses(
        self, variables: dict[str, PyTree], tokens: jax.Array, keys: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Summed negative log-likelihoods in nats, and how many tokens of `(rows, context)` were scored.

        In a tensor group each device has its share of both.
        """
        targets, tokens_in = next_tokens(tokens), token_ids(tokens)
        starts = document_starts(tokens_in, self.end_of_text)
        if self.remat == "nested":
            stacked = {name: tree[BLOCKS] for name, tree in variables.items()}
            x = self.apply(variables, tokens_in, keys, starts, method="embed")
            x = nested_layers(partial(self.block, keys=keys, starts=starts), stacked, x)
            losses, _ = self.apply(variables, x, targets, method="score")
        else:
            losses = self.apply(variables, tokens_in, targets, keys, starts)
        return self.sum_scored(losses, tokens), self.count_scored(tokens)

    def sum_scored(self, losses: jax.Array, tokens: jax.Array | np.ndarray) -> jax.Array:
        """NaN, and so are its gradients, where a token is past the vocabulary."""
        is_known = jnp.all(token_ids(tokens) < self.config.vocab_size)
        scored = self.cut.counted_once(jnp.where(next_tokens(tokens) >= 0, losses, 0))
        return jnp.sum(scored) * jnp.where(is_known, 1.0, jnp.nan)

    def count_scored(self, tokens: jax.Array | np.ndarray) -> jax.Array:
        """Tokens that have something to predict them, int32."""
        return jnp.sum(self.cut.counted_once(next_tokens(tokens) >= 0))


def new_state(params: PyTree, tx: optax.GradientTransformation, has_ema: bool = False) -> TrainState:
    """The state of a run that starts with these parameters: whole, or shards where `tx` is for shards."""
    zero, running = jnp.int32(0), jnp.zeros((2, 3), jnp.float32)
    ema = jax.tree.map(lambda p: p.astype(jnp.float32), params) if has_ema else None
    return TrainState(zero, params, tx.init(params), zero, zero, zero, running, ema)


def state_layout(model: ShardedGPT, tx: optax.GradientTransformation, has_ema: bool = False) -> Layout:
    """How the whole state is split; the same logical arrays at every stage."""
    return derive_layout(partial(new_state, tx=tx, has_ema=has_ema), model.layout)


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
    gradient norm that exceeds its running mean by so many running standard deviations. With `ema_decay` the state
    contains `ema`, which every update that is made moves.

    Raises:
      NotElementwiseError: `tx` would be wrong on shards, or layer by layer where the update is fused.
      ValueError: `fused_update` beside what it cannot do exactly.
    """
    keys = row_keys(seed, state.step, batch) if model.config.has_dropout else None
    scored = lax.psum(model.count_scored(batch.tokens), model.axis.name).astype(jnp.float32)
    scored, rate = jnp.maximum(scored, 1), learning_rate(state.step)
    tx = scaled(tx, rate, state.step)

    is_bad, is_high = jnp.bool_(False), jnp.bool_(False)
    if fused_update:
        if model.stage != 3 or model.remat not in ("full", "nested") or micro_batches > 1 or skip_spikes is not None:
            raise ValueError("fused_update needs stage 3, full or nested remat, one micro-batch and no skip_spikes")
        guard, model = Guard(max_gradient_norm, skip_bad_steps), dataclasses.replace(model, sums_copies=True)
        loss, params, opt_state, norm, is_bad = _fused(state, batch.tokens, keys, scored, model, tx, guard)
    else:
        loss, grads = _loss_and_gradients(model, state.params, batch.tokens, keys, scored, micro_batches)
        layout, axis = model.layout, model.axis
        if model.stage == 0 and axis.tensor == 1:
            # Of slices as well: the same sums in the same order at every stage.
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
    state = _next_state(state, params, opt_state, ema, is_bad, is_high, jnp.stack([loss, norm]))
    metrics = {
        "loss": loss,
        "gradient_norm": norm,
        "learning_rate": rate,
        "skipped_steps": state.skipped,
        "skipped_in_a_row": state.skipped_in_a_row,
        "skipped_spikes": state.skipped_spikes,
    }
    return state, metrics


def _loss_and_gradients(
    model: ShardedGPT,
    params: PyTree,
    tokens: jax.Array | np.ndarray,
    keys: jax.Array | None,
    scored: jax.Array,
    micro_batches: int,
) -> tuple[jax.Array, PyTree]:
    """The mean loss of the global batch, and its gradient as shards (whole at stage 0) in `gradient_dtype`."""
    variables = model.enter(params)

    def loss_of(differentiated: PyTree, tokens: jax.Array, keys: jax.Array | None) -> jax.Array:
        return model.losses({**variables, model.differentiated: differentiated}, tokens, keys)[0] / scored

    value_and_grad = jax.value_and_grad(loss_of)
    loss, grads = _accumulate(value_and_grad, variables[model.differentiated], tokens, keys, micro_batches)
    return lax.psum(loss, model.axis.name), model.leave(grads)


def _next_state(
    state: TrainState,
    params: PyTree,
    opt_state: PyTree,
    ema: PyTree | None,
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
    )


def _fused(
    state: TrainState,
    tokens: jax.Array | np.ndarray,
    keys: jax.Array | None,
    scored: jax.Array,
    model: ShardedGPT,
    tx: optax.GradientTransformation,
    guard: Guard,
) -> tuple[jax.Array, PyTree, PyTree, jax.Array, jax.Array]:
    """As `backward_and_update`."""

    starts = document_starts(token_ids(tokens), model.end_of_text)

    def embed(params: PyTree) -> jax.Array:
        return model.apply({"params": params}, token_ids(tokens), keys, starts, method="embed")

    def block(params: PyTree, x: jax.Array, layer: jax.Array) -> jax.Array:
        return model.block({"params": params}, x, layer, keys, starts)

    def score(params: PyTree, x: jax.Array) -> jax.Array:
        losses, _ = model.apply({"params": params}, x, next_tokens(tokens), method="score")
        return model.sum_scored(losses, tokens) / scored

    size = group_size(model.config.N) if model.remat == "nested" else 1
    placement: Any = {"layout": model.layout, "axis": model.axis, "group": size, "guard": guard}
    return backward_and_update(embed, block, score, tx, optax.apply_updates, state.params, state.opt_state, **placement)


def _accumulate(
    value_and_grad: Callable[..., tuple[jax.Array, PyTree]],
    params: PyTree,
    tokens: jax.Array | np.ndarray,
    keys: jax.Array | None,
    micro_batches: int,
) -> tuple[jax.Array, PyTree]:
    """Sums losses and gradients over micro-batches, one after the other; gradients add up in float32."""
    if micro_batches == 1:
        return value_and_grad(params, tokens, keys)

    def add(sums: tuple[jax.Array, PyTree], micro_batch: tuple[jax.Array, jax.Array | None]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, value_and_grad(params, *micro_batch)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    split = jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), (tokens, keys))
    return lax.scan(add, (jnp.float32(0), zeros), split)[0]
