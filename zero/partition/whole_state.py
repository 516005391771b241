"""Sharded state on the host: whole arrays as the unsharded program has them, and back, on any number of processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero.partition.collectives.axis import Axis, AxisLike
from zero.partition.global_arrays import local_shards, mesh_of, pmap_devices
from zero.partition.layout import Layout, LeafLayout, PyTree, derive_layout, make_layout

_REMEDY = (
    "Checkpoints hold the whole state: save zero.whole_state(opt_state, tx, params), which all processes call, and "
    "restore with zero.shard_state(whole, tx, params)"
)


class ShardedState(NamedTuple):
    """The optimizer state of `shard_optimizer`: one device's slice, and which one it is.

    A slice that is taken out of the stack of all devices, as `x[0]`, `flax.jax_utils.unreplicate` and pmap's
    `out_axes=None` do, raises a ValueError at once: it is 1/N of the state. What comes back to a device whose slice it
    is not, by a way that this cannot see, makes `update` return NaN.

    Attributes:
      inner: the state of the optax transform, in its own structure, each leaf this device's slice.
      shard: int32, the number of the slice.
    """

    inner: Any
    shard: Any


def _flatten_with_keys(state: ShardedState) -> tuple[Any, None]:
    keys = map(jax.tree_util.GetAttrKey, ShardedState._fields)
    return tuple(zip(keys, state, strict=True)), None


def _unflatten(_: None, children: Iterable[Any]) -> ShardedState:
    state = ShardedState(*children)
    is_array = isinstance(state.shard, jax.Array | np.ndarray | np.generic)
    # Outside a trace every device's number is there, and a scalar is one slice alone: seen without waiting for values.
    is_concrete = is_array and not isinstance(state.shard, jax.core.Tracer)
    if is_concrete and np.shape(state.shard) == () and state.shard.dtype == np.int32:
        raise ValueError(f"this takes one device's slice of a sharded optimizer state and loses the rest. {_REMEDY}")
    return state


jax.tree_util.register_pytree_with_keys(ShardedState, _flatten_with_keys, _unflatten, lambda s: (tuple(s), None))


def require_sharded(state: Any) -> None:
    """Raises where state was made for the unsharded optimizer."""
    if not isinstance(state, ShardedState):
        raise TypeError(
            f"expected the state of a sharded optimizer, a ShardedState, got a {type(state).__name__}: pmap tx.init "
            "over replicated parameters, or slice what was built or restored on the host by "
            "zero.shard_state(opt_state, tx, params)"
        )


class ShardedOptimizer(optax.GradientTransformationExtraArgs):
    """What `shard_optimizer` returns: `init` and `update`, and what the host needs to know of them.

    Attributes:
      unsharded: the transform that was wrapped, whose state `whole_state` returns.
      axis: as it was given.
    """

    unsharded: optax.GradientTransformationExtraArgs
    axis: AxisLike


def whole_state(
    opt_state: ShardedState,
    tx: ShardedOptimizer,
    params: PyTree,
    devices: Sequence[jax.Device] | None = None,
    *,
    timeout: float = 300,
) -> PyTree:
    """The state of the unsharded optimizer as numpy arrays, to be saved: unpadded, in the structure of its `init`.

    All processes call it and all get the result; then one of them may write it. No device holds more of a leaf than
    its share among the devices of one process.

    Args:
      opt_state: as it came out of pmap.
      tx: what `shard_optimizer` returned.
      params: one whole copy, or its shapes.
      devices: those that pmap was given, if any.
      timeout: seconds until the other processes must have called it too.

    Raises:
      TypeError: `opt_state` or `tx` is not sharded.
      ValueError: a leaf has another shape than `tx` and `params` say, or a device holds another's slice.
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
    axis, layout = _layout(tx, params, devices)
    held = {part.device: int(part.data[0]) for part in opt_state.shard.addressable_shards}
    expected = axis.shard_of_device()
    for position, device in enumerate(_devices(axis, devices)):
        if device in held and held[device] != expected[position]:
            raise ValueError(f"{device} holds slice {held[device]}, not its own, {expected[position]}. {_REMEDY}")
    return to_host(opt_state.inner, layout, axis, devices, timeout=timeout)


