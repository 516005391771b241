"""Layers in groups, for the backward pass: only what enters a group is kept, and the rest is computed again.

Of L layers in groups of sqrt(L) the backward pass then needs 2 sqrt(L) layer inputs instead of L, and runs one more
forward pass. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174, section 4.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from zero.partition.layout import PyTree


def group_size(layers: int) -> int:
    """Layers of a group such that the inputs kept, one per group and those of one group, are fewest.

    >>> group_size(136), group_size(36), group_size(7)
    (8, 6, 1)
    """
    return min((size for size in range(1, layers + 1) if layers % size == 0), key=lambda size: layers // size + size)


def in_groups(tree: PyTree, size: int) -> PyTree:
    """Leaves of `(layers, ...)` as `(groups, size, ...)`."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), tree)


def nested_layers(
    block: Callable[[PyTree, jax.Array, jax.Array], jax.Array], stacked: PyTree, x: jax.Array
) -> jax.Array:
    """`block(a layer's part of stacked, x, its number)` for one layer after the other, in groups.

    >>> weights = jnp.arange(6.0)
    >>> loss = lambda weights: nested_layers(lambda w, x, layer: jnp.sin(w * x), weights, jnp.float32(1))
    >>> plain = lambda weights: lax.scan(lambda x, w: (jnp.sin(w * x), None), jnp.float32(1), weights)[0]
    >>> bool(jnp.allclose(jax.grad(loss)(weights), jax.grad(plain)(weights)))
    True
    """
    count = jax.tree.leaves(stacked)[0].shape[0]
    one = jax.checkpoint(lambda x, layer: (block(layer[0], x, layer[1]), None), prevent_cse=False)
    group = jax.checkpoint(lambda x, layers: lax.scan(one, x, layers), prevent_cse=False)
    return lax.scan(group, x, in_groups((stacked, jnp.arange(count)), group_size(count)))[0]
