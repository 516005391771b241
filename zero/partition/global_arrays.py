"""Relabels the shards of all devices as global `jax.Array`s, which Orbax can store, and back, without a gather."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero.partition.collectives.axis import Axis, AxisLike, as_axis, check_shards
from zero.partition.layout import Layout, LeafLayout, PyTree
from zero.partition.on_mesh import axis_of_mesh, check_global, leaf_on_mesh


def pmap_devices() -> tuple[jax.Device, ...]:
    """All devices in the default order of `pmap`: process by process."""
    return tuple(chain.from_iterable(map(jax.local_devices, range(jax.process_count()))))


def global_shapes(layout: Layout, axis: AxisLike, devices: Sequence[jax.Device] | Mesh | None = None) -> PyTree:
    """The result of `to_global` as `jax.ShapeDtypeStruct`s: padded shapes and shardings, as the target of a restore.

    Raises:
      ValueError: axis, layout and devices do not match.

    >>> import zero
    >>> from jax import numpy as jnp
    >>> n = jax.local_device_count()
    >>> layout = zero.make_layout({"w": jax.ShapeDtypeStruct((n + 1,), jnp.float32)}, n)
    >>> global_shapes(layout, "batch")["w"].shape == (2 * n,)
    True
    """
    mesh, name = _labels(layout, axis, devices)
    return layout.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.padded_shape, leaf.dtype, sharding=_sharding(leaf, mesh, name))
    )


def to_global(
    tree: PyTree,
    layout: Layout,
    axis: AxisLike,
    devices: Sequence[jax.Device] | Mesh | None = None,
    *,
    donate: bool = False,
) -> PyTree:
    """Relabels the shards that a pmap returned as whole `jax.Array`s, which Orbax or anything else can store.

    Nothing moves between devices; with several processes each labels its own shards. A leaf keeps its padding:
    `leaf.padded_shape` out. Its sharding spans the replicas, then the shards, in the order of the axis. Each shard is
    copied on its own device, unless donated.

    Args:
      tree: per leaf `(local devices, *leaf.shard_shape)`, as returned by pmap.
      layout: layout of the tree.
      axis: the pmap axis; a name means one group of `layout.shards` devices.
      devices: the `devices` of the pmap, if given; or the mesh of shard_map, whose results are global already: they are
        checked and returned.
      donate: reuse the buffers of `tree`, which is deleted, instead of copying.

    Raises:
      ValueError: shape, dtype, devices or device order of a leaf do not match layout and axis.

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
    mesh, name = _labels(layout, axis, devices)
    arrays = layout.leaves_of(tree)
    for leaf, x in zip(layout.leaves, arrays, strict=True):
        if isinstance(devices, Mesh):
            check_global(leaf_on_mesh(leaf, name), x)
        else:
            local_shards(leaf, x, axis_and_devices(layout, axis, devices)[1])
        if x.dtype != leaf.dtype:
            raise ValueError(
                f"leaf {leaf.name}: the array holds {x.dtype.name}, the layout has {leaf.dtype.name}, the dtype "
                "of a restore: make the layout with zero.make_layout from a tree of the array's dtype"
            )
    if isinstance(devices, Mesh):
        return tree
    shards = _reshape_shards(_drop_first, arrays, [donate] * len(arrays))
    return layout.treedef.unflatten(
        jax.make_array_from_single_device_arrays(leaf.padded_shape, _sharding(leaf, mesh, name), parts)
        for leaf, parts in zip(layout.leaves, shards, strict=True)
    )


