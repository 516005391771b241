"""One array, inside pmap: its slice, its gather and its reduce-scatter, over an axis that may be cut into groups.

`full_x` and `shard_x` say which side of a gather a value is on. Scaling is never hidden: a scatter sums, and whoever
wants a mean divides where it is named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from zero.partition.layout import LeafLayout


@dataclasses.dataclass(frozen=True)
class Axis:
    """A pmap axis and everything about its groups.

    The devices of the axis form a grid of shape `(replicas, phase, phase, ...)`. State is split over the phases and
    replicated across the first dimension (hybrid sharding). A reduce-scatter takes the phases in order, one collective
    each, and a gather takes them in reverse, so the row-major position inside the phases is the shard that a device
    holds. Slices, collectives and the mesh that labels whole arrays all take that position from here.

    Attributes:
      name: the `axis_name` of the pmap.
      shape: `(replicas, *phases)`; its product is the size of the axis.
      devices: positions on the pmap axis in row-major order of the grid; by default 0, 1, 2, ...

    Raises:
      ValueError: `devices` is not a permutation of the positions on the axis.

    >>> Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)).shard_of_device()
    (0, 4, 1, 5, 2, 6, 3, 7)
    """

    name: str
    shape: tuple[int, ...]
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        if len(self.shape) < 2 or size < 1:
            raise ValueError(f"axis {self.name!r}: shape is (replicas, phase, ...), got {self.shape}")
        object.__setattr__(self, "devices", self.devices or tuple(range(size)))
        if sorted(self.devices) != list(range(size)):
            raise ValueError(f"axis {self.name!r}: devices must be a permutation of 0..{size - 1}, got {self.devices}")

    @classmethod
    def from_devices(cls, name: str, devices: Sequence[jax.Device]) -> Axis:
        """One phase along each dimension of a TPU slice's torus, or inside hosts and then across them.

        Over groups along one dimension a TPU runs true reduce-scatters; over a whole slice it runs an all-reduce.

        Args:
          name: the `axis_name` of the pmap.
          devices: those of the pmap, in its order.

        Raises:
          ValueError: the devices do not fill a grid.
        """
        if all(hasattr(device, "coords") for device in devices):
            places = [(*device.coords, device.core_on_chip) for device in devices]
        else:
            hosts = [device.process_index for device in devices]
            places = [(hosts[:i].count(host), host) for i, host in enumerate(hosts)]
        sizes = tuple(len(set(column)) for column in zip(*places, strict=True))
        if math.prod(sizes) != len(devices) or len(set(places)) != len(devices):
            raise ValueError(f"axis {name!r}: {len(devices)} devices do not fill a grid of {sizes}")
        phases = tuple(size for size in sizes if size > 1) or (1,)
        return cls(name, (1, *phases), tuple(sorted(range(len(devices)), key=places.__getitem__)))

    @property
    def size(self) -> int:
        """Devices on the pmap axis."""
        return math.prod(self.shape)

    @property
    def replicas(self) -> int:
        """Copies of the whole state."""
        return self.shape[0]

    @property
    def shards(self) -> int:
        """Devices that one copy is spread over."""
        return math.prod(self.shape[1:])

    def groups(self, dim: int) -> list[list[int]] | None:
        """`axis_index_groups` along one dimension of the grid; None where one group holds all devices in order."""
        grid = np.asarray(self.devices).reshape(self.shape)
        rows = np.moveaxis(grid, dim, -1).reshape(-1, self.shape[dim]).tolist()
        return None if rows == [list(range(self.size))] else rows

    def copies(self) -> list[list[int]] | None:
        """`axis_index_groups` that hold one whole copy each, in the order of its shards; as `groups` otherwise."""
        rows = np.asarray(self.devices).reshape(self.replicas, self.shards).tolist()
        return None if rows == [list(range(self.size))] else rows

    def shard_of_device(self) -> tuple[int, ...]:
        """For each position on the pmap axis the shard that this device holds."""
        shards = np.empty(self.size, int)
        shards[list(self.devices)] = np.arange(self.size) % self.shards
        return tuple(shards.tolist())

    def shard_index(self) -> jax.Array:
        """This device's shard. Call inside pmap."""
        return jnp.asarray(self.shard_of_device())[lax.axis_index(self.name)]


