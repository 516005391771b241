"""Operations that move dimensions, or work along dimensions that are not split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from zero.partition.collectives.arrays import fill_padding
from zero.partition.jaxprs import bind
from zero.partition.layout import Split
from zero.partition.rewrite.interpreter import Interpreter, Rule, Value, arrays, largest_split, split_alike
from zero.partition.rewrite.joined import Joined, joined_dim


def _with_params(eqn: JaxprEqn, **params: Any) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, **params})


def _replaced(sizes: Sequence[Any], dim: int, size: Any) -> tuple[Any, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _along_others(name: str) -> Rule:
    """An operation along the dimensions in parameter `name`, which keeps the sizes of the others."""

    def rule(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
        dims = eqn.params[name]
        split = largest_split(args)
        if split.dim in (dims if isinstance(dims, tuple) else (dims,)):
            return None
        return split_alike(bind(eqn, interpreter.placed(args, split, eqn)), split)

    return rule


def _on_slice(split_of: Callable[[Value, JaxprEqn], Split | None]) -> Rule:
    """The operation on the slice of its first operand; `split_of` is the split of the result, None for no rule."""

    def rule(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
        split = split_of(args[0], eqn)
        if split is None:
            return None
        return split_alike(bind(eqn, arrays(args)), split)

    return rule


def _stack(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
    split = largest_split(args)
    moved = dataclasses.replace(split, dim=split.dim + (eqn.params["axis"] <= split.dim))
    return split_alike(bind(eqn, interpreter.placed(args, split, eqn)), moved)


def _each(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
    """For operations that return their operands."""
    results = bind(eqn, arrays(args))
    return [Value(x, arg.split) for x, arg in zip(results, args, strict=True)]


def _broadcast_in_dim(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
    (value,) = args
    assert value.split
    dims = eqn.params["broadcast_dimensions"]
    split = value.moved(dims[value.split.dim])
    shape = _replaced(eqn.params["shape"], split.dim, split.shard_size)
    return [Value(lax.broadcast_in_dim(value.x, shape, dims), split)]


def _reshape(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    """On slices, if the split dimension is also one of the new shape, is joined with the one before, or was joined."""
    (value,) = args
    sizes = eqn.params["new_sizes"]
    split = value.split
    assert split
    if eqn.params["dimensions"] is not None:
        return None
    if interpreter.may_communicate:
        dim = joined_dim(value.shape, split, sizes)
        if dim is not None:
            joined = Joined.of(split, value.shape[split.dim - 1], dim)
            return [Value(lax.reshape(value.x, _replaced(sizes, dim, joined.shard_size)), joined)]
        if isinstance(split, Joined) and sizes == _in_chunks(value.shape, split):
            return [Value(split.in_chunks(value.x), split.apart)]
    before = math.prod(value.shape[: split.dim])
    for dim, size in enumerate(sizes):
        if size == split.size and math.prod(sizes[:dim]) == before:
            return [Value(lax.reshape(value.x, _replaced(sizes, dim, split.shard_size)), value.moved(dim))]
    return None


def _in_chunks(shape: Sequence[int], split: Joined) -> tuple[int, ...]:
    """The whole shape with dimensions of chunks and of rows; none if rows of the last chunk are padding."""
    if split.size < split.chunks * split.rows:
        return ()
    return (*shape[: split.dim], split.chunks, split.rows, *shape[split.dim + 1 :])


def without(value: Value, dims: Sequence[int]) -> Split:
    """The split of the value when other dimensions are removed."""
    assert value.dim not in dims
    return value.moved(value.dim - sum(dim < value.dim for dim in dims))


def _bitcast(value: Value, eqn: JaxprEqn) -> Split | None:
    """A change of the element size appends a dimension or removes the last one."""
    out: Any = eqn.outvars[0].aval
    return value.split if value.dim < len(out.shape) else None


def _reduced(value: Value, eqn: JaxprEqn) -> Split | None:
    if value.dim in eqn.params["axes"]:
        return None
    return without(value, eqn.params["axes"])


def _slice(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    (value,) = args
    split = value.split
    params = eqn.params
    assert split
    stride = params["strides"][split.dim] if params["strides"] else 1
    if isinstance(split, Joined) and (params["start_indices"][split.dim], stride) == (0, 1):
        split = dataclasses.replace(split, size=params["limit_indices"][split.dim])  # the rest becomes padding
    elif (params["start_indices"][split.dim], params["limit_indices"][split.dim], stride) != (0, split.size, 1):
        return None
    limits = _replaced(params["limit_indices"], split.dim, split.shard_size)
    return split_alike(bind(_with_params(eqn, limit_indices=limits), [value.x]), split)


def _pad(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    """On slices along other dimensions; along joined ones by as much as their padding has room for."""
    value, fill = args
    split = value.split
    config = eqn.params["padding_config"]
    if split is None or fill.split:
        return None
    low, high, interior = config[split.dim]
    if (low, high, interior) != (0, 0, 0):
        if not isinstance(split, Joined) or low or interior or not 0 < high <= split.chunks * split.rows - split.size:
            return None
        filled = fill_padding(value.x, value.leaf, interpreter.axis, fill.x)
        value = Value(filled, dataclasses.replace(split, size=split.size + high))
        config = _replaced(config, split.dim, (0, 0, 0))
    return split_alike(bind(_with_params(eqn, padding_config=config), [value.x, fill.x]), value.split)


def _dynamic_slice(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    value, *starts = args
    split = value.split
    sizes = eqn.params["slice_sizes"]
    assert split
    if sizes[split.dim] != split.size:
        return None
    sizes = _replaced(sizes, split.dim, split.shard_size)
    operands = [value.x, *_all(starts, split.dim)]
    return split_alike(bind(_with_params(eqn, slice_sizes=sizes), operands), split)


def _dynamic_update_slice(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    value, update, *starts = args
    split = value.split or update.split
    assert split
    if value.shape[split.dim] != update.shape[split.dim]:
        return None
    placed = interpreter.placed([value, update], split, eqn)
    return split_alike(bind(eqn, [*placed, *_all(starts, split.dim)]), split)


def _all(starts: Sequence[Value], dim: int) -> list[Any]:
    """The starts of a slice that takes the whole of one dimension: 0 there, because jax would clamp any other start."""
    return [jnp.zeros_like(start.x) if i == dim else start.x for i, start in enumerate(starts)]


RULES: dict[str, Callable[..., Sequence[Value] | None]] = {
    "argmax": _on_slice(_reduced),
    "argmin": _on_slice(_reduced),
    "bitcast_convert_type": _on_slice(_bitcast),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _along_others("dimension"),
    "cumlogsumexp": _along_others("axis"),
    "cummax": _along_others("axis"),
    "cummin": _along_others("axis"),
    "cumprod": _along_others("axis"),
    "cumsum": _along_others("axis"),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "optimization_barrier": _each,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _along_others("dimensions"),
    "slice": _slice,
    "sort": _along_others("dimension"),
    "split": _along_others("axis"),
    "squeeze": _on_slice(lambda value, eqn: without(value, eqn.params["dimensions"])),
    "stack": _stack,
    "tile": _on_slice(lambda value, eqn: value.split if eqn.params["reps"][value.dim] == 1 else None),
    "top_k": _along_others("axis"),
    "transpose": _on_slice(lambda value, eqn: value.moved(eqn.params["permutation"].index(value.dim))),
}
