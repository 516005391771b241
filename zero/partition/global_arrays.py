"""The shards of all devices labelled as global `jax.Array`s, which Orbax can store, and back; no byte is gathered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero.partition.collectives.axis import Axis, AxisLike
from zero.partition.layout import Layout, LeafLayout, PyTree


def pmap_devices() -> tuple[jax.Device, ...]:
    """All devices in the order in which `pmap` numbers them when it is given none: process by process."""
    return tuple(device for process in range(jax.process_count()) for device in jax.local_devices(process))


def global_shapes(layout: Layout, axis: AxisLike, devices: Sequence[jax.Device] | None = None) -> PyTree:
    """What `to_global` returns, as `jax.ShapeDtypeStruct`: padded shapes and shardings, for a restore to aim at.

    Raises:
      ValueError: axis, layout and devices do not fit each other.

    >>> import zero
    >>> from jax import numpy as jnp
    >>> n = jax.local_device_count()
    >>> layout = zero.make_layout({"w": jax.ShapeDtypeStruct((n + 1,), jnp.float32)}, n)
    >>> global_shapes(layout, "batch")["w"].shape == (2 * n,)
    True
    """
    mesh = mesh_of(layout, axis, devices)
    return layout.map(lambda leaf: jax.ShapeDtypeStruct(leaf.padded_shape, leaf.dtype, sharding=_sharding(leaf, mesh)))


def to_global(
    tree: PyTree, layout: Layout, axis: AxisLike, devices: Sequence[jax.Device] | None = None, *, donate: bool = False
) -> PyTree:
    """Labels the shards that a pmap returned as whole `jax.Array`s, which Orbax or anything else can store.

    Nothing moves between devices and nothing is gathered; with several processes each labels what it holds. A leaf
    keeps its padding: `leaf.padded_shape` out. Its sharding spans the replicas, then the shards, in the order that the
    axis gives. Each shard is copied on its own device, unless it may be donated.

    Args:
      tree: per leaf `(local devices, *leaf.shard_shape)`, as it came out of pmap.
      layout: of the tree.
      axis: the pmap axis; a name means one group of `layout.shards` devices.
      devices: those that pmap was given, if any.
      donate: reuse the buffers of `tree`, which is deleted. No byte is copied; `from_global` is the way back.

    Raises:
      ValueError: a leaf has another shape or lies on other devices than the layout and the axis say.

    >>> import zero
    >>> from jax import numpy as jnp
    >>> n = jax.local_device_count()
    >>> layout = zero.make_layout({"w": jax.ShapeDtypeStruct((3, 5 * n), jnp.float32)}, n)
    >>> shards = {"w": jax.pmap(lambda i: jnp.full((3, 5), i, jnp.float32), axis_name="batch")(jnp.arange(n))}
    >>> whole = to_global(shards, layout, "batch")
    >>> whole["w"].shape == (3, 5 * n)
    True
    >>> bool((from_global(whole, layout, "batch")["w"] == shards["w"]).all())
    True
    """
    mesh = mesh_of(layout, axis, devices)
    arrays = layout.treedef.flatten_up_to(tree)
    for leaf, x in zip(layout.leaves, arrays, strict=True):
        local_shards(leaf, x, mesh)
    shards = _reshape_shards(_drop_first, arrays, [donate] * len(arrays))
    return layout.treedef.unflatten(
        jax.make_array_from_single_device_arrays(leaf.padded_shape, _sharding(leaf, mesh), parts)
        for leaf, parts in zip(layout.leaves, shards, strict=True)
    )


def from_global(
    tree: PyTree, layout: Layout, axis: AxisLike, devices: Sequence[jax.Device] | None = None, *, donate: bool = False
) -> PyTree:
    """What `to_global` took: shards for a pmap, from whole arrays of any sharding, from any N.

    Args:
      tree: per leaf a `jax.Array` or numpy array of `leaf.padded_shape`; arrays that lie as `to_global` would lay them
        do not move, others do.
      layout, axis, devices: as for `to_global`.
      donate: reuse the buffers that lie in their place already; the arrays are deleted.

    Raises:
      ValueError: a leaf has another shape or dtype than the layout says.

    >>> import zero
    >>> from jax import numpy as jnp
    >>> n = jax.local_device_count()
    >>> layout = zero.make_layout({"w": jax.ShapeDtypeStruct((2 * n,), jnp.float32)}, n)
    >>> from_global({"w": np.arange(2 * n, dtype=np.float32)}, layout, "batch")["w"][0].tolist()
    [0.0, 1.0]
    """
    mesh = mesh_of(layout, axis, devices)
    local = [
        d
        for d in (pmap_devices()[: mesh.size] if devices is None else devices)
        if d.process_index == jax.process_index()
    ]
    stacked = _stacked(axis, local)

    def place(leaf: LeafLayout, x: jax.Array | np.ndarray) -> jax.Array:
        if x.shape != leaf.padded_shape or x.dtype != leaf.dtype:
            remedy = "; zero.from_host takes arrays without padding" if x.shape == leaf.shape else ""
            raise ValueError(
                f"leaf {leaf.name}: the layout says {leaf.dtype.name}{list(leaf.padded_shape)}, padding included, "
                f"got {x.dtype.name}{list(x.shape)}{remedy}"
            )
        return jax.device_put(x, _sharding(leaf, mesh))

    placed = layout.treedef.flatten_up_to(layout.map(place, tree))
    # What was placed may share buffers with the caller's array, but not with one of numpy: XLA copies that instead.
    is_own = [not isinstance(x, jax.Array) for x in layout.treedef.flatten_up_to(tree)]
    shards = _reshape_shards(_add_first, placed, [donate or own for own in is_own])
    return layout.treedef.unflatten(
        jax.make_array_from_single_device_arrays((len(local), *leaf.shard_shape), stacked, parts)
        for leaf, parts in zip(layout.leaves, shards, strict=True)
    )


def from_local(tree: PyTree, layout: Layout, axis: AxisLike) -> PyTree:
    """Shards on this process's devices, as pmap returns them, from numpy arrays `(local devices, *shard_shape)`."""
    local = jax.local_devices()

    def place(leaf: LeafLayout, x: np.ndarray) -> jax.Array:
        parts = [jax.device_put(part[None], device) for part, device in zip(x, local, strict=True)]
        return jax.make_array_from_single_device_arrays((len(local), *leaf.shard_shape), _stacked(axis, local), parts)

    return layout.map(place, tree)


