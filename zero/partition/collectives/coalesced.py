"""Coalesced collectives, inside pmap: small leaves share one collective, to save latency.

These leaves are joined into one array with a row per shard; a leaf's part of a row is its shard, split dimension first.
Sums have the same order as with one collective per leaf, and barriers keep XLA from reordering the computation of the
leaves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from zero.partition.collectives.arrays import (
    Step,
    as_dtype,
    cropped_for,
    gather_array,
    padded_for,
    scatter_steps,
)
from zero.partition.collectives.axis import Axis
from zero.partition.layout import LeafLayout, Split
from zero.partition.moves import AllGather

SMALL = 1 << 18  # elements of the largest leaf that is joined; copying a larger one costs more than latency
FULL = 1 << 20  # elements from which a joined array is complete
MANY = 64  # leaves in a joined array, from which the time of the compiler counts


def gather_arrays(
    shards: Sequence[jax.Array],
    leaves: Sequence[LeafLayout],
    axis: Axis,
    dtype: DTypeLike | None,
    wire_dtype: DTypeLike | None,
) -> list[jax.Array]:
    """`gather_array` of each leaf, small ones together. Call inside pmap.

    The dtype on the wire is `dtype` or the leaf's own, whichever is narrower. If `axis.small_first`, the others wait
    for the small ones.
    """
    cast = [x if dtype and x.dtype.itemsize < np.dtype(dtype).itemsize else as_dtype(x, dtype) for x in shards]
    full: dict[int, jax.Array] = {}
    groups = list(_coalesce(cast, leaves, is_quantized=_is_int8(wire_dtype)))
    if axis.small_first:
        groups.sort(key=lambda members: len(members) == 1)
    small: jax.Array | None = None
    for members in groups:
        if len(members) == 1:
            i = members[0]
            x = cast[i]
            if small is not None:
                x, _ = lax.optimization_barrier((x, small))
            full[i] = gather_array(x, leaves[i], axis, wire_dtype=wire_dtype)
            continue
        row = jnp.concatenate([_rows(cast[i], leaves[i]) for i in members], axis=1)
        rows = gather_array(row, _joined_layout(row, axis, leaves[members[0]]), axis, wire_dtype=wire_dtype)
        small = rows if axis.small_first else None
        for i, columns in _columns(rows, members, leaves, axis):
            full[i] = lax.optimization_barrier(cropped_for(leaves[i], _from_rows(columns, leaves[i])))
    return [as_dtype(full[i], dtype) for i in range(len(leaves))]


def scatter_sum_arrays(
    full: Sequence[jax.Array],
    leaves: Sequence[LeafLayout],
    axis: Axis,
    wire_dtype: DTypeLike | None,
    reduce_dtype: DTypeLike | None,
) -> list[jax.Array]:
    """`scatter_sum_array` of each leaf, small ones together. Call inside pmap.

    If `axis.exchanges` or `axis.orders_scatters`, single leaves wait for each other in their first phase, the largest
    first, and in further phases for the last of these: XLA for TPU has one in flight at a time, and the last one in the
    backward pass of a layer is hidden by nothing (docs/decisions/collectives.md). With expert groups they do not wait,
    because tokens travel in the backward pass as well.

    Raises:
      ValueError: a dtype would cut floats to integers.
    """
    _check_dtypes(wire_dtype, reduce_dtype)
    if axis.orders_scatters and not _is_int8(wire_dtype):
        # Before they wait, so that products write what is sent. Exchanges of a whole model would need more memory.
        full = [as_dtype(x, wire_dtype) for x in full]
    between_copies = axis.copies_dtype if axis.sums_copies else None
    is_quantized = _is_int8(wire_dtype) or _is_int8(between_copies)
    groups = list(_coalesce(full, leaves, is_quantized=is_quantized))
    is_ordered = (axis.exchanges or axis.orders_scatters) and all(len(leaf.moves) <= 1 for leaf in leaves)
    if is_ordered:
        if axis.small_first:  # the last of equal leaves first; elsewhere a gather would wait for their exchanges
            groups.reverse()  # (benchmarks/measured/hidden-gathers.md)
        groups.sort(key=lambda members: sum(math.prod(leaves[i].shape) for i in members), reverse=True)
    arrays: list[jax.Array] = []
    steps: list[list[Step]] = []
    for members in groups:
        x, layout = full[members[0]], leaves[members[0]]
        if len(members) > 1:
            rows = [_rows(padded_for(leaves[i], lax.optimization_barrier(full[i])), leaves[i]) for i in members]
            x = jnp.concatenate(rows, axis=1)
            layout = _joined_layout(x, axis, layout)
        arrays.append(x)
        steps.append(scatter_steps(x, layout, axis, wire_dtype=wire_dtype, reduce_dtype=reduce_dtype))
    turns = [(phase, group) for group in range(len(groups)) for phase in range(len(steps[group]))]
    if is_ordered:
        turns.sort()
    last: jax.Array | None = None
    for phase, group in turns:
        x = arrays[group]
        is_single = len(groups[group]) == 1
        if is_ordered and is_single and last is not None:
            x, _ = lax.optimization_barrier((x, last))
        arrays[group] = steps[group][phase](x)
        if is_single and not phase:
            last = arrays[group]
    shards: dict[int, jax.Array] = {}
    for members, x in zip(groups, arrays, strict=True):
        if len(members) == 1:
            shards[members[0]] = x
            continue
        shards |= {i: _from_rows(columns, leaves[i]) for i, columns in _columns(x, members, leaves, axis)}
    return [shards[i] for i in range(len(leaves))]


def _check_dtypes(wire_dtype: DTypeLike | None, reduce_dtype: DTypeLike | None) -> None:
    """Raises for dtypes other than floats; only int8 travels with scales.

    >>> _check_dtypes(np.int16, None)
    Traceback (most recent call last):
    ValueError: wire_dtype=int16 would cut gradients to integers: pass a dtype of floats, or int8, which has scales
    """
    for name, dtype in (("wire_dtype", wire_dtype), ("reduce_dtype", reduce_dtype)):
        has_scales = name == "wire_dtype" and _is_int8(dtype)
        if dtype is None or has_scales or jnp.issubdtype(dtype, jnp.floating):
            continue
        scales = ", or int8, which has scales" if name == "wire_dtype" else ""
        raise ValueError(
            f"{name}={np.dtype(dtype).name} would cut gradients to integers: pass a dtype of floats{scales}"
        )


def _is_int8(wire_dtype: DTypeLike | None) -> bool:
    return wire_dtype is not None and np.dtype(wire_dtype) == np.int8


def _coalesce(arrays: Sequence[jax.Array], leaves: Sequence[LeafLayout], *, is_quantized: bool) -> Iterator[list[int]]:
    """Indices of leaves that share a collective: small leaves of one dtype with the same all-gather.

    Every other leaf has its own collective, as has every quantized one, because no two may share a scale.
    """
    filling: dict[tuple[np.dtype, int], list[int]] = {}
    elements: Counter[tuple[np.dtype, int]] = Counter()
    for i, (x, leaf) in enumerate(zip(arrays, leaves, strict=True)):
        match leaf.moves:
            case (AllGather(over=over, apart=1),) if math.prod(leaf.shape) <= SMALL and not is_quantized:
                kind = x.dtype, over
                filling.setdefault(kind, []).append(i)
                elements[kind] += math.prod(leaf.shape)
                if elements[kind] > FULL:
                    del elements[kind]
                    yield filling.pop(kind)
            case _:
                yield [i]
    yield from filling.values()


def _rows(x: jax.Array, leaf: LeafLayout) -> jax.Array:
    """A row per shard."""
    split = leaf.splits[0]
    return jnp.moveaxis(x, split.dim, 0).reshape(x.shape[split.dim] // split.shard_size, -1)


def _from_rows(rows: jax.Array, leaf: LeafLayout) -> jax.Array:
    split = leaf.splits[0]
    rest = leaf.shape[: split.dim] + leaf.shape[split.dim + 1 :]
    return jnp.moveaxis(rows.reshape(len(rows) * split.shard_size, *rest), 0, split.dim)


def _columns(
    rows: jax.Array, members: Sequence[int], leaves: Sequence[LeafLayout], axis: Axis
) -> Iterator[tuple[int, jax.Array]]:
    """The columns of each leaf.

    XLA for CPU compiles kernels that are equal once, so that those of many leaves should not differ in their columns.
    """
    widths = [math.prod(leaves[i].shard_shape) for i in members]
    firsts = np.cumsum([0, *widths[:-1]])
    if len(members) < MANY:
        yield from zip(members, jnp.split(rows, firsts[1:].tolist(), axis=1), strict=True)
        return
    index = lax.axis_index(axis.name)
    # No compiler knows that this is 0, and elsewhere than on CPU it is a constant.
    zero = lax.platform_dependent(index, cpu=lambda i: lax.div(i, jnp.int32(axis.size)), default=jnp.zeros_like)
    zeros = jnp.broadcast_to(zero, (3,))
    for i, first, width in zip(members, firsts.tolist(), widths, strict=True):
        yield i, _columns_from(rows, first, zeros, width)


def _columns_from(rows: jax.Array, first: int, zeros: jax.Array, width: int) -> jax.Array:
    """Columns from a number on, which in an array is an input of a kernel and not a part of it.

    An array of numpy would be an argument of the program, and the compiler compares each of these with all others.
    """
    numbers = zeros + lax.pad(lax.broadcast(np.int32(first), (1,)), np.int32(0), [(1, 1, 0)])
    return lax.dynamic_slice_in_dim(rows, jnp.max(numbers), width, axis=1, allow_negative_indices=False)


def _joined_layout(x: jax.Array, axis: Axis, member: LeafLayout) -> LeafLayout:
    shape = (axis.shards, x.shape[1])
    split = Split(0, axis.shards, axis.shards)
    return LeafLayout(("joined",), shape, np.dtype(x.dtype), (split,), moves=(AllGather(0, member.moves[0].over),))
