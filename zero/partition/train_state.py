"""A whole train state between devices and host: sharded optimizers inside are found, everything else is replicated."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero.partition.collectives.axis import Axis, AxisLike, as_axis
from zero.partition.global_arrays import axis_and_devices, counted_devices, local_shards, pmap_devices, stack_local
from zero.partition.layout import Layout, LeafLayout, PyTree, Split, named_leaves, names_of, path_of
from zero.partition.on_mesh import leaf_on_mesh, read, state_on_mesh, write
from zero.partition.sharded_state import (
    OTHER_DEVICES,
    REMEDY,
    Origin,
    ShardedState,
    WholeState,
    check_not_dissolved,
    check_not_vmapped,
    check_stacked,
    check_structure,
    is_marked,
    is_of_mesh,
    numbers_of,
    slices_of,
)
from zero.partition.whole_state import checked_whole, meet, slices_from_host, slices_to_host, spread

Devices = Sequence[jax.Device] | Mesh | None


def to_host(
    tree: PyTree,
    layout: Layout | None = None,
    axis: AxisLike | None = None,
    devices: Devices = None,
    *,
    like: PyTree = None,
    timeout: float = 300,
) -> PyTree:
    """A train state, or with a layout a tree of slices, as the unsharded program holds it on the host.

    Returns numpy arrays, whole and without padding, from any tree that pmap returned. The state of a sharded optimizer
    becomes optax's, wherever it is in the tree; everything else is taken from the first device. It replaces
    `unreplicate(state)`.

    All processes call it and all get the result. No device holds more of a leaf than its share among the devices of one
    process. Leaves keep their dtype. With a layout the whole tree consists of slices, such as
    `zero.shard` makes.

    Args:
      tree: as returned by pmap, or by shard_map with `zero.specs`.
      layout, axis: for slices that do not know theirs; both or none.
      devices: the `devices` of the pmap, if given: several processes need it, one process reads it from the arrays. For
        slices with a layout, also the mesh of shard_map.
      like: needed if other mesh axes cut parameters: a tree of the same structure with the states that `tx.init` makes
        outside shard_map from parameters with their shardings.
      timeout: seconds to wait for the other processes to call it.

    Raises:
      ValueError: a leaf is not as pmap returns it, a device holds another's slice, or copies differ that should agree,
        for example after an update with an unreduced `value`.
      RuntimeError: some process did not call it in time, or it is called inside pmap.

    >>> import optax, zero
    >>> n = jax.local_device_count()
    >>> tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    >>> params = {"w": np.arange(5, dtype=np.float32)}
    >>> state = zero.to_devices({"params": params, "opt_state": tx.init(params)})
    >>> saved = zero.to_host(state)
    >>> saved["params"]["w"].tolist(), saved["opt_state"][0].mu["w"].shape
    ([0.0, 1.0, 2.0, 3.0, 4.0], (5,))
    >>> jax.tree.structure(saved["opt_state"]) == jax.tree.structure(optax.adam(0.1).init(params))
    True
    """
    if layout is not None:
        return slices_to_host(tree, layout, _named(axis), devices, timeout=timeout)
    if isinstance(devices, Mesh):
        raise ValueError("the arrays of a train state know their mesh: leave devices= out")
    treedef: Any
    check_not_dissolved(tree)
    leaves = named_leaves(tree, is_marked)
    treedef = jax.tree.structure(tree, is_leaf=is_marked)
    for name, x in leaves:
        arrays = (x.shard, x.slices) if isinstance(x, ShardedState) else x
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
            raise RuntimeError(
                f"leaf {name}: zero.to_host runs outside pmap; inside, zero.gather(opt_state) gives the whole state"
            )
    models = _aligned(treedef, like, len(leaves))
    # Copies first, because they do not wait for other processes.
    is_global = any(isinstance(x, ShardedState) and is_of_mesh(x) for _, x in leaves)
    wholes = [x if isinstance(x, ShardedState) else _copy_of(name, x, is_global) for name, x in leaves]
    for i, (state, model) in enumerate(zip(wholes, models, strict=True)):
        if isinstance(state, ShardedState):
            origin = model.known_origin if is_marked(model) else state.known_origin
            wholes[i] = _whole_of(state, origin, devices, timeout)
    return treedef.unflatten(wholes)


def to_devices(
    tree: PyTree,
    layout: Layout | None = None,
    axis: AxisLike | None = None,
    devices: Devices = None,
    *,
    like: PyTree = None,
) -> PyTree:
    """A train state, or with a layout a tree, of the unsharded program for pmap: the inverse of `to_host`.

    For any number of devices; it replaces `replicate(state)`. The states that `tx.init` of a sharded optimizer made
    outside pmap, and files read into them, are cut; everything else is copied to each device. No device holds more of a
    sharded state than its slice. Every process calls it with the same tree; no communication.

    Args:
      tree: a tree of arrays and numbers, and of states that `tx.init` made outside pmap.
      layout, axis: for a tree of which every leaf is cut and that does not know how; both or none.
      devices: the `devices` of the pmap, if given; or the mesh of shard_map: arrays already placed on it stay there.
      like: for trees that do not know which of their parts are states of sharded optimizers, such as those returned by
        `to_host`: a tree with these states in the same places, on devices or as `tx.init` makes them (also under
        `jax.eval_shape`).

    Raises:
      ValueError: shape or dtype of a leaf do not match, or a leaf is on the devices already.
      TypeError: a leaf is neither an array nor a number.

    >>> import optax, zero
    >>> tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    >>> params = {"w": jnp.arange(5.0)}
    >>> state = zero.to_devices({"params": params, "opt_state": tx.init(params)})
    >>> state["opt_state"].shard.ravel().tolist() == list(range(jax.local_device_count()))
    True
    >>> again = zero.to_devices(zero.to_host(state), like=state)
    >>> jax.tree.structure(again) == jax.tree.structure(state)
    True
    """
    if layout is not None:
        return slices_from_host(tree, layout, _named(axis), devices)
    check_not_dissolved(tree)
    marks = _marks(tree)
    if like is not None:
        marks |= _marks(like)
    treedef: Any
    flat, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda path, _: path in marks, is_leaf_takes_path=True
    )
    paths = {path for path, _ in flat}
    for path in marks:
        if path not in paths:
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "(root)"
            raise ValueError(
                f"like= has a different structure from the tree: the state of a sharded optimizer is at {name}, where "
                "the tree has nothing, or has other containers, such as the dicts that Orbax restores without a "
                "target: restore into like=, checkpointer.restore(path, like)"
            )
    names = names_of([path_of(path) for path, _ in flat])
    axes = [mark.origin.axis for mark in marks.values() if mark.origin is not None]
    placed: list[Any] = []
    for name, (path, part) in zip(names, flat, strict=True):
        if isinstance(part, ShardedState):
            raise ValueError(f"leaf {name}: this state is sharded already: zero.to_devices takes the whole state")
        if path in marks:
            whole = part.state if isinstance(part, WholeState) else part
            placed.append(_sharded(whole, marks[path].known_origin, devices))
        else:
            placed.append(_replicated(name or "(root)", part, axes[0] if axes else "batch", devices))
    return treedef.unflatten(placed)


def specs(state: PyTree, mesh: Mesh) -> PyTree:
    """The `PartitionSpec` of every leaf of a train state, for `in_specs` and `out_specs` of `jax.shard_map`.

    The resulting global arrays are the whole state of the optimizer, with padding; `to_host` and `to_devices` convert
    them. Leaves outside sharded optimizers are replicated.

    Args:
      state: a tree with the states that `tx.init` makes outside shard_map. If other mesh axes cut parameters, make them
        from parameters with their shardings; otherwise `jax.eval_shape(tx.init, params)` is enough.
      mesh: a mesh with any axes.

    Raises:
      ValueError: the optimizer was given an `Axis` of groups, or a name that is not an axis of the mesh.

    >>> import optax, zero
    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
    >>> tx = zero.shard_optimizer(optax.adam(0.1), "data")
    >>> tuple(zero.specs(tx.init({"w": jnp.ones((3, 64))}), mesh).slices[0].mu["w"])
    (None, 'data')
    """

    def one(x: Any) -> Any:
        if not is_marked(x):
            return PartitionSpec()
        layout, leaves = state_on_mesh(x.known_origin, mesh.shape)
        return ShardedState(
            layout.treedef.unflatten([leaf.spec for leaf in leaves]), PartitionSpec(x.origin.axis), x.origin
        )

    return jax.tree.map(one, state, is_leaf=is_marked)


def _marks(tree: PyTree) -> dict[Any, ShardedState | WholeState]:
    """The states of sharded optimizers in a tree, keyed by path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_marked)
    return {path: x for path, x in flat if is_marked(x)}


