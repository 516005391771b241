"""Sharded state on the host: to the whole arrays of the unsharded program and back, with any number of processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero.partition.checksums import check_copies
from zero.partition.collectives.axis import Axis, AxisLike, as_axis
from zero.partition.global_arrays import axis_and_devices, local_shards, pmap_devices, stack_local
from zero.partition.layout import Layout, LeafLayout, PyTree, Split, derive_layout, make_layout
from zero.partition.on_mesh import MeshLeaf, axis_of_mesh, leaf_on_mesh, read, state_on_mesh, write
from zero.partition.pmapped import pmap
from zero.partition.stages import gather

_REMEDY = (
    "Checkpoints hold the whole state: save zero.whole_state(opt_state, tx, params), which all processes call, and "
    "restore with zero.shard_state(whole, tx, params)"
)


class ShardedState(NamedTuple):
    """The optimizer state of `shard_optimizer`: one device's slice, and its number.

    Taking one slice out of the stack of all devices, as `x[0]`, `flax.jax_utils.unreplicate` and pmap's `out_axes=None`
    do, raises a ValueError: it is 1/N of the state. A slice on the wrong device makes `update` return NaN.

    Attributes:
      slices: the state of the optax transform, in its own structure, each leaf this device's slice. `whole_state`
        inside pmap gives the whole.
      shard: int32 `(1,)`, the number of the slice.
    """

    slices: Any
    shard: Any

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the state of a sharded optimizer has no {name!r}: that of optax is in .slices, cut; whole, on the host "
            "and inside pmap, it is zero.whole_state(opt_state, tx, params)"
        )


def _flatten_with_keys(state: ShardedState) -> tuple[Any, None]:
    keys = map(jax.tree_util.GetAttrKey, ShardedState._fields)
    return tuple(zip(keys, _checked(state), strict=True)), None


def _checked(state: ShardedState) -> ShardedState:
    if not _is_concrete(state.shard) or np.ndim(state.shard) != 2:  # one device, or not stacked
        return state
    count = len(state.shard)
    for path, x in jax.tree_util.tree_leaves_with_path(state.slices):
        if np.shape(x)[:1] != (count,):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path, simple=True, separator='/')}: expected a stack of one slice per "
                f"device, ({count}, ...), got shape {np.shape(x)}; a scalar is jnp.full({count}, value) there, or is "
                "set inside pmap"
            )
    return state


def _is_concrete(x: Any) -> bool:
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic)
    return is_array and not isinstance(x, jax.core.Tracer) and x.dtype == np.int32


def _unflatten(_: None, children: Iterable[Any]) -> ShardedState:
    state = ShardedState(*children)
    # Outside a trace the state has the number of every device, so a single number means a single slice; the check
    # needs no values. State of shard_map over one device has a single number too, with a sharding.
    if _is_concrete(state.shard) and np.size(state.shard) == 1 and np.ndim(state.shard) < 2:
        sharding = getattr(state.shard, "sharding", None)
        if not (np.ndim(state.shard) and isinstance(sharding, NamedSharding) and any(sharding.spec)):
            raise ValueError(
                f"this takes one device's slice of a sharded optimizer state and loses the rest. {_REMEDY}"
            )
    return state


jax.tree_util.register_pytree_with_keys(ShardedState, _flatten_with_keys, _unflatten, lambda s: (_checked(s), None))


def require_sharded(state: Any) -> None:
    """Raises if the state is that of the unsharded optimizer."""
    if not isinstance(state, ShardedState):
        raise TypeError(
            f"expected the state of a sharded optimizer, a ShardedState, got a {type(state).__name__}: pmap tx.init "
            "over replicated parameters, or convert state built or restored on the host with "
            "zero.shard_state(opt_state, tx, params)"
        )


def check_structure(state: PyTree, layout: Layout, *, may_lack: bool = False) -> None:
    """Raises if the state does not have the structure of this layout."""
    if jax.tree.structure(state) == layout.treedef:
        return
    if differences := layout.differences(state, may_lack=may_lack):
        raise ValueError(
            f"the state does not fit this optimizer and these parameters: {differences}. Pass those that it was made "
            "with; its leaves are those of tx.init(params)"
        )
    if not may_lack:
        raise ValueError(
            "the state has the same leaves in other containers, such as the dicts and lists of a file: put them into "
            "tx.init(params), by flax.serialization.from_state_dict for instance"
        )


class ShardedOptimizer(optax.GradientTransformationExtraArgs):
    """The result of `shard_optimizer`: `init` and `update`, with attributes for use on the host.

    Attributes:
      unsharded: the wrapped transform; `whole_state` returns its state.
      axis: the `axis_name` of `shard_optimizer`.
    """

    unsharded: optax.GradientTransformationExtraArgs
    axis: AxisLike


def whole_state(
    opt_state: ShardedState,
    tx: ShardedOptimizer,
    params: PyTree,
    devices: Sequence[jax.Device] | Mesh | None = None,
    *,
    timeout: float = 300,
) -> PyTree:
    """The state of the unsharded optimizer as numpy arrays, for saving: unpadded, in the structure of its `init`.

    All processes call it and all get the result. No device holds more of a leaf than its share among the devices of one
    process.

    Inside pmap it gathers the state of the unsharded optimizer on every device, for functions that read it beside whole
    parameters, such as `optax.contrib.schedule_free_eval_params`.

    Args:
      opt_state: as returned by pmap, or by shard_map with `zero.specs`.
      tx: the result of `shard_optimizer`.
      params: one whole copy, or its shapes; with their shardings if other axes of a mesh cut them.
      devices: the `devices` of the pmap, if given.
      timeout: seconds to wait for the other processes to call it.

    Raises:
      TypeError: `opt_state` or `tx` is not sharded.
      ValueError: the shape of a leaf does not match `tx` and `params`, a device holds another's slice, or copies differ
        between devices, as after an update with a `value` that was not reduced.
      RuntimeError: some process did not call it in time.

    >>> import zero
    >>> n = jax.local_device_count()
    >>> params = {"w": jnp.arange(5.0)}
    >>> tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    >>> opt_state = jax.pmap(lambda _: tx.init(params), axis_name="batch")(np.ones(n))
    >>> saved = zero.whole_state(opt_state, tx, params)
    >>> saved[0].mu["w"].shape
    (5,)
    >>> jax.tree.structure(saved) == jax.tree.structure(optax.adam(0.1).init(params))
    True
    """
    require_sharded(opt_state)
    _checked(opt_state)
    if isinstance(opt_state.shard, jax.core.Tracer):
        axis = as_axis(_checked_optimizer(tx).axis)
        layout = derive_layout(tx.unsharded.init, make_layout(params, axis.shards))
        check_structure(opt_state.slices, layout)
        return gather(opt_state.slices, layout, axis)
    if np.ndim(opt_state.shard) == 1:
        return _whole_state_of_mesh(opt_state, tx, params, timeout)
    if isinstance(devices, Mesh):
        raise ValueError("this state is that of a pmap, a stack of slices: give its devices, if it had any, not a mesh")
    axis, devices, layout = _layout(tx, params, devices)
    check_structure(opt_state.slices, layout)
    numbers = local_shards(LeafLayout(("shard",), (1,), np.dtype(np.int32), ()), opt_state.shard, devices)
    held = {part.device: int(part.data.item()) for part in numbers}
    expected = axis.shard_of_device()
    for position, device in enumerate(devices):
        if device in held and held[device] != expected[position]:
            raise ValueError(f"{device} holds slice {held[device]}, not its own, {expected[position]}. {_REMEDY}")
    return to_host(opt_state.slices, layout, axis, devices, timeout=timeout)


def shard_state(
    opt_state: PyTree, tx: ShardedOptimizer, params: PyTree, devices: Sequence[jax.Device] | Mesh | None = None
) -> ShardedState:
    """State of the unsharded optimizer, built on the host or restored, as slices for pmap: one on each device.

    Every process calls it with the same state; no communication, and no device holds more than its slice.

    Args:
      opt_state: the result of the `init` of the optax transform, or of `whole_state`.
      tx, params: as in `whole_state`.
      devices: the `devices` of the pmap, if given; or the mesh of shard_map.

    Raises:
      TypeError: `tx` is not sharded.
      ValueError: shape or dtype of a leaf do not match `tx` and `params`.

    >>> import zero
    >>> params = {"w": jnp.arange(5.0)}
    >>> tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    >>> opt_state = zero.shard_state(optax.adam(0.1).init(params), tx, params)
    >>> opt_state.shard.ravel().tolist() == list(range(jax.local_device_count()))
    True
    """
    if isinstance(opt_state, ShardedState):
        raise ValueError("this state is sharded already: shard_state takes the whole state of the unsharded optimizer")
    if isinstance(devices, Mesh):
        return _shard_state_on_mesh(opt_state, tx, params, devices)
    axis, devices, layout = _layout(tx, params, devices)
    check_structure(opt_state, layout)
    numbers = np.arange(layout.shards, dtype=np.int32)
    index = _spread(numbers, _numbers_leaf(layout.shards), axis, devices)
    return ShardedState(from_host(opt_state, layout, axis, devices), index)


def specs(tx: ShardedOptimizer, params: PyTree, mesh: Mesh) -> ShardedState:
    """The `PartitionSpec` of every leaf of the sharded state, for `in_specs` and `out_specs` of `jax.shard_map`.

    The resulting global arrays are the whole state, with padding; convert them by `whole_state` and `shard_state`.

    Args:
      tx: the result of `shard_optimizer` with the name of an axis of the mesh.
      params: one whole copy, or its shapes; with their shardings if other axes of the mesh cut them.
      mesh: a mesh with any axes.

    Raises:
      TypeError: `tx` is not sharded.
      ValueError: `tx` was given an `Axis` of groups: use a further axis of the mesh instead.

    >>> import zero
    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
    >>> tx = zero.shard_optimizer(optax.adam(0.1), "data")
    >>> tuple(zero.specs(tx, {"w": jnp.ones((3, 64))}, mesh).slices[0].mu["w"])
    (None, 'data')
    """
    layout, leaves = _state_on_mesh(tx, params, mesh.shape)
    return ShardedState(layout.treedef.unflatten([leaf.spec for leaf in leaves]), PartitionSpec(tx.axis))


def _state_on_mesh(tx: ShardedOptimizer, params: PyTree, sizes: Mapping[str, int]) -> tuple[Layout, list[MeshLeaf]]:
    axis = _checked_optimizer(tx).axis
    if isinstance(axis, Axis) or axis not in sizes:
        given = "an Axis of groups" if isinstance(axis, Axis) else repr(axis)
        raise ValueError(
            f"the axis_name of zero.shard_optimizer is {given}: under shard_map expected the name of an axis of the "
            f"mesh, one of {list(sizes)}"
        )
    return state_on_mesh(tx.unsharded.init, params, sizes[axis], axis)


def _whole_state_of_mesh(opt_state: ShardedState, tx: ShardedOptimizer, params: PyTree, timeout: float) -> PyTree:
    numbers = opt_state.shard.shape[0]
    layout, leaves = _state_on_mesh(tx, params, {str(_checked_optimizer(tx).axis): numbers})
    check_structure(opt_state.slices, layout)
    index = leaf_on_mesh(_numbers_leaf(numbers), tx.axis)
    _meet(timeout)
    held, *wholes = read([opt_state.shard, *layout.treedef.flatten_up_to(opt_state.slices)], [index, *leaves])
    if held.tolist() != list(range(numbers)):
        raise ValueError(f"devices hold the slices {held.tolist()}, not their own. {_REMEDY}")
    return layout.treedef.unflatten(wholes)


def _shard_state_on_mesh(opt_state: PyTree, tx: ShardedOptimizer, params: PyTree, mesh: Mesh) -> ShardedState:
    layout, leaves = _state_on_mesh(tx, params, mesh.shape)
    check_structure(opt_state, layout)
    wholes = layout.treedef.flatten_up_to(opt_state)
    arrays = [write(_checked_whole(x, one.leaf, one.shape), one, mesh) for one, x in zip(leaves, wholes, strict=True)]
    numbers, index = np.arange(layout.shards, dtype=np.int32), leaf_on_mesh(_numbers_leaf(layout.shards), tx.axis)
    return ShardedState(layout.treedef.unflatten(arrays), write(numbers, index, mesh))


def _numbers_leaf(shards: int) -> LeafLayout:
    """The layout of `ShardedState.shard`: the numbers of all slices, of which each device has its own."""
    return LeafLayout(("shard",), (shards,), np.dtype(np.int32), (Split(0, shards, shards),))


def to_host(
    tree: PyTree,
    layout: Layout,
    axis: AxisLike,
    devices: Sequence[jax.Device] | Mesh | None = None,
    *,
    timeout: float = 300,
) -> PyTree:
    """Whole numpy arrays, unpadded, from the shards that a pmap returned, such as sharded averages of parameters.

    Leaves keep their own dtype, not that of the layout. Copies on several devices are compared first.

    All processes call it and all get the result. In one process nothing moves between devices; several processes gather
    one leaf at a time, and a device receives its share among the devices of its process.

    Args:
      tree, layout, axis: as for `to_global`.
      devices: the `devices` of the pmap, if given; or the mesh of shard_map, if `tree` has global arrays.
      timeout: seconds to wait for the other processes to call it.

    Raises:
      ValueError: shape, devices or device order of a leaf do not match layout and axis, or copies differ.
      RuntimeError: some process did not call it in time.

    >>> import zero
    >>> n = jax.local_device_count()
    >>> whole = {"w": np.arange(5, dtype=np.float32)}
    >>> layout = make_layout(whole, n)
    >>> shards = jax.pmap(lambda _: zero.shard(whole, layout, "batch"), "batch")(np.ones(n))
    >>> to_host(shards, layout, "batch")["w"].tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    if isinstance(devices, Mesh):
        leaves = [leaf_on_mesh(leaf, axis_of_mesh(layout, axis, devices)) for leaf in layout.leaves]
        arrays = layout.leaves_of(tree)
        _meet(timeout)
        return layout.treedef.unflatten(read(arrays, leaves))
    on, ordered = axis_and_devices(layout, axis, devices)
    layout.map(lambda leaf, x: local_shards(leaf, x, ordered), tree)  # before a process waits for another
    _meet(timeout)
    check_copies(tree, layout, on, ordered)
    exchange = _exchange(on, ordered)

    def one(leaf: LeafLayout, x: jax.Array) -> np.ndarray:
        if not leaf.splits:
            first = x.addressable_shards[0].data[0]
            return first if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else np.asarray(first)
        whole = np.empty(leaf.padded_shape, x.dtype)
        for index, part in exchange(x):
            whole[_slices(leaf, index)] = part
        return whole[tuple(map(slice, leaf.shape))]

    return layout.map(one, tree)


