"""The optimizer's update inside the backward pass: a layer moves as soon as its gradient is known.

No more than one layer's gradient exists, so stage 3 needs no memory for gradients. What asks for the whole gradient
before the first update cannot be had: clipping by global norm, skipping a bad step, adding up micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero.models.gpt import BLOCKS
from zero.partition.layout import PyTree

Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def backward_and_update(
    embed: Callable[[PyTree], jax.Array],
    block: Callable[[PyTree, jax.Array, jax.Array], jax.Array],
    score: Callable[[PyTree, jax.Array], jax.Array],
    update: Update,
    params: dict[str, PyTree],
    opt_state: PyTree,
) -> tuple[jax.Array, PyTree, PyTree, PyTree]:
    """One step of `score(rest, block(... block(embed(rest)) ...))`, whose layers are stacked in `params["blocks"]`.

    The layers' parameters and state are carried through the reverse loop and overwritten in place, so that XLA keeps
    one copy of them.

    Args:
      embed: what enters the first layer, from the parameters that are not in blocks.
      block: `(a layer's parameters, its input, its number)` to its output.
      score: the loss, from the same parameters as `embed` and what leaves the last layer.
      update: `(gradients, opt_state, params)` to new `(params, opt_state)`, element-wise.
      params, opt_state: shards.

    Returns:
      The loss, the new parameters and state, and a tree like `params` that has the norm of the gradients: of each leaf
      in blocks the norms of its layers, of others the gradient itself.
    """
    is_block = {name: name == BLOCKS for name in params}
    rest, rest_state = _only(params, is_block, False), _subtrees(partial(_only, keys=is_block, chosen=False), opt_state)
    layers = jnp.arange(jax.tree.leaves(params[BLOCKS])[0].shape[0])

    x, embed_backward = jax.vjp(embed, rest)
    x, inputs = lax.scan(lambda x, layer: (block(layer[0], x, layer[1]), x), x, (params[BLOCKS], layers))
    loss, score_backward = jax.vjp(score, rest, x)
    grads, dx = score_backward(jnp.ones_like(loss))

    def layer_backward(carry: tuple[jax.Array, PyTree], xs: tuple[jax.Array, jax.Array]) -> tuple[Any, PyTree]:
        (dx, held), (x, layer) = carry, xs
        own, own_state = _subtrees(partial(jax.tree.map, lambda stack: stack[layer]), held)
        _, backward = jax.vjp(lambda p, x: block(p, x, layer), own[BLOCKS], x)
        own_grads, dx = backward(dx)
        norms = jax.tree.map(lambda g: jnp.sqrt(jnp.sum(jnp.square(g))), own_grads)
        new = update({BLOCKS: own_grads}, own_state, own)
        return (dx, _subtrees(partial(jax.tree.map, lambda stack, x: stack.at[layer].set(x)), held, new)), norms

    held = _subtrees(partial(_only, keys=is_block, chosen=True), (params, opt_state))
    (dx, held), norms = lax.scan(layer_backward, (dx, held), (inputs, layers), reverse=True)
    grads = jax.tree.map(jnp.add, grads, embed_backward(dx)[0])
    moved = update(grads, rest_state, rest)
    params, opt_state = _subtrees(lambda rest, blocks: {**rest, **blocks}, moved, held)
    return loss, params, opt_state, {**grads, BLOCKS: norms}


def _only(tree: dict[str, PyTree], keys: dict[str, bool], chosen: bool) -> dict[str, PyTree]:
    return {name: subtree for name, subtree in tree.items() if keys[name] == chosen}


def _subtrees(f: Callable[..., Any], *trees: PyTree) -> PyTree:
    """Maps `f` over what looks like parameters, the dicts; of anything else, such as counts, the first tree's stays."""

    def is_dict(x: Any) -> bool:
        return isinstance(x, dict)

    return jax.tree.map(lambda *xs: f(*xs) if is_dict(xs[0]) else xs[0], *trees, is_leaf=is_dict)
