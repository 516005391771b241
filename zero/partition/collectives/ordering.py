"""Keeps the collectives of a per-device program in the same order on all devices, for XLA's CPU backend.

XLA runs the operations of a CPU program as their inputs become ready. Collectives of one computation wait for each
other, but a loop counts as done when it has *started*, so a later collective that does not use its result runs with the
collectives inside the loop; and a program read from jax's persistent cache has lost the order between loops and
collectives altogether. jax gives all of them one channel, so they share a rendezvous: devices hang, abort, or
exchange the wrong arrays (docs/decisions/virtual-devices.md). The backend drops an `optimization_barrier` before it
orders operations, so dependencies are made by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from zero.partition.collectives.axis import check_untracked
from zero.partition.jaxprs import bind, closed_jaxpr, evaluate
from zero.partition.layout import PyTree

# Prefixes of the operations that all devices must run together.
COLLECTIVES = (
    *("all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "ragged_all_to_all", "reduce_scatter"),
    "unreduced_",
)
INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def in_order(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Makes the collectives after a loop with collectives wait for the loop, in an otherwise unchanged function.

    Apply it to the function given to `jax.pmap`, outside any `jax.grad`. Values are the same, bit for bit. Programs
    without such loops are unchanged.

    >>> n = jax.device_count()
    >>> def step(x):
    ...     total, _ = jax.lax.scan(lambda total, x: (total + jax.lax.psum(x, "batch"), None), 0.0, x)
    ...     return total, jax.lax.pmean(x, "batch")
    >>> total, mean = jax.pmap(in_order(step), axis_name="batch")(jnp.ones((n, 3)))
    >>> total[0].item() == 3 * n, mean[0].tolist()
    (True, [1.0, 1.0, 1.0])
    """

    def ordered(*args: Any, **kwargs: Any) -> PyTree:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
        for array in arrays.values():
            check_untracked(array)

        def flat(arrays: dict[int, jax.Array]) -> PyTree:
            args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
            return fn(*args, **kwargs)

        closed, out = jax.make_jaxpr(flat, return_shape=True)(arrays)
        results = _Runner(closed.jaxpr).run(closed, list(arrays.values()))
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return ordered


