"""Coalesced collectives, inside pmap: small leaves share one, because for them latency outweighs bytes.

Leaves that share are joined into one array with a row for each shard; a leaf's part of a row is its shard, split
dimension first. The sums are those of one collective per leaf, in the same order, and barriers keep XLA from computing
the leaves themselves in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from zero.partition.collectives import Axis, as_dtype, gather_array, pad_array, scatter_sum_array
from zero.partition.layout import LeafLayout, Split

SMALL = 1 << 18  # elements of a leaf that shares; larger ones are not worth the copies
FULL = 1 << 20  # elements of a joined array, which is copied twice


def gather_arrays(
    shards: Sequence[jax.Array],
    leaves: Sequence[LeafLayout],
    axis: Axis,
    dtype: DTypeLike | None,
    wire_dtype: DTypeLike | None = None,
) -> list[jax.Array]:
    """`gather_array` of each leaf, small ones together. Call inside pmap.

    A leaf travels in `dtype` or in its own, whichever is narrower.
    """
    cast = [x if dtype and x.dtype.itemsize < np.dtype(dtype).itemsize else as_dtype(x, dtype) for x in shards]
    full: dict[int, jax.Array] = {}
    for members in _coalesce(cast, leaves, wire_dtype):
        if len(members) == 1:
            full[members[0]] = gather_array(cast[members[0]], leaves[members[0]], axis, wire_dtype=wire_dtype)
            continue
        row = jnp.concatenate([_rows(cast[i], leaves[i].splits[0], 1) for i in members], axis=1)
        rows = gather_array(row, _joined_layout(row, axis), axis, wire_dtype=wire_dtype)
        for i, part in _parts(rows, members, leaves):
            split = leaves[i].splits[0]
            full_x = lax.slice_in_dim(_from_rows(part, leaves[i], split.shards), 0, split.size, axis=split.dim)
            full[i] = lax.optimization_barrier(full_x)
    return [as_dtype(full[i], dtype) for i in range(len(leaves))]


def scatter_sum_arrays(
    full: Sequence[jax.Array],
    leaves: Sequence[LeafLayout],
    axis: Axis,
    *,
    wire_dtype: DTypeLike | None,
    reduce_dtype: DTypeLike | None,
) -> list[jax.Array]:
    """`scatter_sum_array` of each leaf, small ones together. Call inside pmap."""
    shards: dict[int, jax.Array] = {}
    for members in _coalesce(full, leaves, wire_dtype):
        if len(members) == 1:
            i = members[0]
            shards[i] = scatter_sum_array(full[i], leaves[i], axis, wire_dtype=wire_dtype, reduce_dtype=reduce_dtype)
            continue
        rows = []
        for i in members:
            split = leaves[i].splits[0]
            padded = pad_array(lax.optimization_barrier(full[i]), split.dim, split.padding)
            rows.append(_rows(padded, split, axis.shards))
        joined = jnp.concatenate(rows, axis=1)
        row = scatter_sum_array(
            joined, _joined_layout(joined, axis), axis, wire_dtype=wire_dtype, reduce_dtype=reduce_dtype
        )
        shards |= {i: _from_rows(part, leaves[i], 1) for i, part in _parts(row, members, leaves)}
    return [shards[i] for i in range(len(leaves))]


def _coalesce(
    arrays: Sequence[jax.Array], leaves: Sequence[LeafLayout], wire_dtype: DTypeLike | None
) -> Iterator[list[int]]:
    """Which leaves travel together: neighbours among the small split ones of a dtype; all others alone.

    Leaves that are quantised travel alone, because no two of them may share a scale.
    """
    filling: dict[np.dtype, list[int]] = {}
    for i, (x, leaf) in enumerate(zip(arrays, leaves, strict=True)):
        if not leaf.splits or math.prod(leaf.shape) > SMALL or (wire_dtype and np.dtype(wire_dtype) == np.int8):
            yield [i]
            continue
        members = filling.setdefault(x.dtype, [])
        members.append(i)
        if sum(math.prod(leaves[j].shape) for j in members) > FULL:
            yield filling.pop(x.dtype)
    yield from filling.values()


def _rows(x: jax.Array, split: Split, shards: int) -> jax.Array:
    return jnp.moveaxis(x, split.dim, 0).reshape(shards, -1)


def _from_rows(rows: jax.Array, leaf: LeafLayout, shards: int) -> jax.Array:
    split = leaf.splits[0]
    rest = leaf.shape[: split.dim] + leaf.shape[split.dim + 1 :]
    return jnp.moveaxis(rows.reshape(shards * split.shard_size, *rest), 0, split.dim)


def _parts(rows: jax.Array, members: Sequence[int], leaves: Sequence[LeafLayout]) -> Iterator[tuple[int, jax.Array]]:
    widths = [math.prod(leaves[i].shard_shape) for i in members]
    yield from zip(members, jnp.split(rows, np.cumsum(widths)[:-1].tolist(), axis=1), strict=True)


def _joined_layout(x: jax.Array, axis: Axis) -> LeafLayout:
    shape = (axis.shards, x.shape[1])
    return LeafLayout(("joined",), shape, np.dtype(x.dtype), (Split(0, axis.shards, axis.shards),))
