"""Slice, gather and reduce-scatter of one array inside pmap, over an axis that may consist of groups.

A value is called `shard_x` before a gather and `full_x` after it. A scatter sums; the caller divides for a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from zero.partition.collectives.axis import Axis
from zero.partition.layout import LeafLayout
from zero.partition.moves import AllGather, AllToAll, Move, Slice

Step = Callable[[jax.Array], jax.Array]


def slice_array(full_x: jax.Array, leaf: LeafLayout, shard_index: jax.Array) -> jax.Array:
    """A device's shard of a whole array; no communication.

    Args:
      shard_index: `Axis.shard_index()`, once for all leaves of a tree.

    Per device: `leaf.shape` in, `leaf.shard_shape` out. Call inside pmap.
    """
    for split in leaf.splits:
        full_x = pad_array(full_x, split.dim, split.padding)
        first = shard_index * split.shard_size
        full_x = lax.dynamic_slice_in_dim(full_x, first, split.shard_size, split.dim, allow_negative_indices=False)
    return full_x


def gather_array(
    shard_x: jax.Array,
    leaf: LeafLayout,
    axis: Axis,
    dtype: DTypeLike | None = None,
    wire_dtype: DTypeLike | None = None,
) -> jax.Array:
    """The array that a device computes with, from its shard, in `dtype` (default: its own): a fold over `leaf.moves`.

    With `wire_dtype=jnp.int8` floats are sent as int8 by `to_int8`, a quarter of the bytes of float32. Integers,
    booleans and complex numbers keep their dtype.

    Per device: `leaf.shard_shape` in, `leaf.gathered_shape` out. Call inside pmap.
    """
    x = as_dtype(shard_x, dtype)
    is_quantized = _is_quantized(x, leaf, wire_dtype)
    if is_quantized:
        x = fill_padding(x, leaf, axis, 0)  # padding would affect the scale
    for move in leaf.moves:
        match move:
            case AllGather() if is_quantized:
                x = _gather_quantized(x, move, axis)
            case AllGather(dim, over, apart):
                for phase in axis.phases(over, apart):
                    x = lax.all_gather(x, axis.name, axis=dim, tiled=True, axis_index_groups=axis.groups(*phase))
            case AllToAll(split, concat, over):
                x = lax.all_to_all(x, axis.name, split, concat, tiled=True, axis_index_groups=axis.groups(over))
            case Slice(dim, over):
                size = x.shape[dim] // over
                x = lax.dynamic_slice_in_dim(x, axis.shard_index() % over * size, size, dim)
    return cropped_for(leaf, x)


def scatter_sum_array(
    full_x: jax.Array,
    leaf: LeafLayout,
    axis: Axis,
    *,
    wire_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
) -> jax.Array:
    """This device's shard of the sum over devices: a fold over the transposes of `leaf.moves`, last one first.

    A part is summed over the devices that compute with it. A leaf that is whole on every device is all-reduced.

    The dtypes are for floats: `wire_dtype=None` keeps that of `full_x`, `reduce_dtype=None` too, but sums 16-bit floats
    in float32. With `wire_dtype=jnp.int8` floats of split leaves are sent as int8 by `to_int8`, in one phase.

    If `axis.exchanges`, or if the dtype on the wire is narrower than the dtype of the sum, an `all_to_all` moves the
    parts and each device sums them: the same bytes as a reduce-scatter, rounded once instead of at every hop.

    Per device: `leaf.gathered_shape` in, `leaf.shard_shape` out, in `reduce_dtype`. Call inside pmap.
    """
    for step in scatter_steps(full_x, leaf, axis, wire_dtype=wire_dtype, reduce_dtype=reduce_dtype):
        full_x = step(full_x)
    return full_x


def scatter_steps(
    full_x: jax.Array,
    leaf: LeafLayout,
    axis: Axis,
    *,
    wire_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
) -> list[Step]:
    """The steps of `scatter_sum_array`, with at most one collective of a split leaf in each; the first takes `full_x`.

    So a caller can run the first steps of several leaves before their second ones.
    """
    if not jnp.issubdtype(full_x.dtype, jnp.floating):
        wire_dtype = reduce_dtype = None
    reduce = np.dtype(reduce_dtype or sum_dtype(full_x.dtype))
    is_quantized = _is_quantized(full_x, leaf, wire_dtype)
    wire = np.dtype(full_x.dtype if wire_dtype is None or is_quantized else wire_dtype)
    moves = [part for move in reversed(leaf.moves) for part in _one_phase_each(move, axis, is_quantized=is_quantized)]

    def step(x: jax.Array, number: int) -> jax.Array:
        if number == 0:
            x = padded_for(leaf, x.astype(wire))
        if moves:
            x = _scatter_move(x, moves[number], axis, wire, reduce, is_quantized=is_quantized)
        is_last = number == max(len(moves) - 1, 0)
        return _summed(x.astype(reduce), leaf, axis) if is_last else x

    return [partial(step, number=number) for number in range(max(len(moves), 1))]


def _one_phase_each(move: Move, axis: Axis, *, is_quantized: bool) -> list[Move]:
    """A gather as one move per phase of the axis, in the order of a scatter. Int8 travels over all phases at once."""
    if not isinstance(move, AllGather) or is_quantized:
        return [move]
    return [AllGather(move.dim, over, apart) for over, apart in reversed(axis.phases(move.over, move.apart))]


def _scatter_move(
    x: jax.Array, move: Move, axis: Axis, wire: np.dtype, reduce: np.dtype, *, is_quantized: bool
) -> jax.Array:
    """The transpose of one move."""
    match move:
        case AllGather() if is_quantized:
            return _scatter_sum_quantized(x, move, axis, reduce)
        case AllGather(dim, over, apart):
            return _scatter_sum_phase(x.astype(wire), dim, axis, over, apart, reduce)
        case AllToAll(split, concat, over):
            groups = axis.groups(over)
            return lax.all_to_all(x.astype(wire), axis.name, concat, split, tiled=True, axis_index_groups=groups)
        case Slice(dim, over):
            size = x.shape[dim]
            zeros = jnp.zeros((*x.shape[:dim], size * over, *x.shape[dim + 1 :]), x.dtype)
            return lax.dynamic_update_slice_in_dim(zeros, x, axis.shard_index() % over * size, dim)


def _summed(x: jax.Array, leaf: LeafLayout, axis: Axis) -> jax.Array:
    """The sum over devices or copies that is left after the moves."""
    if not leaf.splits:
        return lax.psum(x, axis.name)
    if not axis.sums_copies:
        return x
    return sum_copies_of_array(x, axis)


def sum_copies_of_array(shard_x: jax.Array, axis: Axis) -> jax.Array:
    """The sum of a shard over the copies of the state, the same bits on all of them.

    With `axis.copies_dtype="bfloat16"` it is a sum in bfloat16. With "int8" each copy sums one piece of the shard in
    float32 and sends it to the others: the bytes of an all-reduce, where each summand is rounded once and the sum once.
    Shards of less than a block of 256 per copy are summed as they are.

    Per device: any shape in, the same shape and dtype out. Call inside pmap.
    """
    if axis.replicas == 1:
        return shard_x
    dtype = axis.copies_dtype
    if dtype == "int8":
        has_blocks = shard_x.size >= ELEMENTS_PER_SCALE * axis.replicas
        if has_blocks and jnp.issubdtype(shard_x.dtype, jnp.floating):
            return _sum_copies_quantized(shard_x, axis)
        dtype = None
    groups = axis.groups(axis.replicas, apart=axis.shards)
    sums = lax.psum(as_dtype(shard_x, dtype), axis.name, axis_index_groups=groups)
    return sums.astype(shard_x.dtype)


def _sum_copies_quantized(shard_x: jax.Array, axis: Axis) -> jax.Array:
    between_copies = AllGather(0, axis.replicas, axis.shards)
    elements = pad_array(shard_x.ravel(), 0, -shard_x.size % axis.replicas)
    piece = _scatter_sum_quantized(elements, between_copies, axis, sum_dtype(shard_x.dtype))
    sums = _gather_quantized(piece, between_copies, axis)
    return sums[: shard_x.size].reshape(shard_x.shape).astype(shard_x.dtype)


def as_dtype(x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """Casts floats; integers and complex numbers are unchanged."""
    if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(dtype)


ELEMENTS_PER_SCALE = 256  # 4 bytes of float32 for 256 of int8


def to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Int8 with a float32 scale per 256 elements of a row; an element is off by at most the largest of the 256 / 254.

    `(rows, ...)` in; int8 `(rows, blocks, 256)` and float32 `(rows, blocks, 1)` out.

    Source: Dettmers et al., arXiv 2110.02861, section 2; on the wire as in ZeRO++, arXiv 2306.10209.
    """
    rows = x.reshape(x.shape[0], -1).astype(jnp.float32)
    blocks = pad_array(rows, 1, -rows.shape[1] % ELEMENTS_PER_SCALE).reshape(x.shape[0], -1, ELEMENTS_PER_SCALE)
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127
    return jnp.round(blocks / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale


def from_int8(values: jax.Array, scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Float32 `(rows, *shape)`, the inverse of `to_int8`."""
    rows = (values.astype(jnp.float32) * scale).reshape(values.shape[0], -1)
    return rows[:, : math.prod(shape)].reshape(-1, *shape)


def _is_quantized(x: jax.Array, leaf: LeafLayout, wire_dtype: DTypeLike | None) -> bool:
    is_int8 = wire_dtype is not None and np.dtype(wire_dtype) == np.int8
    if is_int8 and not all(isinstance(move, AllGather) for move in leaf.moves):
        raise ValueError(f"leaf {leaf.name}: a leaf of experts, exchanged in groups, does not travel as int8")
    return is_int8 and jnp.issubdtype(x.dtype, jnp.floating)


def _gather_quantized(x: jax.Array, move: AllGather, axis: Axis) -> jax.Array:
    groups = axis.groups(move.over, move.apart)
    dim = move.dim
    values, scale = (lax.all_gather(part[0], axis.name, axis_index_groups=groups) for part in to_int8(x[None]))
    shards = jnp.moveaxis(from_int8(values, scale, x.shape), 0, dim)
    return lax.collapse(shards, dim, dim + 2).astype(x.dtype)


def _scatter_sum_quantized(x: jax.Array, move: AllGather, axis: Axis, reduce: np.dtype) -> jax.Array:
    groups = axis.groups(move.over, move.apart)
    shards = _parts(x, move.dim, move.over)
    values, scale = (
        lax.all_to_all(part, axis.name, 0, 0, tiled=True, axis_index_groups=groups) for part in to_int8(shards)
    )
    return from_int8(values, scale, shards.shape[1:]).astype(reduce).sum(0)


def sum_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype of sums over devices: the dtype itself, but float32 for narrower floats."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(jnp.float32 if is_narrow else dtype)


def _scatter_sum_phase(x: jax.Array, dim: int, axis: Axis, over: int, apart: int, reduce: np.dtype) -> jax.Array:
    groups = axis.groups(over, apart)
    if x.dtype == reduce and not axis.exchanges:
        return lax.psum_scatter(x, axis.name, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    # Without the barrier XLA for TPU computes a gradient in the order of its parts, from copies of activations.
    x = lax.optimization_barrier(x)
    received = lax.all_to_all(_parts(x, dim, over), axis.name, 0, 0, axis_index_groups=groups)
    return received.astype(reduce).sum(0)


def _parts(x: jax.Array, dim: int, over: int) -> jax.Array:
    """What each device of a group is sent, in the first dimension: SparseCores exchange no other one.

    Per device: `(..., over * n, ...)` in, `(over, ..., n, ...)` out.
    """
    return jnp.moveaxis(x.reshape(*x.shape[:dim], over, -1, *x.shape[dim + 1 :]), dim, 0)


def pad_array(x: jax.Array, dim: int, amount: int) -> jax.Array:
    """Appends zeros along one dimension."""
    widths = [(0, amount if i == dim else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, lax.full_like(x, 0, shape=()), widths) if amount else x  # full_like keeps a weak type


def cropped_for(leaf: LeafLayout, moved_x: jax.Array) -> jax.Array:
    """A gathered array without the padding; the inverse of `padded_for`."""
    shape = leaf.gathered_shape
    if moved_x.shape == shape:
        return moved_x
    return lax.slice(moved_x, [0] * len(shape), shape)


def padded_for(leaf: LeafLayout, full_x: jax.Array) -> jax.Array:
    """A gathered array, padded with zeros to divide into shards. A part contains its padding already."""
    for dim, size in enumerate(leaf.moved_shape):
        full_x = pad_array(full_x, dim, size - full_x.shape[dim])
    return full_x


def fill_padding(shard_x: jax.Array, leaf: LeafLayout, axis: Axis, fill: ArrayLike) -> jax.Array:
    """A shard with `fill` in its padding, which updates may have changed.

    Per device: `leaf.shard_shape` in and out. Call inside pmap.
    """
    for split in leaf.splits:
        if split.padding:
            is_own = split.positions(axis.shard_index()) < split.size
            is_own = lax.broadcast_in_dim(is_own, shard_x.shape, (split.dim,))
            shard_x = jnp.where(is_own, shard_x, jnp.asarray(fill, shard_x.dtype))
    return shard_x