def _stacked(axis: AxisLike, local: Sequence[jax.Device]) -> NamedSharding:
    """To the letter what pmap gives to its results: with another name the program that takes them is compiled again."""
    name = axis.name if isinstance(axis, Axis) else axis
    return NamedSharding(Mesh(np.asarray(local), (name,)), PartitionSpec(name))


def mesh_of(layout: Layout, axis: AxisLike, devices: Sequence[jax.Device] | None) -> Mesh:
    on = axis if isinstance(axis, Axis) else Axis(axis, (1, layout.shards))
    if on.shards != layout.shards:
        raise ValueError(f"the layout has {layout.shards} shards, but axis {on.name!r} spreads a copy over {on.shards}")
    ordered = np.asarray(pmap_devices()[: on.size] if devices is None else devices)
    if ordered.size != on.size:
        raise ValueError(f"axis {on.name!r} has {on.size} devices, but there are {ordered.size}")
    return Mesh(ordered[list(on.devices)].reshape(on.replicas, on.shards), ("replica", "shard"))


def local_shards(leaf: LeafLayout, x: jax.Array, mesh: Mesh) -> Sequence[Any]:
    """One a local device, in the order of pmap."""
    parts = x.addressable_shards if isinstance(x, jax.Array) else []
    if any(part.data.shape != (1, *leaf.shard_shape) for part in parts) or {p.device for p in parts} != {
        device for device in mesh.devices.flat if device.process_index == jax.process_index()
    }:
        raise ValueError(
            f"leaf {leaf.name}: expected what pmap returns, one shard of {leaf.shard_shape} on each local device, "
            f"got shape {np.shape(x)}{f' on {len(parts)} devices' if parts else ' on the host'}"
        )
    return parts


def _sharding(leaf: LeafLayout, mesh: Mesh) -> NamedSharding:
    split_dims = {split.dim for split in leaf.splits}
    dims = ("shard" if dim in split_dims else None for dim in range(len(leaf.shape)))
    return NamedSharding(mesh, PartitionSpec(*dims))


def _drop_first(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[1:])


def _add_first(x: jax.Array) -> jax.Array:
    return x[None]


def _reshape_shards(
    reshape: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array], is_donated: Sequence[bool]
) -> list[list[jax.Array]]:
    """The shards of each array on the devices of this process, reshaped in their buffers where they may be donated.

    One program for each shape would compile for many seconds. Two programs for each device reshape all: with odd and
    even numbers of dimensions apart, no result has the shape of another array, with which jax would swap buffers.
    """
    programs: dict[tuple[jax.Device, int], dict[int, jax.Array]] = defaultdict(dict)
    for number, x in enumerate(arrays):
        for part in x.addressable_shards:
            programs[part.device, x.ndim % 2][number] = part.data
    reshaped: list[list[jax.Array]] = [[] for _ in arrays]
    for parts in programs.values():
        donated = {number: part for number, part in parts.items() if is_donated[number]}
        kept = {number: part for number, part in parts.items() if not is_donated[number]}
        for number, part in _reshape(reshape, kept, donated).items():
            reshaped[number].append(part)
    for x, is_deleted in zip(arrays, is_donated, strict=True):
        if is_deleted:
            x.delete()
    return reshaped


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _reshape(
    reshape: Callable[[jax.Array], jax.Array], kept: dict[int, jax.Array], donated: dict[int, jax.Array]
) -> dict[int, jax.Array]:
    return {number: reshape(x) for number, x in (kept | donated).items()}