def from_global(
    tree: PyTree,
    layout: Layout,
    axis: AxisLike,
    devices: Sequence[jax.Device] | Mesh | None = None,
    *,
    donate: bool = False,
) -> PyTree:
    """The inverse of `to_global`: shards for a pmap, from whole arrays of any sharding.

    Args:
      tree: per leaf a `jax.Array` or numpy array, with the padding of any number of devices. Arrays placed as by
        `to_global` do not move; others of another padding are cropped or padded shard by shard.
      layout, axis, devices: as for `to_global`.
      donate: reuse buffers that are already in place; the arrays are deleted.

    Raises:
      ValueError: shape or dtype of a leaf do not match the layout; or it has a different padding, and other processes
        hold parts of it.

    >>> import zero
    >>> from jax import numpy as jnp
    >>> n = jax.local_device_count()
    >>> layout = zero.make_layout({"w": jax.ShapeDtypeStruct((2 * n,), jnp.float32)}, n)
    >>> from_global({"w": np.arange(2 * n, dtype=np.float32)}, layout, "batch")["w"][0].tolist()
    [0.0, 1.0]
    """
    mesh, name = _labels(layout, axis, devices)

    def place(leaf: LeafLayout, x: jax.Array | np.ndarray) -> jax.Array:
        if x.dtype != leaf.dtype or not (x.shape == leaf.padded_shape or leaf.is_padded(x.shape)):
            raise ValueError(
                f"leaf {leaf.name}: the layout has {leaf.dtype.name}{list(leaf.shape)}, "
                f"{list(leaf.padded_shape)} with padding, got {x.dtype.name}{list(x.shape)}"
            )
        sharding = _sharding(leaf, mesh, name)
        if isinstance(x, np.ndarray):
            x = x.copy()  # on CPU an array of jax would share the memory, and change with the caller's array
        if x.shape == leaf.padded_shape:
            return jax.device_put(x, sharding)
        return _resized(x, leaf, sharding)

    placed = layout.treedef.flatten_up_to(layout.map(place, tree))
    if isinstance(devices, Mesh):
        return layout.treedef.unflatten(placed)
    on, ordered = axis_and_devices(layout, axis, devices)
    local = [device for device in ordered if device.process_index == jax.process_index()]
    # Exactly the sharding of pmap results: with any other name the consuming program would be compiled again.
    stacked = NamedSharding(Mesh(np.asarray(local), (on.name,)), PartitionSpec(on.name))
    # Placed arrays may share buffers with the caller's jax.Array, but not with a numpy array, which is copied.
    may_donate = [donate or not isinstance(x, jax.Array) for x in layout.treedef.flatten_up_to(tree)]
    shards = _reshape_shards(_add_first, placed, may_donate)
    return layout.treedef.unflatten(
        jax.make_array_from_single_device_arrays((len(local), *leaf.shard_shape), stacked, parts)
        for leaf, parts in zip(layout.leaves, shards, strict=True)
    )


Bounds = tuple[tuple[int, int], ...]  # for each dimension: the first position, and one past the last


def _resized(x: jax.Array | np.ndarray, leaf: LeafLayout, sharding: NamedSharding) -> jax.Array:
    """The leaf with this layout's padding, from an array with other padding; one shard at a time is on the host."""
    parts: dict[Bounds, Any] = {_bounds((), x.shape): x}
    if isinstance(x, jax.Array):
        if not (x.is_fully_addressable or x.is_fully_replicated):
            raise ValueError(
                f"leaf {leaf.name}: got {list(x.shape)}, padded for another number of devices, and other processes "
                "hold parts of it: restore into the shapes of zero.global_shapes(layout, axis); Orbax crops and pads "
                "with strict=False"
            )
        parts = {_bounds(part.index, x.shape): part.data for part in x.addressable_shards}

    def shard(index: Any) -> np.ndarray:
        place = _bounds(index, leaf.padded_shape)
        result = np.zeros([stop - start for start, stop in place], leaf.dtype)
        place_in_leaf = _overlap(place, _bounds((), leaf.shape))
        for place_of_part, data in parts.items():
            both = _overlap(place_in_leaf, place_of_part)
            if all(start < stop for start, stop in both):
                result[_relative(both, place)] = np.asarray(data)[_relative(both, place_of_part)]
        return result

    return jax.make_array_from_callback(leaf.padded_shape, sharding, shard)


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    slices = [*index, *[slice(None)] * (len(shape) - len(index))]
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))


def _overlap(first: Bounds, second: Bounds) -> Bounds:
    """The intersection; empty in a dimension in which they do not overlap.

    >>> _overlap(((0, 4), (2, 9)), ((3, 8), (9, 12)))
    ((3, 4), (9, 9))
    """
    pairs = zip(first, second, strict=True)
    starts_and_stops = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs]
    return tuple((start, max(start, stop)) for start, stop in starts_and_stops)


def _relative(part: Bounds, whole: Bounds) -> tuple[slice, ...]:
    """The slices of a part, relative to the first position of the whole."""
    pairs = zip(part, whole, strict=True)
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)


