"""Sharded state under `jax.shard_map`: padded global arrays on a mesh, instead of a stack of one slice per device.

The optimizer cuts along one axis of the mesh. The shardings of parameters say how the other axes cut them; state of the
same path and shape is cut in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero.partition.collectives.axis import Axis
from zero.partition.layout import Layout, LeafLayout, make_layout, source_of
from zero.partition.sharded_state import Origin, parts_over


def _entry_of_axes(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """The entry of a PartitionSpec for the axes that cut a dimension.

    >>> _entry_of_axes(()), _entry_of_axes(("data",)), _entry_of_axes(("model", "data"))
    (None, 'data', ('model', 'data'))
    """
    if not names:
        return None
    if len(names) != 1:
        return names
    return names[0]


class MeshLeaf(NamedTuple):
    """A global array.

    Attributes:
      leaf: the layout of the part that the other axes leave, split along the optimizer's axis.
      axes: for each dimension the mesh axes that cut it, the optimizer's axis last.
      parts: for each dimension the number of parts made by the other axes.
    """

    leaf: LeafLayout
    axes: tuple[tuple[str, ...], ...]
    parts: tuple[int, ...]

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*map(_entry_of_axes, self.axes))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without padding."""
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
      ValueError: the mesh lacks the axis, or has it with another size.
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
    """The entry for an array that no other axis cuts."""
    return _mesh_leaf(leaf, [()] * len(leaf.shape), {}, axis_name)


def state_on_mesh(origin: Origin, sizes: Mapping[str, int]) -> tuple[Layout, list[MeshLeaf]]:
    """The layout of an optimizer's state on the part that the other axes leave, and its global arrays.

    Raises:
      ValueError: the optimizer's axis is not in the mesh, whose axis sizes are `sizes`.
    """
    axis = origin.axis
    if isinstance(axis, Axis) or axis not in sizes:
        axis_text = "an Axis of groups" if isinstance(axis, Axis) else repr(axis)
        raise ValueError(
            f"the axis_name of zero.shard_optimizer is {axis_text}: under shard_map expected the name of an axis of "
            f"the mesh, one of {list(sizes)}"
        )
    shards = sizes[axis]
    by_path = {leaf.path: leaf for leaf in make_layout(origin.params.shapes(), shards).leaves}
    cut_of = dict(zip(by_path, origin.cuts or [None] * len(by_path), strict=True))
    state = origin.layout(shards)

    def on_mesh(leaf: LeafLayout) -> MeshLeaf:
        source = source_of(leaf.path, leaf.shape, by_path)
        cut = cut_of[source.path] if source else None
        axes, axis_sizes = cut or (((),) * len(leaf.shape), ())
        return _mesh_leaf(leaf, axes, dict(axis_sizes), axis)

    return state, [on_mesh(leaf) for leaf in state.leaves]


def _mesh_leaf(leaf: LeafLayout, axes: Sequence[tuple[str, ...]], sizes: Mapping[str, int], axis_name: str) -> MeshLeaf:
    zero_dims = {split.dim for split in leaf.splits}
    axes_of_dims = tuple((*names, axis_name) if dim in zero_dims else names for dim, names in enumerate(axes))
    return MeshLeaf(leaf, axes_of_dims, tuple(parts_over(names, sizes) for names in axes))


def check_global(leaf: MeshLeaf, x: Any) -> None:
    """Raises if `x` is not the global array of this leaf."""
    if np.shape(x) != leaf.padded_shape or not isinstance(x, jax.Array):
        where = "" if isinstance(x, jax.Array) else " on the host"
        raise ValueError(
            f"leaf {leaf.leaf.name}: expected the global array that shard_map returns, {leaf.padded_shape}, padding "
            f"included, got {np.shape(x)}{where}; where other axes of the mesh cut parameters, make the state outside "
            "shard_map, by tx.init(params) of parameters with their shardings, and pass it as like="
        )


def read(arrays: Sequence[jax.Array], leaves: Sequence[MeshLeaf]) -> list[Any]:
    """The whole arrays, unpadded, on every process. All processes call it.

    Raises:
      ValueError: an array has another shape, or copies differ between devices.
    """
    for leaf, x in zip(leaves, arrays, strict=True):
        check_global(leaf, x)
    wholes = list[Any]()
    differ = np.zeros(len(leaves), bool)
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
    return [leaf.cropped(whole) for leaf, whole in zip(leaves, wholes, strict=True)]


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
    if padded is whole:
        padded = np.array(whole)  # on CPU an array of jax would share the memory, and change with the caller's array
    return jax.make_array_from_callback(padded.shape, sharding, padded.__getitem__)
