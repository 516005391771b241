"""Sharded state of `jax.shard_map`: padded global arrays on a mesh, where a pmap has a stack of one slice per device.

The optimizer cuts along one axis of the mesh. How the other axes cut parameters is read from their shardings; state of
the same path and shape is cut in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero.partition.layout import Layout, LeafLayout, PyTree, derive_layout, make_layout, source_of


class MeshLeaf(NamedTuple):
    """A global array.

    Attributes:
      leaf: layout of the part that the other axes leave, split along the axis of the optimizer.
      axes: for each dimension the axes of the mesh that cut it, the axis of the optimizer last.
      parts: for each dimension the number of parts that the other axes make.
    """

    leaf: LeafLayout
    axes: tuple[tuple[str, ...], ...]
    parts: tuple[int, ...]

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(names if len(names) > 1 else (*names, None)[0] for names in self.axes))

    @property
    def shape(self) -> tuple[int, ...]:
        """Without padding."""
        return tuple(n * size for n, size in zip(self.parts, self.leaf.shape, strict=True))

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return tuple(n * size for n, size in zip(self.parts, self.leaf.padded_shape, strict=True))

    def _by_part(self, x: Any, fit: Callable[[Any, int, int], Any], sizes: Sequence[int]) -> Any:
        """`x` with each part of each dimension cropped or padded to `sizes`."""
        for dim, (n, size) in enumerate(zip(self.parts, sizes, strict=True)):
            if x.shape[dim] != n * size:
                split = x.reshape(*x.shape[:dim], n, -1, *x.shape[dim + 1 :])
                x = fit(split, dim + 1, size).reshape(*x.shape[:dim], n * size, *x.shape[dim + 1 :])
        return x

    def cropped(self, x: Any) -> Any:
        return self._by_part(x, lambda x, dim, size: x[(slice(None),) * dim + (slice(size),)], self.leaf.shape)

    def padded(self, x: Any) -> Any:
        def pad(x: Any, dim: int, size: int) -> Any:
            return np.pad(x, [(0, size - x.shape[dim] if i == dim else 0) for i in range(x.ndim)])

        return self._by_part(x, pad, self.leaf.padded_shape)


def axis_of_mesh(layout: Layout, axis: Any, mesh: Mesh) -> str:
    """The name of the axis of the mesh over which the leaves of this layout are split.

    Raises:
      ValueError: the mesh has no such axis, or one of another size.
    """
    if axis not in mesh.axis_names:
        raise ValueError(f"expected the name of an axis of the mesh, one of {list(mesh.axis_names)}, got {axis!r}")
    if mesh.shape[axis] != layout.shards:
        raise ValueError(
            f"the layout has {layout.shards} shards, but axis {axis!r} of the mesh has {mesh.shape[axis]} devices: "
            f"make it by zero.make_layout(tree, {mesh.shape[axis]})"
        )
    return axis


def leaf_on_mesh(leaf: LeafLayout, axis_name: Any) -> MeshLeaf:
    """The entry of an array that no other axis cuts."""
    return _mesh_leaf(leaf, [()] * len(leaf.shape), {}, axis_name)


def state_on_mesh(
    init: Callable[[PyTree], PyTree], params: PyTree, shards: int, axis_name: str
) -> tuple[Layout, list[MeshLeaf]]:
    """The layout of an optimizer's state on the part that the other axes leave, and its global arrays.

    Raises:
      ValueError: the axis of the optimizer already cuts a parameter.
    """
    whole = make_layout(params, 1)
    cuts = [_cuts(leaf.name, x, axis_name) for leaf, x in zip(whole.leaves, jax.tree.leaves(params), strict=True)]
    shapes = [_local_shape(leaf.shape, *cut) for leaf, cut in zip(whole.leaves, cuts, strict=True)]
    local = [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in zip(shapes, whole.leaves, strict=True)]
    layout = make_layout(whole.treedef.unflatten(local), shards)
    by_path = {leaf.path: leaf for leaf in layout.leaves}
    cut_of = dict(zip(by_path, cuts, strict=True))
    state = derive_layout(init, layout)

    def on_mesh(leaf: LeafLayout) -> MeshLeaf:
        source = source_of(leaf.path, leaf.shape, by_path)
        axes, sizes = cut_of[source.path] if source else ([()] * len(leaf.shape), {})
        return _mesh_leaf(leaf, axes, sizes, axis_name)

    return state, [on_mesh(leaf) for leaf in state.leaves]


def _cuts(name: str, x: Any, axis_name: str) -> tuple[list[tuple[str, ...]], dict[str, int]]:
    """For each dimension of a parameter the axes that cut it, and the sizes of all axes."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return [()] * np.ndim(x), {}
    entries = [*sharding.spec, *[None] * (np.ndim(x) - len(sharding.spec))]
    axes = [() if one is None else (one,) if isinstance(one, str) else tuple(one) for one in entries]
    if any(axis_name in names for names in axes):
        raise ValueError(
            f"leaf {name}: {sharding.spec} cuts it along {axis_name!r}, the axis_name of the optimizer, along which "
            "parameters are replicated"
        )
    return axes, dict(sharding.mesh.shape)