def _named(axis: AxisLike | None) -> AxisLike:
    if axis is None:
        raise TypeError("slices with a layout need the axis along which they are cut: zero.to_host(tree, layout, axis)")
    return axis


def _aligned(treedef: Any, like: PyTree, count: int) -> list[Any]:
    """The leaves of `like`, or None for each; states are leaves."""
    if like is None:
        return [None] * count
    leaves, structure = jax.tree.flatten(like, is_leaf=is_marked)
    if structure != treedef:
        raise ValueError(f"like= has a different structure from the tree: {structure}, expected {treedef}")
    return leaves


def _copy_of(name: str, x: Any, is_global: bool) -> Any:
    """The first device's copy of a replicated leaf, of a tree that shard_map returned (`is_global`) or pmap."""
    if isinstance(x, WholeState):
        return jax.tree.map(_on_host, x.state)
    if not isinstance(x, jax.Array | np.ndarray):
        return x
    parts = x.addressable_shards if isinstance(x, jax.Array) else []
    if isinstance(x, jax.Array) and (is_global or len(parts) > 1) and x.sharding.is_fully_replicated:
        return _on_host(parts[0].data)
    if not parts or any(part.data.shape[:1] != (1,) for part in parts) or x.shape[:1] != (len(parts),):
        where = counted_devices(len(parts))
        raise ValueError(
            f"leaf {name}: expected what pmap returns, one row on each device, got shape {np.shape(x)} on {where}: "
            "leave it out of the tree if it is whole, and spread it by jax.pmap(lambda x: x)(x) if it is a stack"
        )
    first = min(parts, key=lambda part: part.index[0].start or 0)
    return _on_host(first.data[0])


