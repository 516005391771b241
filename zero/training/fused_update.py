"""The optimizer's update inside the backward pass: each layer is updated as soon as its gradient is known.

Only one layer's gradient exists at a time, so stage 3 needs no memory for gradients. Micro-batches and clipping by the
global norm need the whole gradient and are not available. Clipping and skipping work per part instead: each layer is a
part, and the parameters outside the layers are one more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from zero.models.config import STACK
from zero.models.experts import ResidualStream
from zero.models.stack import LAYER_INPUT, Nested, inputs_of, run_forward, to_device
from zero.partition.collectives.axis import Axis
from zero.partition.layout import Layout, LeafLayout, PyTree, Split
from zero.partition.sharded_optimizer import Squares, clip, norm_of, on_shards, squares
from zero.training.batch import Batch
from zero.training.optimizers.optimizer import clip_values, scaled, stack_and_rest
from zero.training.parts import StepOptions, TrainState, Update, UpdateResult, unless
from zero.training.sharded_gpt import ShardedGPT


def fused_update(model: ShardedGPT, tx: optax.GradientTransformation, options: StepOptions) -> Update:
    """An attempt that updates each layer inside the backward pass.

    It already leaves a part unchanged if its gradient is not finite, so `accept` has nothing to undo.

    Raises:
      ValueError: an option needs the whole gradient.

    `compute` raises:
      NotElementwiseError: `tx` needs other devices, or other layers.
    """
    size = span_of(model, options)
    on_host = LAYER_INPUT in model.offload
    model = dataclasses.replace(model, sums_copies=True)

    def compute(state: TrainState, frozen: PyTree, batch: Batch, rate: jax.Array, key: jax.Array) -> UpdateResult:
        objective = options.objective
        keys = model.dropout_keys(key, batch)
        terms = objective.count_all(model, batch.tokens)
        loss, params, opt_state, norm, is_bad, (routing, sums) = backward_and_update(
            layered_loss(model, options, batch, keys, terms),
            scaled(tx, rate, state.clock),
            state.params,
            state.opt_state,
            layout=model.layout,
            axis=model.axis,
            span=size,
            on_host=on_host,
            options=options,
        )
        metrics = model.metrics(routing, batch) | objective.means(model, sums, terms)
        return UpdateResult(params, opt_state, loss, norm, is_bad, {}, metrics)

    return Update(compute, lambda is_skipped, result, state: (result.params, result.opt_state))


def span_of(model: ShardedGPT, options: StepOptions) -> int:
    """Layers for each input that is kept for the backward pass.

    Raises:
      ValueError: an option needs the whole gradient.
    """
    if model.collections:
        raise ValueError(f"fused_update does not sum what {' and '.join(model.collections)} needs")
    if model.tuning is not None:
        raise ValueError("fused_update is for gradients as large as the model; gradients of adapters are small")
    policy = model.policy
    keeps_inputs = policy.kinds == (LAYER_INPUT,)
    if model.stage != 3 or not keeps_inputs or options.micro_batches > 1 or options.skip_spikes is not None:
        raise ValueError("fused_update needs stage 3, full or nested remat, one micro-batch and no skip_spikes")
    return policy.size if isinstance(policy, Nested) else 1


class LayeredLoss(NamedTuple):
    """A loss `score(rest, layer(... layer(embed(rest)) ...))`, in which `rest` are the parameters outside the layers.

    Attributes:
      embed: from `rest` to the first layer's input.
      layer: `(a layer's parameters, its input, its number)` to its output.
      score: from `rest` and the last layer's output to this device's part of the loss, and auxiliary outputs.
    """

    embed: Callable[[PyTree], PyTree]
    layer: Callable[[PyTree, PyTree, jax.Array], PyTree]
    score: Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]


def layered_loss(
    model: ShardedGPT, options: StepOptions, batch: Batch, keys: jax.Array | None, terms: jax.Array
) -> LayeredLoss:
    """The objective of a device's rows, over the number of `terms` of the global batch."""
    tokens_in, targets, starts = model.inputs(batch.tokens)
    module: Any = model.gpt.layer(model.row_group)

    def embed(params: PyTree) -> ResidualStream:
        return model.apply({"params": params}, tokens_in, keys, starts, method="embed")

    def layer(params: PyTree, stream: ResidualStream, number: jax.Array) -> ResidualStream:
        (stream, _), _ = module.apply({"params": params}, (stream, None), number, keys, 0, starts)
        return stream

    def score(params: PyTree, stream: ResidualStream) -> tuple[jax.Array, Any]:
        inputs = jax.tree.map(model.own_positions, options.objective.inputs(model, batch))
        scores = model.apply({"params": params}, stream, targets, inputs, method="score")
        total, sums = options.objective.sum_losses(model, scores, batch)
        return total / terms, (scores.routing, sums)

    return LayeredLoss(embed, layer, score)


