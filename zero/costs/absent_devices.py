"""A program's lowering for devices that are not attached."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from zero.base.errors import UnknownTopology
from zero.partition.pmapped import arguments_of_pmap


class NotPlannable(ValueError):
    """A program or arguments that cannot be planned for a topology."""


def lower_for(
    devices: Sequence[Any], fn: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], list[str]]:
    """A program's lowering for these devices.

    Args:
      devices: of a pmapped function, in the order of its axis.
      fn: what `jax.pmap` or `jax.jit` returned, or a wrapper of the latter with a method `lower`; any other function is
        jitted.
      args: arrays, or `jax.ShapeDtypeStruct`; of a pmapped function with an axis of all devices.
      kwargs: likewise.

    Returns:
      What `fn.lower` returns; the devices in the order of the program's axis or mesh; what is uncertain about them.

    Raises:
      TypeError: `fn` cannot be called.
      NotPlannable: the arguments, or a mesh, are for another number of devices.
    """
    lowered = _lower_pmapped(devices, fn, args, kwargs)
    if lowered is not None:
        return lowered, list(devices), []
    if not hasattr(fn, "lower"):
        fn = jax.jit(fn)
    if hasattr(fn, "trace"):  # wrappers, as those of Equinox and Haliax, tell arrays from constants by their types
        args, kwargs = jax.tree.map(_sharded_shape, (tuple(args), kwargs))
    return _lower_for_a_mesh(devices, fn, args, kwargs)


def compile_on_cpus(count: int, fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A program that is compiled for CPU devices of this process, in place of devices without a compiler.

    Args:
      count: of the devices.
      fn, args, kwargs: as of `lower_for`.

    Raises:
      TypeError: `fn` cannot be called.
      UnknownTopology: this process has fewer CPU devices.
      NotPlannable: the arguments, or a mesh, are for another number of devices.
    """
    cpus = jax.devices("cpu")
    if len(cpus) < count:
        raise UnknownTopology(
            f"a program for {count} GPUs is compiled for as many CPU devices, and this process has {len(cpus)}: start "
            f"it with JAX_NUM_CPU_DEVICES={count} in its environment"
        )
    lowered = _lower_pmapped(cpus[:count], fn, args, kwargs)
    if lowered is None:
        lowered = (fn if hasattr(fn, "lower") else jax.jit(fn)).lower(*args, **kwargs)
        lowered = getattr(lowered, "lowered", lowered)  # of Equinox
        found = list(lowered._lowering._device_list)
        if len(found) != count:
            raise NotPlannable(_says_other_devices(found, cpus[:count]))
    return lowered.compile()