def from_host(
    tree: PyTree, layout: Layout, axis: AxisLike, devices: Sequence[jax.Device] | Mesh | None = None
) -> PyTree:
    """The inverse of `to_host`: shards for a pmap, for any N; no communication.

    A float may be wider than in the layout, because optax promotes state; it keeps its dtype.

    Args:
      tree: per leaf an array of `leaf.shape`, the same on every process.
      layout, axis, devices: as in `to_host`.

    Raises:
      ValueError: shape or dtype of a leaf do not match the layout.

    >>> n = jax.local_device_count()
    >>> layout = make_layout({"w": jax.ShapeDtypeStruct((2 * n - 1,), jnp.float32)}, n)
    >>> from_host({"w": np.ones(2 * n - 1, np.float32)}, layout, "batch")["w"][-1].tolist()
    [1.0, 0.0]
    """
    if isinstance(devices, Mesh):
        mesh, name = devices, axis_of_mesh(layout, axis, devices)
        return layout.map(
            lambda leaf, x: write(_checked_whole(x, leaf, leaf.shape), leaf_on_mesh(leaf, name), mesh), tree
        )
    on, ordered = axis_and_devices(layout, axis, devices)
    return layout.map(lambda leaf, x: _spread(_checked_whole(x, leaf, leaf.shape), leaf, on, ordered), tree)