def backward_and_update(
    loss_of: LayeredLoss,
    tx: optax.GradientTransformation,
    params: dict[str, PyTree],
    opt_state: PyTree,
    *,
    layout: Layout,
    axis: Axis,
    span: int,
    on_host: bool = False,
    options: StepOptions,
) -> tuple[jax.Array, PyTree, PyTree, jax.Array, jax.Array, PyTree]:
    """One step of a loss whose layers are stacked in `params[STACK]`.

    The layers' parameters and state are carried through the reverse loop and overwritten in place, so that XLA keeps
    one copy of them. `tx` sees the shapes of the whole stack, as in an update after the backward pass.

    Args:
      loss_of: the functions that the loss consists of.
      params, opt_state: shards; `layout` is the parameters' layout.
      span: layers for each input that is kept for the backward pass; divides the number of layers.
      on_host: whether these inputs are kept in host memory.
      options: each of n parts is clipped to the norm `max_gradient_norm / sqrt(n)`, so the whole to
        `max_gradient_norm`; `skip_bad_steps` leaves a part unchanged if its gradient is not finite, and all parts if
        the loss is not.

    Returns:
      The loss, the new parameters and state, the gradient norm before clipping, whether a part was skipped,
      and the auxiliary outputs of `score`. All but these and the shards are the same on every device.

    Raises:
      NotElementwiseError: `tx` needs other devices, or other layers.
    """
    rest, rest_state = subtrees(lambda tree: stack_and_rest(tree)[1], (params, opt_state))
    numbers = jnp.arange(jax.tree.leaves(params[STACK])[0].shape[0])
    embed, layer, score = loss_of
    parts = PartUpdate(tx, layout, axis, options, len(numbers))

    x, embed_backward = jax.vjp(embed, rest)
    x, kept = run_forward(layer, params[STACK], x, span, on_host=on_host)
    loss, score_backward, more = jax.vjp(score, rest, x, has_aux=True)
    grads, dx = score_backward(jnp.ones_like(loss))

    def layer_backward(carry: tuple[PyTree, PyTree], xs: tuple[PyTree, jax.Array]) -> tuple[Any, Any]:
        dx, stacks = carry
        x, number = xs
        new, dx, sums, is_bad = parts.of_layer(layer, cut_layer(stacks, number), x, dx, number)
        return (dx, place_layer(stacks, new, number)), (sums, is_bad)

    def span_backward(carry: tuple[PyTree, PyTree], xs: tuple[PyTree, jax.Array]) -> tuple[Any, Any]:
        _, (params, _) = carry
        x, numbers = xs
        if on_host:
            x = to_device(x)
        return lax.scan(layer_backward, carry, (inputs_of(layer, params[STACK], x, numbers), numbers), reverse=True)

    stacks = subtrees(lambda tree: stack_and_rest(tree)[0], (params, opt_state))
    (dx, stacks), of_layers = lax.scan(span_backward, (dx, stacks), (kept, numbers.reshape(-1, span)), reverse=True)
    grads = jax.tree.map(jnp.add, grads, embed_backward(dx)[0])
    new, sums, is_bad = parts.of_rest(grads, (rest, rest_state))
    sums, is_bad = with_layers_added((sums, is_bad), of_layers)
    params, opt_state = subtrees(lambda rest, stack: {**rest, **stack}, new, stacks)
    return lax.psum(loss, axis.name), params, opt_state, norm_of(sums, axis), is_bad, more