AxisLike = str | Axis


def as_axis(axis: AxisLike) -> Axis:
    """A pmap axis name means one group of all its devices. Call inside pmap."""
    return axis if isinstance(axis, Axis) else Axis(axis, (1, lax.axis_size(axis)))


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
    """The whole array from its shards: `all_gather`, in `dtype` on the wire and after (default: as it is).

    With `wire_dtype=jnp.int8` floats travel as `quantise` makes them, which costs a quarter of float32. Integers,
    booleans and complex numbers keep their dtype.

    Per device: `leaf.shard_shape` in, `leaf.shape` out. Call inside pmap.
    """
    full_x = as_dtype(shard_x, dtype)
    if _is_quantised(full_x, wire_dtype) and leaf.splits:
        return _gather_quantised(full_x, leaf, axis)
    for split in leaf.splits:
        for phase in reversed(range(1, len(axis.shape))):
            full_x = lax.all_gather(full_x, axis.name, axis=split.dim, tiled=True, axis_index_groups=axis.groups(phase))
        full_x = lax.slice_in_dim(full_x, 0, split.size, axis=split.dim)
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

    With `wire_dtype=jnp.int8` floats of split leaves travel as `quantise` makes them, once, whatever the phases.

    Where the dtype on the wire is narrower than the dtype of the sum, an `all_to_all` moves the parts and each device
    sums what it received: the same bytes as a reduce-scatter, rounded once and not at every hop.

    Per device: `leaf.shape` in, `leaf.shard_shape` out, in `reduce_dtype`. Call inside pmap.

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
    if _is_quantised(full_x, wire_dtype):
        if leaf.splits:
            return _scatter_sum_quantised(full_x, leaf, axis, reduce)
        wire_dtype = None
    wire = np.dtype(wire_dtype or full_x.dtype)
    x = full_x.astype(wire)
    for split in leaf.splits:
        x = pad_array(x, split.dim, split.padding)
        for phase in range(1, len(axis.shape)):
            x = _scatter_sum_phase(x.astype(wire), split.dim, axis, phase, reduce)
        if axis.replicas > 1:
            x = lax.psum(x, axis.name, axis_index_groups=axis.groups(0))
    return x if leaf.splits else lax.psum(x.astype(reduce), axis.name)


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


def _is_quantised(x: jax.Array, wire_dtype: DTypeLike | None) -> bool:
    return wire_dtype is not None and np.dtype(wire_dtype) == np.int8 and jnp.issubdtype(x.dtype, jnp.floating)


def _gather_quantised(shard_x: jax.Array, leaf: LeafLayout, axis: Axis) -> jax.Array:
    (split,) = leaf.splits
    rows = fill_padding(shard_x, leaf, axis, 0)[None]  # padding would share a scale with data
    values, scale = (lax.all_gather(x[0], axis.name, axis_index_groups=axis.copies()) for x in quantise(rows))
    parts = jnp.moveaxis(dequantise(values, scale, leaf.shard_shape), 0, split.dim)
    full_x = parts.reshape(leaf.padded_shape).astype(shard_x.dtype)
    return lax.slice_in_dim(full_x, 0, split.size, axis=split.dim)


def _scatter_sum_quantised(full_x: jax.Array, leaf: LeafLayout, axis: Axis, reduce: np.dtype) -> jax.Array:
    (split,) = leaf.splits
    dim, padded = split.dim, pad_array(full_x, split.dim, split.padding)
    parts = padded.reshape(*padded.shape[:dim], split.shards, split.shard_size, *padded.shape[dim + 1 :])
    values, scale = (
        lax.all_to_all(x, axis.name, 0, 0, tiled=True, axis_index_groups=axis.copies())
        for x in quantise(jnp.moveaxis(parts, dim, 0))
    )
    shard_x = dequantise(values, scale, leaf.shard_shape).astype(reduce).sum(0)
    return lax.psum(shard_x, axis.name, axis_index_groups=axis.groups(0)) if axis.replicas > 1 else shard_x


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