def _lower_pmapped(devices: Sequence[Any], fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The lowering of a pmapped function; None of any other."""
    if not callable(fn):
        raise TypeError(f"expected a function made by jax.pmap or jax.jit, got {type(fn).__name__}")
    made = arguments_of_pmap(fn)
    if made is None:
        return None
    args, kwargs = jax.tree.map(_shape, (tuple(args), kwargs))
    _check_axes(made.in_axes, made.static_argnums, args, kwargs, len(devices))
    return made.on(devices).lower(*args, **kwargs)


def _lower_for_a_mesh(devices: Sequence[Any], fn: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any], list[str]]:
    """`lower_for` of a jitted function.

    A mesh of a topology stays as it is. One of as many CPUs as the topology has devices is replaced.
    """
    with _lowering_for_tpu():
        lowered = fn.lower(*args, **kwargs)
    lowered = getattr(lowered, "lowered", lowered)  # of Equinox
    lowering = lowered._lowering  # jax shows the devices of a lowered program nowhere else
    found = list(lowering._device_list)
    if len(found) != len(devices) or (found[0].platform == "tpu" and found[0].device_kind != devices[0].device_kind):
        raise NotPlannable(_says_other_devices(found, devices))
    if found[0].platform == "tpu":
        return lowered, found, []
    mesh = _mesh_of(lowering, found)
    placed = list(devices)
    notes = [f"what the program would choose on a TPU: here jax.devices() are {found[0].platform.upper()}s"]
    if mesh is not None and len(devices) > 1:
        placed, note = _placed(devices, mesh)
        notes.append(note)
    lowered = copy.copy(lowered)  # jax has the original in a cache, for calls of the function
    lowered._lowering = copy.copy(lowering)
    lowered._lowering._device_list = type(lowering._device_list)(tuple(placed))
    arguments = {**lowering.compile_args, "intermediate_shardings": [], "context_mesh": None}
    for name in ("in_shardings", "out_shardings"):
        arguments[name] = tuple(_moved(sharding, placed) for sharding in arguments[name])
    lowered._lowering.compile_args = {**arguments, "backend": placed[0].client}
    return lowered, placed, notes


@contextmanager
def _lowering_for_tpu() -> Iterator[None]:
    """`lower` of jitted functions is for TPUs inside, also of those that a library calls in its own `lower`."""
    stage: Any = jax.stages.Traced
    lower = stage.lower

    def for_tpu(traced: Any, **options: Any) -> Any:
        return lower(traced, **{"lowering_platforms": ("tpu",), **options})

    stage.lower = for_tpu
    try:
        yield
    finally:
        stage.lower = lower


def _says_other_devices(found: Sequence[Any], devices: Sequence[Any]) -> str:
    """Why a program for these devices cannot be planned for those of a topology."""
    kind = "CPU" if found[0].platform == "cpu" else found[0].device_kind
    return (
        f"the program is for {len(found)} {kind}, the topology has {len(devices)} devices: make its mesh of "
        f"zero.topology(...), or of jax.devices() in a process with JAX_NUM_CPU_DEVICES={len(devices)}"
    )


def _mesh_of(lowering: Any, devices: list[Any]) -> Any:
    """A mesh of all devices of a program; None if it has none."""
    arguments = lowering.compile_args
    shardings = (*arguments["in_shardings"], *arguments["out_shardings"], *arguments["intermediate_shardings"])
    for mesh in (arguments["context_mesh"], *(getattr(sharding, "mesh", None) for sharding in shardings)):
        if isinstance(mesh, jax.sharding.Mesh) and list(mesh.devices.flat) == devices:
            return mesh
    return None


def _placed(devices: Sequence[Any], mesh: Any) -> tuple[list[Any], str]:
    """The devices of a topology in the places of a mesh of CPUs, and a note that says which order that is."""
    ids = [device.id for device in mesh.devices.flat]
    is_one_slice = len({getattr(device, "slice_index", 0) for device in devices}) == 1
    if ids != sorted(ids) or not is_one_slice:
        return [devices[number] for number in np.argsort(np.argsort(ids))], "the order of devices on a TPU: here jax's"
    made = mesh_utils.create_device_mesh(mesh.devices.shape, devices, allow_split_physical_axes=True)
    return list(made.flat), "the order of devices on a TPU: here that of jax.make_mesh"


def _moved(sharding: Any, devices: Sequence[Any]) -> Any:
    """A sharding over other devices."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = sharding.mesh
        moved = jax.sharding.Mesh(np.reshape(devices, mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)
        return jax.sharding.NamedSharding(moved, sharding.spec, memory_kind=sharding.memory_kind)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return jax.sharding.SingleDeviceSharding(devices[0], memory_kind=sharding.memory_kind)
    return sharding


def argument_names(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Names of the arrays among the arguments of a pmapped function, in the order in which jax counts them.

    A compiled program names those of other functions itself.

    >>> argument_names(jax.pmap(lambda x, y: x), (1.0, {"w": 2.0}), {})
    ['argument 0', "argument 1['w']"]
    """
    made = arguments_of_pmap(fn)
    if made is None:
        return []
    static = made.static_argnums
    named = [(str(number), argument) for number, argument in enumerate(args) if number not in static]
    named += sorted(kwargs.items())
    return [
        f"argument {name}{jax.tree_util.keystr(path)}"
        for name, argument in named
        for path, _ in jax.tree_util.tree_leaves_with_path(argument)
    ]


def _shape(leaf: Any) -> Any:
    """A leaf as its shape and dtype; what is not an array stays as it is."""
    if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _sharded_shape(leaf: Any) -> Any:
    """`_shape` with the sharding of an array that lies on several devices."""
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return _shape(leaf)


def _check_axes(in_axes: Any, static: Sequence[int], args: Any, kwargs: Any, devices: int) -> None:
    """Raises NotPlannable if an argument's mapped axis does not have an element per device."""
    dynamic = {number: argument for number, argument in enumerate(args) if number not in static}
    each = in_axes if isinstance(in_axes, tuple | list) else [in_axes] * len(args)
    named = [(f"argument {number}", argument, each[number]) for number, argument in dynamic.items()]
    named += [(f"argument {name}", argument, 0) for name, argument in kwargs.items()]
    for name, argument, axes in named:
        if not isinstance(axes, int):  # None: not mapped; a tree of axes is left to jax
            continue
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            shape = getattr(leaf, "shape", ())
            if len(shape) <= axes or shape[axes] != devices:
                where = f"{name}{jax.tree_util.keystr(path)}"
                raise NotPlannable(
                    f"{where} has the shape {tuple(shape)}: expected {devices} in dimension {axes}, one for each "
                    "device of the topology"
                )
