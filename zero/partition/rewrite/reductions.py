"""Reductions and products: on slices along other dimensions, completed by a collective over the split one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from zero.partition.collectives.arrays import sum_dtype
from zero.partition.collectives.axis import Axis
from zero.partition.jaxprs import bind
from zero.partition.rewrite.interpreter import Interpreter, Rule, Value, arrays, split_alike
from zero.partition.rewrite.shapes import without


def _reduction(identity: Callable[[Any], Any], collective: Callable[[jax.Array, Axis], jax.Array] | None) -> Rule:
    """The rule of a reduction; without a `collective` the parts are gathered and reduced again."""

    def reduce(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
        (value,) = args
        split = without(value, eqn.params["axes"])
        if split:
            return split_alike(bind(eqn, [value.x]), split)
        if not interpreter.may_communicate:
            interpreter.refuse(eqn, "reduces over a dimension that is split")
        (part,) = bind(eqn, [value.filled(interpreter.axis, identity(value.x.dtype))])
        if collective:
            return [Value(collective(part, interpreter.axis), None)]
        groups = interpreter.axis.groups(interpreter.axis.shards)
        parts = lax.all_gather(part, interpreter.axis.name, axis_index_groups=groups)
        return [Value(x, None) for x in bind(eqn.replace(params={**eqn.params, "axes": (0,)}), [parts])]

    return reduce


def _sum(x: jax.Array, axis: Axis) -> jax.Array:
    """The sum over the shards of one copy, the same on all devices."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return lax.psum(x, axis.name, axis_index_groups=axis.groups(axis.shards))
    # Over all replicas, so that all devices round alike; divided first, to avoid overflow.
    total = x.astype(sum_dtype(x.dtype))
    return lax.psum(total if axis.replicas == 1 else total / axis.replicas, axis.name).astype(x.dtype)


def _extreme(collective: Callable[..., jax.Array], x: jax.Array, axis: Axis) -> jax.Array:
    """The extreme over devices, or NaN if any of them has one: XLA's all-reduce by maximum drops NaN on CPU."""
    extreme = collective(x, axis.name)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return extreme
    return jnp.where(lax.psum(jnp.isnan(x).astype(jnp.int32), axis.name) > 0, jnp.asarray(jnp.nan, x.dtype), extreme)


def _lowest(dtype: Any) -> Any:
    if not jnp.issubdtype(dtype, jnp.floating):
        return _iinfo(dtype).min
    return -jnp.inf


def _highest(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else _iinfo(dtype).max


def _iinfo(dtype: Any) -> Any:
    return jnp.iinfo(jnp.uint8) if dtype == jnp.bool_ else jnp.iinfo(dtype)


def _all_bits(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return True
    return ~jnp.zeros((), dtype)


def _free_dims(value: Value, contracted: Sequence[int], batch: Sequence[int]) -> list[int]:
    """The dimensions of an operand that a product keeps, apart from those of the batch."""
    return [dim for dim in range(len(value.shape)) if dim not in (*contracted, *batch)]


def _dot_general(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
    """A contraction over the split dimension is completed by a sum; a batch or free dimension stays split."""
    contracted, batch = eqn.params["dimension_numbers"]
    # The larger of the split operands keeps its split.
    kept = max((i for i in (0, 1) if args[i].split), key=lambda i: math.prod(args[i].shape))
    value = args[kept]
    dim = value.dim

    def together(dims: Any) -> list[Any]:
        placed = interpreter.place(args[1 - kept], value.moved(dims[1 - kept][dims[kept].index(dim)]), eqn)
        return [value, placed] if kept == 0 else [placed, value]

    if dim in contracted[kept]:
        if not interpreter.may_communicate:
            interpreter.refuse(eqn, "sums over a dimension that is split")
        xs = [arg.filled(interpreter.axis, 0) for arg in together(contracted)]
        out: Any = eqn.outvars[0].aval
        part = bind(eqn.replace(params={**eqn.params, "preferred_element_type": sum_dtype(out.dtype)}), xs)[0]
        return [Value(_sum(part, interpreter.axis).astype(out.dtype), None)]
    if dim in batch[kept]:
        split = value.moved(batch[kept].index(dim))
        return split_alike(bind(eqn, arrays(together(batch))), split)
    first_free = _free_dims(args[0], contracted[0], batch[0])
    free = first_free if kept == 0 else _free_dims(args[1], contracted[1], batch[1])
    split = value.moved(len(batch[0]) + kept * len(first_free) + free.index(dim))
    xs = [arg.x if i == kept else interpreter.place(arg, None, eqn).x for i, arg in enumerate(args)]
    return split_alike(bind(eqn, xs), split)


RULES: dict[str, Rule] = {
    "dot_general": _dot_general,
    "reduce_and": _reduction(_all_bits, None),
    "reduce_max": _reduction(_lowest, partial(_extreme, lax.pmax)),
    "reduce_min": _reduction(_highest, partial(_extreme, lax.pmin)),
    "reduce_or": _reduction(lambda dtype: 0, None),
    "reduce_prod": _reduction(lambda dtype: 1, None),
    "reduce_sum": _reduction(lambda dtype: 0, _sum),
    "reduce_xor": _reduction(lambda dtype: 0, None),
}
