"""Gathers matrices inside pmap as the 8-bit numbers that a product multiplies.

A number has the scale of its column, all inputs of one output. The devices agree on the largest magnitude of each
column, by one small all-reduce for all matrices of a call, and each rounds its own shard: the numbers are those of the
whole matrix, and a byte per element is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from zero.partition.collectives.arrays import as_dtype, fill_padding
from zero.partition.collectives.axis import Axis
from zero.partition.collectives.coalesced import gather_arrays
from zero.partition.layout import LeafLayout
from zero.partition.model_parallel import RoundedWeight, Rounding
from zero.partition.moves import AllGather


def gather_rounded(
    shards: Sequence[jax.Array],
    leaves: Sequence[LeafLayout],
    roundings: Sequence[Rounding],
    axis: Axis,
    dtype: DTypeLike | None,
) -> list[RoundedWeight]:
    """Each matrix rounded, with a scale per column, from its shards: as rounding the gathered matrix of `dtype`.

    No gradient flows to the shards. Per device: `leaf.shard_shape` in, matrices of `leaf.gathered_shape` out. Call
    inside pmap.

    Raises:
      ValueError: a leaf is not a matrix, or a device does not gather all of it.
    """
    for leaf in leaves:
        if len(leaf.shape) != 2 or leaf.is_cut or not all(isinstance(move, AllGather) for move in leaf.moves):
            raise ValueError(f"leaf {leaf.name}: only whole matrices are gathered with a scale per column")
    if not leaves:
        return []
    rows_of_shards = [
        lax.stop_gradient(fill_padding(as_dtype(x, dtype), leaf, axis, 0))
        for x, leaf in zip(shards, leaves, strict=True)
    ]
    joined = jnp.concatenate([_largest(x, leaf, axis) for x, leaf in zip(rows_of_shards, leaves, strict=True)])
    if any(leaf.splits for leaf in leaves):
        joined = lax.pmax(joined, axis.name)
    widths = [leaf.padded_shape[1] for leaf in leaves]
    largest = [x[None] for x in jnp.split(joined, np.cumsum(widths)[:-1].tolist())]
    numbers = [
        rounding.numbers(x, _own_columns(column, leaf, axis))
        for x, column, leaf, rounding in zip(rows_of_shards, largest, leaves, roundings, strict=True)
    ]
    whole = gather_arrays(numbers, leaves, axis, None, None)
    return [
        RoundedWeight(jnp.zeros(leaf.shape, x.dtype), matrix, rounding.scales(column[:, : leaf.shape[1]]))
        for x, matrix, column, leaf, rounding in zip(rows_of_shards, whole, largest, leaves, roundings, strict=True)
    ]


def _largest(x: jax.Array, leaf: LeafLayout, axis: Axis) -> jax.Array:
    """The largest magnitude of each column in this shard, float32; 0 for columns outside it.

    A maximum over devices may lose a NaN, so a NaN counts as infinity, and so does its column.
    """
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=0)
    largest = jnp.where(jnp.isnan(largest), jnp.inf, largest)
    for split in leaf.splits:
        if split.dim == 1:
            zeros = jnp.zeros(leaf.padded_shape[1], jnp.float32)
            return lax.dynamic_update_slice_in_dim(zeros, largest, axis.shard_index() * split.shard_size, 0)
    return largest


def _own_columns(largest: jax.Array, leaf: LeafLayout, axis: Axis) -> jax.Array:
    """The columns of this device's shard."""
    for split in leaf.splits:
        if split.dim == 1:
            return lax.dynamic_slice_in_dim(largest, axis.shard_index() * split.shard_size, split.shard_size, 1)
    return largest
