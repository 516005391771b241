"""Operations that move dimensions, or work along dimensions that are not split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from zero.partition.jaxprs import bind
from zero.partition.layout import Split
from zero.partition.rewrite.interpreter import (
    AnySplit,
    Interpreter,
    Rule,
    Value,
    arrays,
    largest_split,
    replaced,
    split_alike,
)
from zero.partition.rewrite.joined import Joined, joined_dim


def _with_params(eqn: JaxprEqn, **params: Any) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, **params})


def _along_others(name: str) -> Rule:
    """An operation along the dimensions in parameter `name`, which keeps the sizes of the others."""

    def rule(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
        dims = eqn.params[name]
        split = largest_split(args)
        if split.dim in (dims if isinstance(dims, tuple) else (dims,)):
            return None
        return split_alike(bind(eqn, interpreter.placed(args, split, eqn)), split)

    return rule


def _on_slice(split_of: Callable[[Value, JaxprEqn], AnySplit | None]) -> Rule:
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


def _broadcast_in_dim(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    (value,) = args
    dims = eqn.params["broadcast_dimensions"]
    dim = dims[value.dim]
    if value.size != eqn.params["shape"][dim]:
        return None
    shape = replaced(eqn.params["shape"], dim, value.shard_size)
    return [Value(lax.broadcast_in_dim(value.x, shape, dims), value.moved(dim))]


def _reshape(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    """On slices, if the split dimension is also one of the new shape, is joined with the one before, or was joined."""
    (value,) = args
    sizes = eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None:
        return None
    before = math.prod(value.shape[: value.dim])
    for dim, size in enumerate(sizes):
        if size == value.size and math.prod(sizes[:dim]) == before:
            return [Value(lax.reshape(value.x, replaced(sizes, dim, value.shard_size)), value.moved(dim))]
    match value.split:
        case Split() as split if interpreter.may_communicate:
            joined_at = joined_dim(value.shape, split, sizes)
            if joined_at is not None:
                chunks = value.shape[split.dim - 1]
                x = lax.reshape(value.x, replaced(sizes, joined_at, chunks * value.shard_size))
                return [Value(x, Joined.of(split, chunks, joined_at))]
        case Joined() as joined if interpreter.may_communicate and joined.room == 0:
            if sizes == (*value.shape[: value.dim], joined.chunks, joined.rows, *value.shape[value.dim + 1 :]):
                return [Value(joined.in_chunks(value.x), joined.apart)]
    return None


def without(value: Value, dims: Sequence[int]) -> AnySplit | None:
    """The split of the value when these dimensions are removed; None if the split one is among them."""
    if value.dim in dims:
        return None
    return value.moved(value.dim - sum(dim < value.dim for dim in dims))


def _bitcast(value: Value, eqn: JaxprEqn) -> AnySplit | None:
    """A change of the element size appends a dimension or removes the last one."""
    out: Any = eqn.outvars[0].aval
    return value.split if value.dim < len(out.shape) else None


def _slice(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    (value,) = args
    split = value.split
    params = eqn.params
    dim = value.dim
    stride = params["strides"][dim] if params["strides"] else 1
    limit = params["limit_indices"][dim]
    if (params["start_indices"][dim], stride) != (0, 1):
        return None
    if limit != value.size:
        if not isinstance(split, Joined):
            return None
        split = dataclasses.replace(split, count=limit)  # the rest becomes padding
    limits = replaced(params["limit_indices"], dim, value.shard_size)
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
        if not isinstance(split, Joined) or low or interior or not 0 < high <= split.room:
            return None
        filled = value.filled(interpreter.axis, fill.x)
        value = Value(filled, dataclasses.replace(split, count=split.count + high))
        config = replaced(config, split.dim, (0, 0, 0))
    return split_alike(bind(_with_params(eqn, padding_config=config), [value.x, fill.x]), value.split)


def _dynamic_slice(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    value, *starts = args
    sizes = eqn.params["slice_sizes"]
    if value.split is None or sizes[value.dim] != value.size:
        return None
    sizes = replaced(sizes, value.dim, value.shard_size)
    operands = [value.x, *_all(starts, value.dim)]
    return split_alike(bind(_with_params(eqn, slice_sizes=sizes), operands), value.split)


def _dynamic_update_slice(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    value, update, *starts = args
    split = value.split or update.split
    if split is None or value.shape[split.dim] != update.shape[split.dim]:
        return None
    placed = interpreter.placed([value, update], split, eqn)
    return split_alike(bind(eqn, [*placed, *_all(starts, split.dim)]), split)


def _all(starts: Sequence[Value], dim: int) -> list[Any]:
    """The starts of a slice that takes the whole of one dimension: 0 there, because jax would clamp any other start."""
    return [jnp.zeros_like(start.x) if i == dim else start.x for i, start in enumerate(starts)]


RULES: dict[str, Callable[..., Sequence[Value] | None]] = {
    "argmax": _on_slice(lambda value, eqn: without(value, eqn.params["axes"])),
    "argmin": _on_slice(lambda value, eqn: without(value, eqn.params["axes"])),
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
