"""The optimizer's update inside the backward pass: a layer moves as soon as its gradient is known.

No more than one layer's gradient exists, so stage 3 needs no memory for gradients. What needs the whole gradient
before the first update is not available: clipping by global norm, skipping a bad step, adding up micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from zero.models.gpt import BLOCKS
from zero.partition.collectives import Axis
from zero.partition.layout import Layout, LeafLayout, PyTree, Split
from zero.partition.optimizer import Squares, on_shards, squares


def backward_and_update(
    embed: Callable[[PyTree], jax.Array],
    block: Callable[[PyTree, jax.Array, jax.Array], jax.Array],
    score: Callable[[PyTree, jax.Array], jax.Array],
    tx: optax.GradientTransformation,
    moved: Callable[[PyTree, PyTree], PyTree],
    params: dict[str, PyTree],
    opt_state: PyTree,
    *,
    layout: Layout,
    axis: Axis,
) -> tuple[jax.Array, PyTree, PyTree, Squares]:
    """One step of `score(rest, block(... block(embed(rest)) ...))`, whose layers are stacked in `params[BLOCKS]`.

    The layers' parameters and state are carried through the reverse loop and overwritten in place, so that XLA keeps
    one copy of them. What `tx` does depends on the shapes of all layers together, as without this function.

    Args:
      embed: what enters the first layer, from the parameters that are not in blocks.
      block: `(a layer's parameters, its input, its number)` to its output.
      score: the loss, from the same parameters as `embed` and what leaves the last layer.
      tx: the optimizer.
      moved: `(params, updates)` to new params.
      params, opt_state: shards.
      layout: of the parameters.
      axis: the pmap axis.

    Returns:
      The loss, the new parameters and state, and the square sum of the gradients.

    Raises:
      NotElementwiseError: `tx` needs other devices, or other layers.
    """
    is_block = {name: name == BLOCKS for name in params}
    rest, rest_state = _only(params, is_block, False), _subtrees(partial(_only, keys=is_block, chosen=False), opt_state)
    rest_layout, layers_layout, layer_layout = layout.only(rest), layout.only([BLOCKS]), layout.at(BLOCKS)
    layers = jnp.arange(jax.tree.leaves(params[BLOCKS])[0].shape[0])

    x, embed_backward = jax.vjp(embed, rest)
    x, inputs = lax.scan(lambda x, layer: (block(layer[0], x, layer[1]), x), x, (params[BLOCKS], layers))
    loss, score_backward = jax.vjp(score, rest, x)
    grads, dx = score_backward(jnp.ones_like(loss))

    def layer_backward(carry: tuple[jax.Array, PyTree], xs: tuple[jax.Array, jax.Array]) -> tuple[Any, Squares]:
        (dx, held), (x, layer) = carry, xs
        own, own_state = _subtrees(partial(jax.tree.map, lambda stack: lax.dynamic_slice_in_dim(stack, layer, 1)), held)
        _, backward = jax.vjp(lambda p, x: block(jax.tree.map(lambda stack: stack[0], p), x, layer), own[BLOCKS], x)
        own_grads, dx = backward(dx)
        sums = squares(jax.tree.map(lambda stack: stack[0], own_grads), layer_layout, axis)
        updates, own_state = _one_layer(tx, layers_layout, axis, layer).update({BLOCKS: own_grads}, own_state, own)
        new = moved(own, updates), own_state
        place = partial(jax.tree.map, lambda stack, x: lax.dynamic_update_slice_in_dim(stack, x, layer, 0))
        return (dx, _subtrees(place, held, new)), sums

    held = _subtrees(partial(_only, keys=is_block, chosen=True), (params, opt_state))
    (dx, held), sums = lax.scan(layer_backward, (dx, held), (inputs, layers), reverse=True)
    grads = jax.tree.map(jnp.add, grads, embed_backward(dx)[0])
    updates, rest_state = on_shards(tx, rest_layout, axis).update(grads, rest_state, rest)
    new = moved(rest, updates), rest_state
    params, opt_state = _subtrees(lambda rest, blocks: {**rest, **blocks}, new, held)
    sums = jax.tree.map(lambda rest, of_layers: rest + jnp.sum(of_layers), squares(grads, rest_layout, axis), sums)
    return loss, params, opt_state, sums


@dataclasses.dataclass(frozen=True)
class _Layers(Axis):
    """The layers of a stack, as if one device each held one: where an update is element-wise, that is the same."""

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


def _only(tree: dict[str, PyTree], keys: dict[str, bool], chosen: bool) -> dict[str, PyTree]:
    return {name: subtree for name, subtree in tree.items() if keys[name] == chosen}


def _subtrees(f: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Maps `f` over what looks like parameters, the dicts; of anything else, such as counts, the first tree's stays."""

    def is_dict(x: Any) -> bool:
        return isinstance(x, dict)

    return jax.tree.map(lambda *xs: f(*xs) if is_dict(xs[0]) else xs[0], *trees, is_leaf=is_dict)