def shard_state(
    opt_state: PyTree, tx: ShardedOptimizer, params: PyTree, devices: Sequence[jax.Device] | None = None
) -> ShardedState:
    """State of the unsharded optimizer, built on the host or restored, as slices for pmap: one on each device.

    Every process calls it with the same state; nothing is communicated, and no device holds more than its slice.

    Args:
      opt_state: as `optax`'s own `init` returns it, or `whole_state`.
      tx, params, devices: as for `whole_state`.

    Raises:
      TypeError: `tx` is not sharded.
      ValueError: a leaf has another shape or dtype than `tx` and `params` say.

    >>> import zero
    >>> params = {"w": jnp.arange(5.0)}
    >>> tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    >>> opt_state = zero.shard_state(optax.adam(0.1).init(params), tx, params)
    >>> opt_state.shard.tolist() == list(range(jax.local_device_count()))
    True
    """
    if isinstance(opt_state, ShardedState):
        raise ValueError("this state is sharded already: shard_state takes the whole state of the unsharded optimizer")
    axis, layout = _layout(tx, params, devices)
    local = _local_positions(axis, devices)
    shard_of = np.asarray(axis.shard_of_device(), np.int32)
    index = _stack([shard_of[position, None] for position, _ in local], [device for _, device in local], axis)
    return ShardedState(from_host(opt_state, layout, axis, devices), index)


def to_host(
    tree: PyTree,
    layout: Layout,
    axis: AxisLike,
    devices: Sequence[jax.Device] | None = None,
    *,
    timeout: float = 300,
) -> PyTree:
    """Whole numpy arrays, unpadded, from the shards that a pmap returned: sharded averages of parameters, for instance.

    All processes call it and all get the result. In one process nothing moves between devices; among several a leaf
    at a time is gathered, a device receiving its share among the devices of its process.

    Args:
      tree: per leaf `(local devices, *leaf.shard_shape)`, as it came out of pmap.
      layout: of the tree.
      axis: the pmap axis; a name means one group of `layout.shards` devices.
      devices: those that pmap was given, if any.
      timeout: seconds until the other processes must have called it too.

    Raises:
      ValueError: a leaf has another shape or lies on other devices than the layout and the axis say.
      RuntimeError: some process did not call it in time.

    >>> import zero
    >>> n = jax.local_device_count()
    >>> whole = {"w": np.arange(5, dtype=np.float32)}
    >>> layout = make_layout(whole, n)
    >>> shards = jax.pmap(lambda _: zero.shard(whole, layout, "batch"), "batch")(np.ones(n))
    >>> to_host(shards, layout, "batch")["w"].tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    mesh = mesh_of(layout, axis, devices)
    on = _axis(layout, axis)
    layout.map(lambda leaf, x: local_shards(leaf, x, mesh), tree)  # before a process waits for another
    _meet(timeout)
    exchange = _exchange(on, tuple(_devices(on, devices)))

    def one(leaf: LeafLayout, x: jax.Array) -> np.ndarray:
        if not leaf.splits:
            first = x.addressable_shards[0].data[0]
            return first if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else np.asarray(first)
        whole = np.empty(leaf.padded_shape, leaf.dtype)
        for index, part in exchange(x):
            whole[_slices(leaf, index)] = part
        return whole[tuple(map(slice, leaf.shape))]

    return layout.map(one, tree)


def from_host(tree: PyTree, layout: Layout, axis: AxisLike, devices: Sequence[jax.Device] | None = None) -> PyTree:
    """What `to_host` returned as shards for a pmap, from any N; nothing is communicated.

    Args:
      tree: per leaf an array of `leaf.shape`, the same on every process.
      layout, axis, devices: as for `to_host`.

    Raises:
      ValueError: a leaf has another shape or dtype than the layout says.

    >>> n = jax.local_device_count()
    >>> layout = make_layout({"w": jax.ShapeDtypeStruct((2 * n - 1,), jnp.float32)}, n)
    >>> from_host({"w": np.ones(2 * n - 1, np.float32)}, layout, "batch")["w"][-1].tolist()
    [1.0, 0.0]
    """
    mesh_of(layout, axis, devices)
    on = _axis(layout, axis)
    local = _local_positions(on, devices)
    shard_of = on.shard_of_device()

    def one(leaf: LeafLayout, x: Any) -> jax.Array:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        whole = x if is_key else np.asarray(x, None if hasattr(x, "dtype") else leaf.dtype)
        if whole.shape != leaf.shape or whole.dtype != leaf.dtype:
            hint = "; this looks like a copy per device: unreplicate it" if whole.shape[1:] == leaf.shape else ""
            if whole.shape == leaf.shard_shape:
                hint = "; this looks like one device's slice, 1/N of it: save what zero.to_host returns"
            raise ValueError(
                f"leaf {leaf.name}: expected the whole {leaf.dtype.name}{list(leaf.shape)}, without padding, "
                f"got {whole.dtype.name}{list(whole.shape)}{hint}"
            )
        parts = (_padded_slice(whole, leaf, shard_of[position]) for position, _ in local)
        return _stack([part[None] for part in parts], [device for _, device in local], on)

    return layout.map(one, tree)


def _layout(tx: ShardedOptimizer, params: PyTree, devices: Sequence[jax.Device] | None) -> tuple[Axis, Layout]:
    """The axis and the layout of the optimizer's state."""
    if not isinstance(tx, ShardedOptimizer):
        raise TypeError(f"tx must be what zero.shard_optimizer returned, got a {type(tx).__name__}")
    size = len(pmap_devices() if devices is None else devices)
    axis = tx.axis if isinstance(tx.axis, Axis) else Axis(tx.axis, (1, size))
    return axis, derive_layout(tx.unsharded.init, make_layout(params, axis.shards))