def _on_host(x: Any) -> Any:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)
    if is_key:
        return x
    return np.asarray(x)


def _replicated(name: str, x: Any, axis: AxisLike, devices: Devices) -> jax.Array:
    if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(
            f"leaf {name}: expected an array or a number, got a {type(x).__name__}: keep it outside of the tree"
        )
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        if isinstance(devices, Mesh) and isinstance(x.sharding, NamedSharding) and x.sharding.mesh == devices:
            return x  # placed by the program
        if not x.sharding.is_fully_replicated:
            raise ValueError(f"leaf {name}: this array is on several devices already, got shape {x.shape}")
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)
    whole: Any = x if is_key else np.asarray(x, jax.dtypes.canonicalize_dtype(jnp.result_type(x)))
    leaf = LeafLayout((name,), whole.shape, whole.dtype, ())
    if isinstance(devices, Mesh):
        return write(whole, leaf_on_mesh(leaf, axis), devices)
    ordered = pmap_devices() if devices is None else tuple(devices)
    on = Axis(axis.name if isinstance(axis, Axis) else axis, (1, len(ordered)))
    return spread(whole, leaf, on, ordered)


def _sharded(state: PyTree, origin: Origin, devices: Devices) -> ShardedState:
    """The slices of the state of an unsharded optimizer."""
    if isinstance(devices, Mesh):
        layout, leaves = state_on_mesh(origin, devices.shape)
        check_structure(state, layout)
        wholes = layout.treedef.flatten_up_to(state)
        arrays = [
            write(checked_whole(x, leaf.leaf, leaf.shape), leaf, devices)
            for leaf, x in zip(leaves, wholes, strict=True)
        ]
        number = leaf_on_mesh(_numbers_leaf(layout.shards), origin.axis)
        numbers = write(np.arange(layout.shards, dtype=np.int32), number, devices)
        return ShardedState(layout.treedef.unflatten(arrays), numbers, origin)
    on, ordered, layout = _cut(origin, pmap_devices() if devices is None else tuple(devices))
    layout = _wrapped(layout, state)
    check_structure(state, layout)
    index = spread(np.arange(layout.shards, dtype=np.int32), _numbers_leaf(layout.shards), on, ordered)
    return ShardedState(slices_from_host(state, layout, on, ordered), _in_variable(index, state), origin)