def _spread(whole: Any, leaf: LeafLayout, axis: Axis, devices: Sequence[jax.Device]) -> jax.Array:
    """The slices of a whole array on this process's devices, as pmap returns them."""
    shards = zip(devices, axis.shard_of_device(), strict=True)
    local = {device: shard for device, shard in shards if device.process_index == jax.process_index()}
    return stack_local([_padded_slice(whole, leaf, shard)[None] for shard in local.values()], list(local), axis.name)


def _checked_whole(x: Any, leaf: LeafLayout, shape: tuple[int, ...]) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    whole = x if is_key else np.asarray(x, None if hasattr(x, "dtype") else leaf.dtype)
    if whole.shape != shape or not _may_hold(leaf.dtype, whole.dtype):
        hint = ""
        if whole.shape == shape:
            hint = "; the layout has the dtypes of the tree that it was made from"
        elif whole.shape[1:] == shape:
            hint = "; this looks like the stack of all devices: take one of copies, and zero.to_host of slices"
        elif whole.shape == leaf.shard_shape:
            hint = "; this looks like one device's slice, 1/N of it: save what zero.to_host returns"
        raise ValueError(
            f"leaf {leaf.name}: expected the whole {leaf.dtype.name}{list(shape)}, without padding, "
            f"got {whole.dtype.name}{list(whole.shape)}{hint}"
        )
    return whole


