"""Branches, loops, factorizations and functions with a custom derivative."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from zero.partition.collectives.arrays import scatter_sum_array
from zero.partition.collectives.ordering import has_collective, scan_carry
from zero.partition.jaxprs import bind
from zero.partition.rewrite.interpreter import (
    AnySplit,
    Interpreter,
    NotElementwiseError,
    Rule,
    Value,
    arrays,
    leaf_of,
    whole_shape,
)
from zero.partition.rewrite.joined import Joined


def _values(xs: Sequence[Any], splits: Sequence[AnySplit | None]) -> list[Value]:
    return [Value(x, split) for x, split in zip(xs, splits, strict=True)]


def _first_split(splits: Sequence[AnySplit | None]) -> AnySplit | None:
    return next((split for split in splits if split), None)


def _cond(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
    """All branches run on shards; a result is split if it is split in any branch."""
    nested = interpreter.inside(eqn, interpreter.may_communicate)
    index = args[0].x
    operands = args[1:]
    columns = zip(*(nested.splits(branch, operands) for branch in eqn.params["branches"]), strict=True)
    splits = [_first_split(column) for column in columns]

    def on_shards(branch: ClosedJaxpr) -> Callable[..., list[Any]]:
        def run(*xs: Any) -> list[Any]:
            results = nested.run(branch, _values(xs, [arg.split for arg in operands]))
            return [nested.place(value, split, eqn).x for value, split in zip(results, splits, strict=True)]

        return run

    branches = [on_shards(branch) for branch in eqn.params["branches"]]
    return _values(lax.switch(index, branches, *arrays(operands)), splits)


def _scan(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    """An element-wise body runs on slices; a carry is split if any iteration splits it."""
    params = eqn.params
    body = eqn.params["jaxpr"]
    carry_slots = scan_carry(params)
    consts = args[: carry_slots.start]
    carry = args[carry_slots.start : carry_slots.stop]
    xs = args[carry_slots.stop :]
    if any(value.split and value.split.dim == 0 for value in xs):
        return None
    steps = [Value(jax.eval_shape(lambda x: x[0], value.x), _shifted(value.split, -1)) for value in xs]
    carry = _settled(interpreter, eqn, carry, lambda carry: interpreter.splits(body, [*consts, *carry, *steps]))
    x_splits = [value.split for value in steps]
    splits = [value.split for value in carry]
    y_splits = interpreter.splits(body, [*consts, *carry, *steps])[len(carry) :]

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = interpreter.run(body, [*consts, *_values(carry, splits), *_values(xs, x_splits)])
        placed = [interpreter.place(value, split, eqn).x for value, split in zip(results, splits, strict=False)]
        return placed, [value.x for value in results[len(splits) :]]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last_carry, ys = lax.scan(step, [value.x for value in carry], [value.x for value in xs], **options)
    return [*_values(last_carry, splits), *_values(ys, [_shifted(split, 1) for split in y_splits])]


def _while(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
    """An element-wise body runs on slices if the condition does not depend on them."""
    params = eqn.params
    first = params["cond_nconsts"]
    last = params["cond_nconsts"] + params["body_nconsts"]
    cond_consts = args[:first]
    body_consts = args[first:last]
    carry = args[last:]
    carry = _settled(
        interpreter, eqn, carry, lambda carry: interpreter.splits(params["body_jaxpr"], [*body_consts, *carry])
    )
    splits = [value.split for value in carry]

    def condition(carry: Sequence[Any]) -> Any:
        return interpreter.run(params["cond_jaxpr"], [*cond_consts, *_values(carry, splits)])[0].x

    def body(carry: Sequence[Any]) -> list[Any]:
        results = interpreter.run(params["body_jaxpr"], [*body_consts, *_values(carry, splits)])
        return [interpreter.place(value, split, eqn).x for value, split in zip(results, splits, strict=True)]

    interpreter.splits(params["cond_jaxpr"], [*cond_consts, *carry])
    return _values(lax.while_loop(condition, body, [value.x for value in carry]), splits)


def _settled(
    interpreter: Interpreter,
    eqn: JaxprEqn,
    carry: Sequence[Value],
    splits_after: Callable[[Sequence[Value]], list[AnySplit | None]],
) -> list[Value]:
    """The carry of a loop, sliced wherever an iteration returns a slice."""
    while True:
        after = splits_after(carry)[: len(carry)]
        if all(value.split or not split for value, split in zip(carry, after, strict=True)):
            return list(carry)
        carry = [interpreter.place(value, value.split or split, eqn) for value, split in zip(carry, after, strict=True)]


def _shifted(split: AnySplit | None, by: int) -> AnySplit | None:
    if not split:
        return None
    return Value(None, split).moved(split.dim + by)


def _loop(rule: Rule) -> Rule:
    """A loop runs on slices if all of it is element-wise; else, inside `across_shards`, on its owner."""

    def run(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> Sequence[Value] | None:
        args = [Value(arg.x, arg.split) for arg in args]  # a shard computed inside the loop must not be used outside
        try:
            results = rule(interpreter.inside(eqn, may_communicate=False), eqn, args)
        except NotElementwiseError:
            if not interpreter.may_communicate:
                raise
            results = None
        if results is not None:
            return results
        return _own(interpreter, eqn, args)

    return run


def _own(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value] | None:
    """One device computes while the others wait. Results are split like an operand of the same shape, or whole.

    An operation with collectives, or with a result that cannot be sent, runs on all devices.
    """
    avals: list[Any] = [var.aval for var in eqn.outvars]
    if has_collective(eqn) or any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals):
        return None
    full = [interpreter.place(arg, None, eqn).x for arg in args]
    owner = min(range(interpreter.axis.size), key=lambda device: interpreter.owned.get(device, 0))
    interpreter.owned[owner] = interpreter.owned.get(owner, 0) + sum(np.size(x) for x in full)

    def idle(*_: Any) -> list[Any]:
        return [jnp.zeros(aval.shape, aval.dtype) for aval in avals]

    is_owner = lax.axis_index(interpreter.axis.name) == owner
    splits = {arg.shape: arg.split for arg in args if arg.split}
    results = lax.cond(is_owner, lambda *xs: bind(eqn, xs), idle, *full)
    return [_received(interpreter, x, splits.get(x.shape)) for x in results]


def _received(interpreter: Interpreter, full_x: jax.Array, split: AnySplit | None) -> Value:
    """A device's part of the owner's result; on all other devices `full_x` is zero.

    It goes to all copies of the state and is not rounded, however the axis sums gradients over them.
    """
    if isinstance(split, Joined):
        in_chunks = _received(interpreter, split.whole_in_chunks(full_x), split.apart)
        return Value(split.joined(in_chunks.x), split)
    number = full_x.astype(jnp.int32) if full_x.dtype == jnp.bool_ else full_x
    leaf = leaf_of(number, number.shape, split)
    axis = dataclasses.replace(interpreter.axis, sums_copies=True, copies_dtype=None)
    received = scatter_sum_array(number, leaf, axis, reduce_dtype=number.dtype)
    return Value(received.astype(full_x.dtype), split)


def _caller(
    interpreter: Interpreter, eqn: JaxprEqn, splits: Sequence[AnySplit | None], out_splits: list[AnySplit | None]
) -> Callable[..., list[Any]]:
    """The function that an operation calls, on slices; when it runs, `out_splits` becomes the splits of its results."""
    nested = interpreter.inside(eqn, interpreter.may_communicate)

    def call(*xs: Any) -> list[Any]:
        results = nested.run(eqn.params["call_jaxpr"], _values(xs, splits))
        out_splits[:] = [value.split for value in results]
        return [value.x for value in results]

    return call


def _custom_jvp(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
    """Keeps a custom derivative, which is traced on whole arrays too."""
    splits = [arg.split for arg in args]
    out_splits: list[AnySplit | None] = []

    call = jax.custom_jvp(_caller(interpreter, eqn, splits, out_splits))

    @call.defjvp
    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, x in enumerate(primals) if jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)]

        def whole(xs: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
            with_moving = lambda *moved: bind(eqn, _put(xs, moving, moved))  # noqa: E731
            return jax.jvp(with_moving, [xs[i] for i in moving], tangents)[1]

        values = _values(primals, splits)
        moved = [Value(tangents[i], splits[i]) for i in moving]
        derivative = _traced(interpreter, eqn, whole, values, moved)
        primals_out = call(*primals)
        placed = [interpreter.place(v, s, eqn).x for v, s in zip(derivative, out_splits, strict=True)]
        return primals_out, placed

    xs = call(*(arg.x for arg in args))
    return _values(xs, out_splits)


def _custom_vjp(interpreter: Interpreter, eqn: JaxprEqn, args: Sequence[Value]) -> list[Value]:
    """Like `_custom_jvp`, for reverse mode."""
    splits = [arg.split for arg in args]
    out_splits: list[AnySplit | None] = []

    call = jax.custom_vjp(_caller(interpreter, eqn, splits, out_splits))

    def backward(xs: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        moving = [i for i, x in enumerate(xs) if jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)]

        def whole(xs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            with_moving = lambda *moved: bind(eqn, _put(xs, moving, moved))  # noqa: E731
            return jax.vjp(with_moving, *(xs[i] for i in moving))[1](list(cotangents))

        gradients = _traced(interpreter, eqn, whole, _values(xs, splits), _values(cotangents, out_splits))
        placed = [interpreter.place(v, splits[i], eqn).x for i, v in zip(moving, gradients, strict=True)]
        return tuple(_put([None] * len(xs), moving, placed))

    call.defvjp(lambda *xs: (call(*xs), xs), backward)
    xs = call(*(arg.x for arg in args))
    return _values(xs, out_splits)


def _put(xs: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    by_place = dict(zip(places, values, strict=True))
    return [by_place.get(i, x) for i, x in enumerate(xs)]


def _whole_shapes(values: Sequence[Value]) -> list[jax.ShapeDtypeStruct]:
    return [whole_shape(value) for value in values]


def _traced(interpreter: Interpreter, eqn: JaxprEqn, fn: Callable[..., Any], *args: Sequence[Value]) -> list[Value]:
    """`fn(*lists of whole arrays)`, evaluated on slices."""
    closed = jax.make_jaxpr(fn)(*(_whole_shapes(values) for values in args))
    return interpreter.inside(eqn, interpreter.may_communicate).run(closed, list(chain(*args)))


RULES: dict[str, Rule] = {
    "cond": _cond,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "scan": _loop(_scan),
    "while": _loop(_while),
    **dict.fromkeys(("cholesky", "eig", "eigh", "lu", "qr", "schur", "svd", "triangular_solve"), _own),
}
