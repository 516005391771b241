"""A program's lowering for devices that are not attached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zero.partition.pmapped import arguments_of_pmap


class NotPlannable(ValueError):
    """A program or arguments that cannot be planned for a topology."""


def lower_for(devices: Sequence[Any], fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`fn.lower(...)` of a pmapped function for these devices, or of a jitted one for those of its shardings.

    Args:
      devices: of a pmapped function, in the order of its axis.
      fn: what `jax.pmap` or `jax.jit` returned; any other function is jitted.
      args: arrays, or `jax.ShapeDtypeStruct`; of a pmapped function with an axis of all devices.
      kwargs: likewise.

    Raises:
      TypeError: `fn` cannot be called.
      NotPlannable: a leading axis is not as long as there are devices.
    """
    if not callable(fn):
        raise TypeError(f"expected a function made by jax.pmap or jax.jit, got {type(fn).__name__}")
    args, kwargs = jax.tree.map(_shape, (tuple(args), kwargs))
    made = arguments_of_pmap(fn)
    if made is None:
        return _lower_for_a_mesh(fn if hasattr(fn, "lower") else jax.jit(fn), args, kwargs)
    _check_axes(made.in_axes, made.static_argnums, args, kwargs, len(devices))
    return made.on(devices).lower(*args, **kwargs)


def _lower_for_a_mesh(fn: Any, args: Any, kwargs: Any) -> Any:
    """The lowered program of a jitted function.

    Raises:
      NotPlannable: no sharding has a mesh of TPUs.
    """
    lowered = fn.lower(*args, **kwargs)
    platforms = getattr(lowered._lowering, "_platforms", ("tpu",))  # the least private place in which jax says so
    if "tpu" not in platforms:
        raise NotPlannable(
            f"the program is for {' and '.join(platforms)}: give its arguments shardings of a mesh of "
            "zero.topology(...), or make it with jax.pmap"
        )
    return lowered


def is_pmapped(fn: Any) -> bool:
    """Whether `jax.pmap` made a function."""
    return arguments_of_pmap(fn) is not None


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
    """A leaf as its shape and dtype; a `jax.ShapeDtypeStruct` keeps its sharding."""
    if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


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
