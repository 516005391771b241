"""One array, inside pmap: its slice, its gather and its reduce-scatter, over an axis that may be cut into groups.

`full_x` and `shard_x` say which side of a gather a value is on. Scaling is never hidden: a scatter sums, and whoever
wants a mean divides where it is named.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from zero.partition.collectives.axis import Axis
from zero.partition.layout import LeafLayout


def slice_array(full_x: jax.Array, leaf: LeafLayout, axis: Axis) -> jax.Array:
    """This device's shard of a whole array; no communication.

    Per device: `leaf.shape` in, `leaf.shard_shape` out. Call inside pmap.
    """
    for split in leaf.splits:
        full_x = pad_array(full_x, split.dim, split.padding)
        full_x = lax.dynamic_slice_in_dim(full_x, axis.shard_index() * split.shard_size, split.shard_size, split.dim)
    return full_x


def gather_array(
    shard_x: jax.Array,
    leaf: LeafLayout,
    axis: Axis,
    dtype: DTypeLike | None = None,
    wire_dtype: DTypeLike | None = None,
) -> jax.Array:
    """The whole array, or its part, from its shards: `all_gather`, in `dtype` on the wire and after (default: its own).

    With `wire_dtype=jnp.int8` floats travel as `quantise` makes them, which costs a quarter of float32. Integers,
    booleans and complex numbers keep their dtype.

    Per device: `leaf.shard_shape` in, `leaf.gathered_shape` out. Call inside pmap.
    """
    full_x = as_dtype(shard_x, dtype)
    if leaf.exchanged > 1 and not leaf.splits:
        own = leaf.gathered_shape[leaf.expert_dim]
        return lax.dynamic_slice_in_dim(full_x, _expert_rank(axis) * own, own, leaf.expert_dim)
    if _is_quantised(full_x, leaf, wire_dtype) and leaf.splits:
        return _gather_quantised(full_x, leaf, axis)
    for split in leaf.splits:
        for phase in reversed(axis.phases(leaf)):
            groups: Any = {"tiled": True, "axis_index_groups": axis.groups(phase)}
            if leaf.exchanged > 1 and phase == len(axis.shape) - 1:
                full_x = lax.all_to_all(full_x, axis.name, leaf.expert_dim, split.dim, **groups)
            else:
                full_x = lax.all_gather(full_x, axis.name, axis=split.dim, **groups)
        full_x = lax.slice_in_dim(full_x, 0, leaf.gathered_shape[split.dim], axis=split.dim)
    return full_x


def scatter_sum_array(
    full_x: jax.Array,
    leaf: LeafLayout,
    axis: Axis,
    *,
    wire_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
) -> jax.Array:
    """This device's shard of the sum over all devices: `psum_scatter`; a leaf that is whole is all-reduced.

    Of a leaf of several parts each device has one, and the sum is over the devices that have the same; likewise of a
    leaf of experts.

    With `wire_dtype=jnp.int8` floats of split leaves travel as `quantise` makes them, once, whatever the phases.

    Where the dtype on the wire is narrower than the dtype of the sum, an `all_to_all` moves the parts and each device
    sums what it received: the same bytes as a reduce-scatter, rounded once and not at every hop.

    Per device: `leaf.gathered_shape` in, `leaf.shard_shape` out, in `reduce_dtype`. Call inside pmap.

    Args:
      full_x: this device's summand.
      leaf: its layout.
      axis: the pmap axis.
      wire_dtype: of floats; None keeps the dtype of `full_x`.
      reduce_dtype: of floats; None keeps the dtype of `full_x`, but sums 16-bit floats in float32.
    """
    if not jnp.issubdtype(full_x.dtype, jnp.floating):
        wire_dtype = reduce_dtype = None
    reduce = np.dtype(reduce_dtype or sum_dtype(full_x.dtype))
    if _is_quantised(full_x, leaf, wire_dtype):
        if leaf.splits:
            return _scatter_sum_quantised(full_x, leaf, axis, reduce)
        wire_dtype = None
    wire = np.dtype(wire_dtype or full_x.dtype)
    if leaf.exchanged > 1 and not leaf.splits:
        start: list[Any] = [0] * full_x.ndim
        start[leaf.expert_dim] = _expert_rank(axis) * full_x.shape[leaf.expert_dim]
        full_x = lax.dynamic_update_slice(jnp.zeros(leaf.shape, full_x.dtype), full_x, start)
    x = full_x.astype(wire)
    for split in leaf.splits:
        x = padded_for(leaf, x)
        for phase in axis.phases(leaf):
            if leaf.exchanged > 1 and phase == len(axis.shape) - 1:
                groups: Any = {"tiled": True, "axis_index_groups": axis.groups(phase)}
                x = lax.all_to_all(x.astype(wire), axis.name, split.dim, leaf.expert_dim, **groups).astype(reduce)
            else:
                x = _scatter_sum_phase(x.astype(wire), split.dim, axis, phase, reduce)
        if axis.sums_copies:
            x = sum_copies_of_array(x, axis)
    return x if leaf.splits else lax.psum(x.astype(reduce), axis.name)


def sum_copies_of_array(shard_x: jax.Array, axis: Axis) -> jax.Array:
    """The sum of a shard over the copies of the state."""
    return lax.psum(shard_x, axis.name, axis_index_groups=axis.groups(0)) if axis.replicas > 1 else shard_x


def as_dtype(x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """A float in another dtype; of integers and complex numbers a cast would lose more than digits."""
    return x if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)


BLOCK = 256  # elements that share a scale: 4 bytes of float32 to 256 of int8


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of blocks of int8 with a float32 scale each; an element is off by at most its block's largest / 254.

    `(rows, ...)` in; int8 `(rows, blocks, 256)` and float32 `(rows, blocks, 1)` out.

    Source: Dettmers et al., arXiv 2110.02861, section 2; on the wire as in ZeRO++, arXiv 2306.10209.
    """
    rows = x.reshape(x.shape[0], -1).astype(jnp.float32)
    blocks = pad_array(rows, 1, -rows.shape[1] % BLOCK).reshape(x.shape[0], -1, BLOCK)
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127
    return jnp.round(blocks / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale


def dequantise(values: jax.Array, scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Float32 `(rows, *shape)` from what `quantise` made."""
    rows = (values.astype(jnp.float32) * scale).reshape(values.shape[0], -1)
    return rows[:, : math.prod(shape)].reshape(-1, *shape)


def _expert_rank(axis: Axis) -> jax.Array:
    """The place of this device in its expert group."""
    return axis.shard_index() % axis.expert


def _is_quantised(x: jax.Array, leaf: LeafLayout, wire_dtype: DTypeLike | None) -> bool:
    is_int8 = wire_dtype is not None and np.dtype(wire_dtype) == np.int8
    if is_int8 and leaf.exchanged > 1:
        raise ValueError(f"leaf {leaf.name}: what expert groups exchange does not travel as int8")
    return is_int8 and jnp.issubdtype(x.dtype, jnp.floating)


def _gather_quantised(shard_x: jax.Array, leaf: LeafLayout, axis: Axis) -> jax.Array:
    (split,) = leaf.splits
    rows, groups = fill_padding(shard_x, leaf, axis, 0)[None], axis.copies(leaf.parts)  # else it would share a scale
    values, scale = (lax.all_gather(x[0], axis.name, axis_index_groups=groups) for x in quantise(rows))
    shards = jnp.moveaxis(dequantise(values, scale, leaf.shard_shape), 0, split.dim)
    full_x = lax.collapse(shards, split.dim, split.dim + 2).astype(shard_x.dtype)
    return lax.slice_in_dim(full_x, 0, leaf.gathered_shape[split.dim], axis=split.dim)


def _scatter_sum_quantised(full_x: jax.Array, leaf: LeafLayout, axis: Axis, reduce: np.dtype) -> jax.Array:
    (split,) = leaf.splits
    dim, padded = split.dim, padded_for(leaf, full_x)
    shards = padded.reshape(*padded.shape[:dim], -1, split.shard_size, *padded.shape[dim + 1 :])
    values, scale = (
        lax.all_to_all(x, axis.name, 0, 0, tiled=True, axis_index_groups=axis.copies(leaf.parts))
        for x in quantise(jnp.moveaxis(shards, dim, 0))
    )
    shard_x = dequantise(values, scale, leaf.shard_shape).astype(reduce).sum(0)
    return sum_copies_of_array(shard_x, axis) if axis.sums_copies else shard_x


def sum_dtype(dtype: DTypeLike) -> np.dtype:
    """Where sums over devices are made: in the dtype itself, but never in a float of less than 32 bits."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(jnp.float32 if is_narrow else dtype)


def _scatter_sum_phase(x: jax.Array, dim: int, axis: Axis, phase: int, reduce: np.dtype) -> jax.Array:
    groups, parts = axis.groups(phase), axis.shape[phase]
    if x.dtype == reduce:
        return lax.psum_scatter(x, axis.name, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    received = lax.all_to_all(x, axis.name, dim, dim, tiled=True, axis_index_groups=groups)
    shape = (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
    return received.reshape(shape).astype(reduce).sum(dim)


def pad_array(x: jax.Array, dim: int, amount: int) -> jax.Array:
    """Appends zeros along one dimension."""
    widths = [(0, amount if i == dim else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, lax.full_like(x, 0, shape=()), widths) if amount else x  # full_like keeps a weak type


def padded_for(leaf: LeafLayout, full_x: jax.Array) -> jax.Array:
    """A gathered array with zeros appended, so that it divides into shards; a part has its padding."""
    for split in leaf.splits if leaf.parts == 1 else ():
        full_x = pad_array(full_x, split.dim, split.padding)
    return full_x


def fill_padding(shard_x: jax.Array, leaf: LeafLayout, axis: Axis, fill: ArrayLike) -> jax.Array:
    """A shard with something known in its padding, where an update may have left anything.

    Per device: `leaf.shard_shape` in and out. Call inside pmap.
    """
    for split in leaf.splits:
        if split.padding:
            first = axis.shard_index() * split.shard_size
            position = first + lax.broadcasted_iota(jnp.int32, shard_x.shape, split.dim)
            shard_x = jnp.where(position < split.size, shard_x, jnp.asarray(fill, shard_x.dtype))
    return shard_x