def _axis(layout: Layout, axis: AxisLike) -> Axis:
    return axis if isinstance(axis, Axis) else Axis(axis, (1, layout.shards))


def _devices(axis: Axis, devices: Sequence[jax.Device] | None) -> Sequence[jax.Device]:
    return pmap_devices()[: axis.size] if devices is None else devices


def _local_positions(axis: Axis, devices: Sequence[jax.Device] | None) -> list[tuple[int, jax.Device]]:
    """This process's devices with their positions on the pmap axis."""
    here = jax.process_index()
    return [(i, device) for i, device in enumerate(_devices(axis, devices)) if device.process_index == here]


def _slices(leaf: LeafLayout, index: int) -> tuple[slice, ...]:
    """Where shard `index` lies in the padded array."""
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


def _stack(parts: Sequence[Any], devices: Sequence[jax.Device], axis: Axis) -> jax.Array:
    """One `(1, ...)` array for each local device as pmap returns them."""
    sharding = NamedSharding(Mesh(np.asarray(devices), (axis.name,)), PartitionSpec(axis.name))
    arrays = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    return jax.make_array_from_single_device_arrays((len(parts), *arrays[0].shape[1:]), sharding, arrays)


def _exchange(axis: Axis, devices: tuple[jax.Device, ...]) -> Any:
    """A function that gives this process every shard of an array, as pairs of shard and numpy array."""
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
    return jax.pmap(
        partial(lax.all_gather, axis_name=name, axis_index_groups=list(map(list, groups))), name, devices=devices
    )


def coordination_client() -> Any:
    """The strings and barriers that all processes of `jax.distributed` share; jax has no public name for them."""
    from jax._src import distributed

    return distributed.global_state.client


def coordinator_address() -> tuple[str, int]:
    """Host and port of the service behind `coordination_client`, on process 0."""
    from jax._src import distributed

    host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
    return host.strip("[]"), int(port)


_meetings = itertools.count()


def _meet(timeout: float) -> None:
    """Waits until every process is here: a collective that only some of them enter would hang without a word."""
    if jax.process_count() == 1:
        return
    try:
        coordination_client().wait_at_barrier(f"zero_to_host_{next(_meetings)}", int(1000 * timeout))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            "not every process gathered the sharded state: all call zero.whole_state or zero.to_host, and only what is "
            "written comes under `if jax.process_index() == 0`"
        ) from error