def _whole_of(state: ShardedState, origin: Origin, devices: Sequence[jax.Device] | None, timeout: float) -> PyTree:
    """The state of the unsharded optimizer, from the slices of all devices."""
    check_stacked(state)
    if is_of_mesh(state):
        return _whole_of_mesh(state, origin, timeout)
    index = numbers_of(state)
    if devices is None and jax.process_count() == 1 and isinstance(index, jax.Array):
        rows = sorted(index.addressable_shards, key=lambda part: part.index[0].start or 0)
        devices = [row.device for row in rows] if len(rows) == len(index) else None
    check_not_vmapped(np.ndim(index), 2)
    if devices is not None and jax.process_count() == 1 and len(index) != len(devices):
        raise ValueError(
            f"the state has slices of {len(index)} devices, but devices= names {len(devices)}: zero.to_host takes "
            f"those that hold it, or none. {OTHER_DEVICES}"
        )
    on, ordered, layout = _cut(origin, pmap_devices() if devices is None else tuple(devices))
    layout = _wrapped(layout, state.slices)
    check_structure(state.slices, layout)
    numbers = local_shards(LeafLayout(("shard",), (1,), np.dtype(np.int32), ()), index, ordered)
    local = slices_of(np.array([part.data.item() for part in numbers]), layout.shards)
    slice_of = dict(zip([part.device for part in numbers], local, strict=True))
    for device, expected in zip(ordered, on.shard_of_device(), strict=True):
        if slice_of.get(device, expected) != expected:
            raise ValueError(f"{device} holds slice {slice_of[device]}, not its own, {expected}. {REMEDY}")
    slices = layout.map(lambda leaf, x: _placed(leaf, x, on, ordered), state.slices)
    return slices_to_host(slices, layout, on, ordered, timeout=timeout)


def _placed(leaf: LeafLayout, x: Any, axis: Axis, devices: Sequence[jax.Device]) -> Any:
    """A leaf that is whole on every device, placed as by pmap, from a stack that the program set between steps."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    is_placed = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
    if is_placed or leaf.splits or np.shape(x) != (len(local), *leaf.shape):
        return x
    stack = jnp.asarray(x)
    return stack_local([stack[i : i + 1] for i in range(len(local))], local, axis.name)


def _whole_of_mesh(state: ShardedState, origin: Origin, timeout: float) -> PyTree:
    index = numbers_of(state)
    numbers = index.shape[0]
    layout, leaves = state_on_mesh(origin, {str(origin.axis): numbers})
    check_structure(state.slices, layout)
    leaf = leaf_on_mesh(_numbers_leaf(numbers), origin.axis)
    meet(timeout)
    slices = layout.treedef.flatten_up_to(state.slices)
    # A value that the program set between steps may not be an array yet.
    arrays = [x if leaf.leaf.splits else jnp.asarray(x) for leaf, x in zip(leaves, slices, strict=True)]
    order, *wholes = read([index, *arrays], [leaf, *leaves])
    order = slices_of(order, numbers)
    if order != list(range(numbers)):
        raise ValueError(f"devices hold the slices {order}, not their own. {REMEDY}")
    return layout.treedef.unflatten(wholes)


def _cut(origin: Origin, devices: Sequence[jax.Device]) -> tuple[Axis, tuple[jax.Device, ...], Layout]:
    """The axis, its devices and the layout of the optimizer's state."""
    axis = as_axis(origin.axis, len(devices))
    layout = origin.layout(axis.shards)
    return *axis_and_devices(layout, axis, devices), layout


def _wrapped(layout: Layout, state: PyTree) -> Layout:
    """The layout for a state whose leaves are in flax.nnx variables, as in `nnx.Optimizer`."""
    paths = [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(state)]
    names = list(map(_unwrapped, paths))
    if _first_variable(state) is None or names != [_unwrapped(leaf.path) for leaf in layout.leaves]:
        return layout
    return dataclasses.replace(layout, treedef=jax.tree.structure(state))


def _in_variable(numbers: jax.Array, state: PyTree) -> Any:
    """The slice indices, in a flax.nnx variable if the leaves of the state are: nnx updates nothing else."""
    variable = _first_variable(state)
    if variable is None:
        return numbers
    return jax.tree.unflatten(jax.tree.structure(variable), [numbers])


def _first_variable(state: PyTree) -> Any:
    """The flax.nnx variable that holds the first leaf, or None."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    if leaves and isinstance(leaves[0], nnx.Variable):
        return leaves[0]
    return None


def _unwrapped(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of a leaf without the key of the variable that holds it.

    >>> _unwrapped(("mu", "kernel", "value"))
    ('mu', 'kernel')
    """
    if path[-1:] != ("value",):
        return path
    return path[:-1]


def _numbers_leaf(shards: int) -> LeafLayout:
    """The layout of `ShardedState.shard`: the indices of all slices, one per device."""
    return LeafLayout(("shard",), (shards,), np.dtype(np.int32), (Split(0, shards, shards),))