class _Runner:
    """Runs the operations of one level: of the program, or of the body of a loop or branch in it."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.is_tied = any(_is_nested(eqn) for eqn in _level(jaxpr))
        self.zero: jax.Array | None = None  # uint32, computed from the results of the last collective

    def run(self, closed: ClosedJaxpr, args: Sequence[Any], carry: Sequence[int] = ()) -> list[Any]:
        if carry:  # an unrolled loop has no loop that waits, only its first collective
            self.zero = _zeros_of([args[index] for index in carry])
        return evaluate(closed, args, self.apply)

    def apply(self, eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        if eqn.primitive.name in INLINED:
            return self.run(closed_jaxpr(eqn.params[INLINED[eqn.primitive.name]]), args)
        if not has_collective(eqn):
            return bind(eqn, args)
        if self.zero is not None:
            args = [_tie(x, self.zero) if index in _waiting(eqn) else x for index, x in enumerate(args)]
        constants: list[Any] = []
        is_remat = eqn.primitive.name in ("remat2", "checkpoint")
        params = {
            name: _map_jaxprs(value, constants, is_remat, _carry(eqn, name)) for name, value in eqn.params.items()
        }
        if constants and not is_remat:
            raise ValueError(
                f"in_order: a jax.jit inside {eqn.primitive.name} uses an array from outside; pass it as an argument"
            )
        results = bind(eqn.replace(params=params), [*args, *constants])
        self.zero = _zeros_of(results) if self.is_tied else None
        return results


def _level(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in INLINED:
            yield from _level(closed_jaxpr(eqn.params[INLINED[eqn.primitive.name]]).jaxpr)
        else:
            yield eqn


def _is_nested(eqn: JaxprEqn) -> bool:
    return not eqn.primitive.name.startswith(COLLECTIVES) and has_collective(eqn)


def has_collective(eqn: JaxprEqn) -> bool:
    """Whether an operation is a collective, or calls one."""
    if eqn.primitive.name.startswith(COLLECTIVES):
        return True
    bodies = jaxprs_in_params(eqn.params)
    return any(map(has_collective, chain.from_iterable(jaxpr.eqns for jaxpr in bodies)))


def _map_jaxprs(value: Any, constants: list[Any], is_remat: bool, carry: Sequence[int]) -> Any:
    """The value with every jaxpr in it ordered; its first collective waits for the inputs `carry`.

    A jaxpr that cannot hold constants (that of `jax.checkpoint`) gets those of inlined functions as further inputs;
    their values are appended to `constants`.
    """
    if isinstance(value, ClosedJaxpr) and not is_remat:  # in jax 0.12 every Jaxpr is a ClosedJaxpr
        return _ordered_jaxpr(value.jaxpr, value.consts, carry)
    if isinstance(value, Jaxpr):
        closed = _ordered_jaxpr(value, (), carry)
        constants += closed.consts
        inputs = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
        info = closed.jaxpr.debug_info.with_unknown_names() if closed.consts else closed.jaxpr.debug_info
        return closed.jaxpr.replace(constvars=[], invars=inputs, debug_info=info)
    if isinstance(value, tuple):
        return tuple(_map_jaxprs(element, constants, is_remat, carry) for element in value)
    return value


def _ordered_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any], carry: Sequence[int]) -> ClosedJaxpr:
    if not any(map(has_collective, jaxpr.eqns)):
        return ClosedJaxpr(jaxpr, consts)
    avals: list[Any] = [var.aval for var in jaxpr.invars]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    run = partial(_Runner(jaxpr).run, ClosedJaxpr(jaxpr, consts))
    return jax.make_jaxpr(lambda *args: run(args, carry))(*shapes)


def _waiting(eqn: JaxprEqn) -> range:
    """Which operands wait: those of a collective, the carry of a loop, the index of a branch."""
    params = eqn.params
    count = len(eqn.invars)
    if eqn.primitive.name == "scan":
        carry = scan_carry(params)
        if carry:
            return carry
        return range(count)
    if eqn.primitive.name == "while":
        return range(params["cond_nconsts"] + params["body_nconsts"], count)
    return range(1) if eqn.primitive.name == "cond" else range(count)


def _carry(eqn: JaxprEqn, name: str) -> Sequence[int]:
    """Which inputs of a loop's body, or of its condition, are the carry; `name` is the parameter that holds it."""
    if eqn.primitive.name == "scan":
        return scan_carry(eqn.params)
    if eqn.primitive.name == "while":
        consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        return range(consts[name == "body_jaxpr"], len(eqn.invars) - consts[name != "body_jaxpr"])
    return ()


def scan_carry(params: dict[str, Any]) -> range:
    """Which operands of a `scan` are its carry: those after the constants and before the scanned arrays."""
    if "num_carry" in params:
        return range(params["num_consts"], params["num_consts"] + params["num_carry"])
    consts, carry, _ = (len(tree) for tree in params["ft_in"].unpack())  # jax 0.12
    return range(consts, consts + carry)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _is_tied(x: Any) -> bool:
    return x.size > 0 and jnp.issubdtype(x.dtype, jnp.number) and not jnp.issubdtype(x.dtype, jnp.complexfloating)


def _zero_of(x: jax.Array) -> jax.Array:
    """A zero that XLA cannot compute before x is available."""
    if not _is_tied(x):
        return jnp.uint32(0)
    first = _bits(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(()))
    return (first >> (8 * x.dtype.itemsize - 1) >> 1).astype(jnp.uint32)


def _zeros_of(arrays: Sequence[Any]) -> jax.Array:
    return sum(map(_zero_of, arrays), jnp.uint32(0))


def _tie(x: Any, zero: jax.Array) -> Any:
    """The same values, after `zero`: it is added to the first number only, which XLA writes in place."""
    x = jnp.asarray(x) if not isinstance(x, jax.Array) else x
    if not _is_tied(x):
        return x
    first = _bits(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim))
    return lax.dynamic_update_slice(
        x, lax.bitcast_convert_type(first + zero.astype(first.dtype), x.dtype), (0,) * x.ndim
    )