def axis_and_devices(
    layout: Layout, axis: AxisLike, devices: Sequence[jax.Device] | None
) -> tuple[Axis, tuple[jax.Device, ...]]:
    """The axis (a name means one group of `layout.shards` devices), and its devices in the order of pmap.

    Raises:
      ValueError: axis, layout and devices do not match.
    """
    on = as_axis(axis, layout.shards)
    check_shards(on, layout.shards)
    ordered = pmap_devices()[: on.size] if devices is None else tuple(devices)
    if len(ordered) != on.size:
        raise ValueError(f"axis {on.name!r} has {on.size} devices, but there are {len(ordered)}")
    return on, ordered


def _labels(layout: Layout, axis: AxisLike, devices: Sequence[jax.Device] | Mesh | None) -> tuple[Mesh, str]:
    """The mesh of global arrays, and the name of its axis of shards."""
    if isinstance(devices, Mesh):
        return devices, axis_of_mesh(layout, axis, devices)
    on, ordered = axis_and_devices(layout, axis, devices)
    grid = np.asarray(ordered)[list(on.devices)]
    return Mesh(grid.reshape(on.replicas, on.shards), ("replica", "shard")), "shard"


def counted_devices(count: int) -> str:
    """Where an array with this number of shards on devices is, for messages.

    >>> counted_devices(0), counted_devices(1), counted_devices(8)
    ('the host', '1 device', '8 devices')
    """
    if count == 0:
        return "the host"
    return f"{count} device" if count == 1 else f"{count} devices"


def local_shards(leaf: LeafLayout, x: Any, devices: Sequence[jax.Device]) -> Sequence[Any]:
    """The shards of a stacked array on this process's devices, checked; `devices` are the pmap's, in its order.

    Raises:
      ValueError: shape, devices or device order do not match.
    """
    parts = x.addressable_shards if isinstance(x, jax.Array) else []
    expected = [device for device in devices if device.process_index == jax.process_index()]
    if any(part.data.shape != (1, *leaf.shard_shape) for part in parts) or {p.device for p in parts} != set(expected):
        stacked = (len(expected), *leaf.shard_shape)
        where = counted_devices(len(parts))
        hint = ""
        if np.shape(x) == stacked:
            hint = ": spread it by jax.pmap(lambda x: x)(x)"
            if len(parts) == len(expected):
                hint = ": pass the devices= that pmap was given"
        elif np.shape(x) == leaf.shape:
            hint = ": that is whole already"
        elif np.shape(x)[1:] == leaf.shape:
            hint = ": those are whole copies, which zero.shard slices inside pmap"
        raise ValueError(
            f"leaf {leaf.name}: expected what pmap returns, {stacked} on {len(expected)} devices, for a whole array of "
            f"{leaf.shape}, got shape {np.shape(x)} on {where}{hint}"
        )
    check_order(leaf.name, parts, expected)
    return parts


def check_order(name: str, parts: Sequence[Any], expected: Sequence[jax.Device]) -> None:
    """Raises ValueError if the rows of a stacked array do not lie on these local devices in this order.

    XLA itself would read them in the wrong order, or abort the process.
    """
    rows = [part.device for part in sorted(parts, key=lambda part: part.index[0].start or 0)]
    for row, (actual, device) in enumerate(zip(rows, expected, strict=True)):
        if actual != device:
            raise ValueError(
                f"leaf {name}: row {row} lies on {actual}, expected it on {device}: pass the devices= that pmap "
                "was given, in the same order"
            )


def stack_local(parts: Sequence[Any], devices: Sequence[jax.Device], axis_name: str) -> jax.Array:
    """Stacks one `(1, ...)` array per local device, as pmap returns it."""
    sharding = NamedSharding(Mesh(np.asarray(devices), (axis_name,)), PartitionSpec(axis_name))
    arrays = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    return jax.make_array_from_single_device_arrays((len(parts), *arrays[0].shape[1:]), sharding, arrays)


def _sharding(leaf: LeafLayout, mesh: Mesh, name: str) -> NamedSharding:
    return NamedSharding(mesh, leaf_on_mesh(leaf, name).spec)


def _drop_first(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[1:])


def _add_first(x: jax.Array) -> jax.Array:
    return x[None]


def _reshape_shards(
    reshape: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array], is_donated: Sequence[bool]
) -> list[list[jax.Array]]:
    """The shards of each array on this process's devices, reshaped in place if donated.

    One program per shape would compile for many seconds, so two programs per device reshape all. Arrays with odd and
    even numbers of dimensions are separate: no result then has the shape of another input, whose buffer jax might use.
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
