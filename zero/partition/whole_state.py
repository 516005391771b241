"""Converts slices to whole arrays on the host and back, with any number of processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from zero.partition.checksums import check_copies
from zero.partition.collectives.axis import Axis, AxisLike
from zero.partition.global_arrays import axis_and_devices, local_shards, stack_local
from zero.partition.layout import Layout, LeafLayout, PyTree
from zero.partition.on_mesh import axis_of_mesh, leaf_on_mesh, read, write
from zero.partition.pmapped import pmap


def slices_to_host(
    tree: PyTree,
    layout: Layout,
    axis: AxisLike,
    devices: Sequence[jax.Device] | Mesh | None = None,
    *,
    timeout: float = 300,
) -> PyTree:
    """Whole numpy arrays, unpadded, from the shards that a pmap returned.

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
    """
    if isinstance(devices, Mesh):
        leaves = [leaf_on_mesh(leaf, axis_of_mesh(layout, axis, devices)) for leaf in layout.leaves]
        arrays = layout.leaves_of(tree)
        meet(timeout)
        return layout.treedef.unflatten(read(arrays, leaves))
    on, ordered = axis_and_devices(layout, axis, devices)
    layout.map(lambda leaf, x: local_shards(leaf, x, ordered), tree)  # before a process waits for another
    meet(timeout)
    check_copies(tree, layout, on, ordered)
    exchange = _exchange(on, ordered)

    def one(leaf: LeafLayout, x: jax.Array) -> np.ndarray:
        if not leaf.splits:
            first = x.addressable_shards[0].data[0]
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                return first
            return np.asarray(first)
        whole = np.empty(leaf.padded_shape, x.dtype)
        for index, part in exchange(x):
            whole[_slices(leaf, index)] = part
        return whole[tuple(map(slice, leaf.shape))]

    return layout.map(one, tree)


def slices_from_host(
    tree: PyTree, layout: Layout, axis: AxisLike, devices: Sequence[jax.Device] | Mesh | None = None
) -> PyTree:
    """The inverse of `slices_to_host`: shards for a pmap, for any N; no communication.

    A float may be wider than in the layout, because optax promotes state; it keeps its dtype.

    Args:
      tree: per leaf an array of `leaf.shape`, the same on every process.
      layout, axis, devices: as in `slices_to_host`.

    Raises:
      ValueError: shape or dtype of a leaf do not match the layout.
    """
    if isinstance(devices, Mesh):
        mesh = devices
        name = axis_of_mesh(layout, axis, devices)
        return layout.map(
            lambda leaf, x: write(checked_whole(x, leaf, leaf.shape), leaf_on_mesh(leaf, name), mesh), tree
        )
    on, ordered = axis_and_devices(layout, axis, devices)
    return layout.map(lambda leaf, x: spread(checked_whole(x, leaf, leaf.shape), leaf, on, ordered), tree)


def spread(whole: Any, leaf: LeafLayout, axis: Axis, devices: Sequence[jax.Device]) -> jax.Array:
    """The slices of a whole array on this process's devices, as pmap returns them."""
    shards = zip(devices, axis.shard_of_device(), strict=True)
    local = {device: shard for device, shard in shards if device.process_index == jax.process_index()}
    if isinstance(whole, np.ndarray) and not leaf.splits:
        whole = whole.copy()  # on CPU an array of jax would share the memory, and change with the caller's array
    return stack_local([_padded_slice(whole, leaf, shard)[None] for shard in local.values()], list(local), axis.name)


def checked_whole(x: Any, leaf: LeafLayout, shape: tuple[int, ...]) -> Any:
    whole = x
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # a key is not a numpy array
        whole = np.asarray(x, None if hasattr(x, "dtype") else leaf.dtype)
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


def _positions_of(process: int, devices: Sequence[jax.Device]) -> list[int]:
    return [i for i, device in enumerate(devices) if device.process_index == process]


def _exchange(axis: Axis, devices: tuple[jax.Device, ...]) -> Any:
    """A function that returns all shards of an array to this process, as pairs of shard index and numpy array."""
    shard_of = axis.shard_of_device()
    processes = sorted({device.process_index for device in devices})
    positions = [_positions_of(process, devices) for process in processes]
    shards_of_process = [{shard_of[i] for i in mine} for mine in positions]
    if all(len(shards) == axis.shards for shards in shards_of_process):
        shard_of_local = {devices[i]: shard_of[i] for i in positions[processes.index(jax.process_index())]}
        return lambda x: [(shard_of_local[part.device], np.asarray(part.data)[0]) for part in x.addressable_shards]
    if len({len(mine) for mine in positions}) > 1:
        raise ValueError(f"processes have different numbers of devices: {[len(mine) for mine in positions]}")
    groups = tuple(zip(*positions, strict=True))  # one device of each process
    program = _gather_program(axis.name, groups, devices)
    shards_of_device: dict[jax.Device, list[int]] = {}
    for group in groups:
        shards_of_group = [shard_of[i] for i in group]
        shards_of_device |= {devices[i]: shards_of_group for i in group}

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


def processes_that_joined() -> int:
    """The processes of `jax.distributed`, without starting the devices as `jax.process_count` does."""
    from jax._src import distributed

    return distributed.global_state.num_processes or 1


def cluster_of_processes(seconds: int) -> tuple[str | None, int | None, int | None]:
    """Where jax finds the processes of a job by itself: the coordinator's HOST:PORT, their number, and this one's.

    Of TPU VMs, Slurm, Open MPI and others; None for what it does not find within so many seconds.
    """
    from jax._src.clusters import ClusterEnv

    address, count, number, _ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, seconds)
    return address, count, number


def coordinator_address() -> tuple[str, int]:
    """Host and port of the service behind `coordination_client`, on process 0."""
    from jax._src import distributed

    host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
    return host.strip("[]"), int(port)


_meetings = itertools.count()


def meet(timeout: float) -> None:
    """Waits for every process, because a collective that only some call would hang silently."""
    if jax.process_count() == 1:
        return
    try:
        coordination_client().wait_at_barrier(f"zero_to_host_{next(_meetings)}", int(1000 * timeout))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            "not every process gathered the sharded state: all must call zero.to_host; put only the writing "
            "under `if jax.process_index() == 0`"
        ) from error