def _checked_optimizer(tx: ShardedOptimizer) -> ShardedOptimizer:
    if not isinstance(tx, ShardedOptimizer):
        raise TypeError(f"tx must be what zero.shard_optimizer returned, got a {type(tx).__name__}")
    return tx


def _layout(
    tx: ShardedOptimizer, params: PyTree, devices: Sequence[jax.Device] | None
) -> tuple[Axis, tuple[jax.Device, ...], Layout]:
    """The axis, its devices and the layout of the optimizer's state."""
    size = len(pmap_devices() if devices is None else devices)
    axis = as_axis(_checked_optimizer(tx).axis, size)
    layout = derive_layout(tx.unsharded.init, make_layout(params, axis.shards))
    return *axis_and_devices(layout, axis, devices), layout


def _may_hold(layout_dtype: Any, dtype: Any) -> bool:
    """Whether state of this dtype fits the layout: the same dtype, or a wider float, by promotion in updates."""
    if dtype == layout_dtype or not all(jnp.issubdtype(x, jnp.floating) for x in (dtype, layout_dtype)):
        return dtype == layout_dtype
    return jnp.promote_types(layout_dtype, dtype) == dtype == jax.dtypes.canonicalize_dtype(dtype)


def _slices(leaf: LeafLayout, index: int) -> tuple[slice, ...]:
    """The slices of shard `index` in the padded array."""
    slices = [slice(None)] * len(leaf.shape)
    for split in leaf.splits:
        slices[split.dim] = slice(index * split.shard_size, (index + 1) * split.shard_size)
    return tuple(slices)