def _local_shape(shape: tuple[int, ...], axes: list[tuple[str, ...]], sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape of one part; jax guarantees that every dimension divides."""
    return tuple(size // math.prod(sizes[name] for name in names) for size, names in zip(shape, axes, strict=True))


def _mesh_leaf(leaf: LeafLayout, axes: list[tuple[str, ...]], sizes: dict[str, int], axis_name: str) -> MeshLeaf:
    own = {split.dim for split in leaf.splits}
    parts = tuple(math.prod(sizes[name] for name in names) for names in axes)
    return MeshLeaf(leaf, tuple((*names, axis_name) if d in own else names for d, names in enumerate(axes)), parts)


def check_global(leaf: MeshLeaf, x: Any) -> None:
    """Raises if `x` is not the global array of this leaf."""
    if np.shape(x) != leaf.padded_shape or not isinstance(x, jax.Array):
        where = "" if isinstance(x, jax.Array) else " on the host"
        raise ValueError(
            f"leaf {leaf.leaf.name}: expected the global array that shard_map returns, {leaf.padded_shape}, padding "
            f"included, got {np.shape(x)}{where}; where other axes of the mesh cut parameters, pass these with their "
            "shardings"
        )


def read(arrays: Sequence[jax.Array], leaves: Sequence[MeshLeaf]) -> list[Any]:
    """The whole arrays, unpadded, on every process. All processes call it.

    Raises:
      ValueError: an array has another shape, or copies differ between devices.
    """
    for one, x in zip(leaves, arrays, strict=True):
        check_global(one, x)
    wholes, differ = list[Any](), np.zeros(len(leaves), bool)
    for number, x in enumerate(arrays):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)  # replicated
        if is_key:
            whole = x.addressable_shards[0].data
        else:
            whole = np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))
        for part in x.addressable_shards:
            differ[number] |= _bytes(part.data) != _bytes(whole if is_key else whole[part.index])
        wholes.append(whole)
    if jax.process_count() > 1:
        differ = multihost_utils.process_allgather(differ).any(0)
    if differ.any():
        names = ", ".join(leaf.leaf.name for leaf, is_bad in zip(leaves, differ, strict=True) if is_bad)
        raise ValueError(
            f"leaves differ between devices that should hold the same, by their sharding: {names}. Reduce values that "
            "decide for all devices, such as value= of an update: lax.pmean(value, axis_name)"
        )
    return [one.cropped(whole) for one, whole in zip(leaves, wholes, strict=True)]


def _bytes(x: Any) -> bytes:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


def write(whole: Any, leaf: MeshLeaf, mesh: Mesh) -> jax.Array:
    """The global array; each process places the shards of its devices."""
    sharding = NamedSharding(mesh, leaf.spec)
    if jnp.issubdtype(leaf.leaf.dtype, jax.dtypes.extended):  # replicated; jax places no keys on other processes
        data = np.asarray(jax.random.key_data(whole))
        placed = jax.make_array_from_callback(data.shape, sharding, data.__getitem__)
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(whole))
    padded = leaf.padded(whole)
    return jax.make_array_from_callback(padded.shape, sharding, padded.__getitem__)
