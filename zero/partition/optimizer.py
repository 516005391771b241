"""Optax on shards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from zero.partition.collectives import AxisLike
from zero.partition.layout import Layout, PyTree
from zero.partition.stages import checked_axis


def global_norm(shards: PyTree, layout: Layout, axis: AxisLike) -> jax.Array:
    """The Euclidean norm of a whole tree from its shards, float32, the same on every device: one `psum` of a scalar.

    A leaf that is whole on every device counts once. Not finite when an element is not, or when a square overflows.

    Per device: shards in, a scalar out. Call inside pmap.
    """
    axis = checked_axis(layout, axis)
    split, whole = jnp.float32(0), jnp.float32(0)
    for leaf, x in zip(layout.leaves, layout.treedef.flatten_up_to(shards), strict=True):
        square = jnp.sum(jnp.square(x.astype(jnp.float32)))
        split, whole = (split + square, whole) if leaf.splits else (split, whole + square)
    with jax.named_scope("zero_global_norm"):
        return jnp.sqrt(lax.psum(split, axis.name) / axis.replicas + whole)