def _padded_slice(whole: Any, leaf: LeafLayout, index: int) -> Any:
    if not leaf.splits:
        return whole
    part = whole[_slices(leaf, index)]
    widths = [(0, size - there) for size, there in zip(leaf.shard_shape, part.shape, strict=True)]
    return np.pad(part, widths)


def _exchange(axis: Axis, devices: tuple[jax.Device, ...]) -> Any:
    """A function that returns every shard of an array to this process, as pairs of shard number and numpy array."""
    shard_of = axis.shard_of_device()
    processes = sorted({device.process_index for device in devices})
    positions = [[i for i, device in enumerate(devices) if device.process_index == p] for p in processes]
    if all(len({shard_of[i] for i in mine}) == axis.shards for mine in positions):
        shard_of_local = {devices[i]: shard_of[i] for i in positions[processes.index(jax.process_index())]}
        return lambda x: [(shard_of_local[part.device], np.asarray(part.data)[0]) for part in x.addressable_shards]
    if len({len(mine) for mine in positions}) > 1:
        raise ValueError(f"processes have different numbers of devices: {[len(mine) for mine in positions]}")
    groups = tuple(zip(*positions, strict=True))  # one device of each process
    program = _gather_program(axis.name, groups, devices)
    shards_of_device = {devices[i]: [shard_of[j] for j in group] for group in groups for i in group}

    def exchange(x: jax.Array) -> list[tuple[int, np.ndarray]]:
        pairs: list[tuple[int, np.ndarray]] = []
        for part in program(x).addressable_shards:
            pairs += zip(shards_of_device[part.device], np.asarray(part.data)[0], strict=True)
        return pairs

    return exchange


@lru_cache(maxsize=8)  # a pmap of a new function would be traced and compiled again at every call
def _gather_program(name: str, groups: tuple[tuple[int, ...], ...], devices: tuple[jax.Device, ...]) -> Any:
    return pmap(
        partial(lax.all_gather, axis_name=name, axis_index_groups=list(map(list, groups))), name, devices=devices
    )


def coordination_client() -> Any:
    """The key-value store and barriers of `jax.distributed`; jax has no public name for them."""
    from jax._src import distributed

    return distributed.global_state.client


def coordinator_address() -> tuple[str, int]:
    """Host and port of the service behind `coordination_client`, on process 0."""
    from jax._src import distributed

    host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
    return host.strip("[]"), int(port)


_meetings = itertools.count()


def _meet(timeout: float) -> None:
    """Waits for every process: a collective that only some of them call would hang silently."""
    if jax.process_count() == 1:
        return
    try:
        coordination_client().wait_at_barrier(f"zero_to_host_{next(_meetings)}", int(1000 * timeout))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            "not every process gathered the sharded state: all must call zero.whole_state or zero.to_host; put only "
            "the writing under `if jax.process_index() == 0`"
        ) from error