@dataclasses.dataclass(frozen=True)
class PartUpdate:
    """Updates of single layers and of the parameters outside of them, each clipped and skipped independently.

    Attributes:
      tx: of the whole parameters, whose `layout` it is.
      options: of the whole gradient; each part is clipped to `max_gradient_norm / sqrt(layers + 1)`.
    """

    tx: optax.GradientTransformation
    layout: Layout
    axis: Axis
    options: StepOptions
    layers: int

    def of_layer(
        self, layer: Callable[..., PyTree], old: tuple[PyTree, PyTree], x: PyTree, dx: PyTree, number: jax.Array
    ) -> tuple[tuple[PyTree, PyTree], PyTree, Squares, jax.Array]:
        """New parameters and state of a layer, the gradient of its input, the sum of squares, whether it was skipped.

        Args:
          layer: as in `LayeredLoss`.
          old: parameters and state of the layer, `(1, ...)` per leaf.
          x, dx: its input, and the gradient of its output.
          number: of the layer.
        """
        old_params, old_state = old

        def run_layer(params: PyTree, x: PyTree) -> PyTree:
            return layer(jax.tree.map(lambda stack: stack[0], params), x, number)

        _, backward = jax.vjp(run_layer, old_params[STACK], x)
        grads, dx = backward(dx)
        sums = squares(jax.tree.map(lambda stack: stack[0], grads), self.layout.at(STACK), self.axis)
        grads, is_bad = self._guarded({STACK: grads}, sums)
        tx = _one_layer(self.tx, self.layout.only([STACK]), self.axis, number)
        updates, new_state = tx.update(grads, old_state, old_params)
        new = unless(is_bad, (optax.apply_updates(old_params, updates), new_state), old)
        return new, dx, sums, is_bad

    def of_rest(self, grads: PyTree, old: tuple[PyTree, PyTree]) -> tuple[tuple[PyTree, PyTree], Squares, jax.Array]:
        """The same of the parameters outside the layers, from their gradient."""
        old_params, old_state = old
        layout = self.layout.only(old_params)
        sums = squares(grads, layout, self.axis)
        grads, is_bad = self._guarded(grads, sums)
        updates, new_state = on_shards(self.tx, layout, self.axis).update(grads, old_state, old_params)
        return unless(is_bad, (optax.apply_updates(old_params, updates), new_state), old), sums, is_bad

    def _guarded(self, grads: PyTree, sums: Squares) -> tuple[PyTree, jax.Array]:
        """A part's clipped gradient, and whether to skip the part, from its sum of squares."""
        options = self.options
        is_bad = jnp.bool_(False)
        if options.max_gradient_norm is not None or options.skip_bad_steps:
            norm = norm_of(sums, self.axis)
            is_bad = jnp.bool_(options.skip_bad_steps) & ~jnp.isfinite(norm)
            if options.max_gradient_norm is not None:
                grads = clip(grads, norm, options.max_gradient_norm / math.sqrt(self.layers + 1))
        if options.max_gradient_value is not None:
            grads = clip_values(grads, options.max_gradient_value)
        return grads, is_bad


def cut_layer(stacks: PyTree, number: jax.Array) -> PyTree:
    """One layer of stacks, `(1, ...)` per leaf; leaves that are not parameters, such as counts, are unchanged."""
    return subtrees(partial(jax.tree.map, lambda stack: lax.dynamic_slice_in_dim(stack, number, 1)), stacks)


def place_layer(stacks: PyTree, layer: PyTree, number: jax.Array) -> PyTree:
    """The stacks with one layer replaced."""
    place = partial(jax.tree.map, lambda stack, x: lax.dynamic_update_slice_in_dim(stack, x, number, 0))
    return subtrees(place, stacks, layer)


def with_layers_added(of_rest: PyTree, of_layers: PyTree) -> PyTree:
    """Sums of squares, and whether a part was skipped, of all parts; for layers, arrays of any shape."""
    return jax.tree.map(lambda rest, layers: rest + layers.sum().astype(rest.dtype), of_rest, of_layers)


@dataclasses.dataclass(frozen=True)
class _Layers(Axis):
    """An axis whose shards are the layers of a stack: equivalent where an update is element-wise."""

    layer: Any = None

    def shard_index(self) -> jax.Array:
        return self.layer


def _one_layer(
    tx: optax.GradientTransformation, layout: Layout, axis: Axis, layer: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """The update of one layer of a stack, `(1, ...)` per leaf, as part of the update of the whole stack."""
    count = layout.leaves[0].shape[0]
    leaves = tuple(
        LeafLayout(leaf.path, leaf.shard_shape, np.dtype(leaf.dtype), (Split(0, count, count),))
        for leaf in layout.leaves
    )
    return on_shards(
        on_shards(tx, layout, axis), Layout(layout.treedef, leaves, count), _Layers("layers", (1, count), layer=layer)
    )


def subtrees(f: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Maps `f` over the dicts in the trees, the parameters; other leaves, such as counts, are the first tree's."""

    def is_dict(x: Any) -> bool:
        return isinstance(x, dict)

    return jax.tree.map(lambda *xs: f(*xs) if is_dict(xs[0]) else xs[0], *trees, is_leaf=is_dict)
