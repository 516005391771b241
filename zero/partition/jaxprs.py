"""Evaluating a traced function operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

_Operand = TypeVar("_Operand")


def evaluate(
    closed: ClosedJaxpr,
    args: Sequence[_Operand],
    apply: Callable[[JaxprEqn, list[_Operand]], Sequence[_Operand]],
    constant_operand: Callable[[Any], _Operand] = lambda x: x,
) -> list[_Operand]:
    """The results of a traced function.

    Args:
      args: its inputs, arrays or stand-ins for them.
      apply: returns the results of an operation on its operands.
      constant_operand: returns the operand for an array that the function closes over.

    >>> import jax
    >>> closed = jax.make_jaxpr(lambda x: 2 * x + 1)(3.0)
    >>> def apply(eqn, operands):
    ...     print(eqn.primitive, [float(x) for x in operands])
    ...     return bind(eqn, operands)
    >>> float(evaluate(closed, [3.0], apply)[0])
    mul [2.0, 3.0]
    add [6.0, 1.0]
    7.0
    """
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.invars, args, strict=True))
    values.update(zip(jaxpr.constvars, map(constant_operand, closed.consts), strict=True))

    def read(atom: Any) -> _Operand:
        return constant_operand(atom.val) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        results = apply(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def closed_jaxpr(jaxpr: ClosedJaxpr | Jaxpr) -> ClosedJaxpr:
    """A traced function with its constants; an open jaxpr has none."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr
    return ClosedJaxpr(jaxpr, ())


def bind(eqn: JaxprEqn, xs: Sequence[Any]) -> list[Any]:
    """Evaluates an operation unchanged."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    result = eqn.primitive.bind(*functions, *xs, **params)
    return list(result) if eqn.primitive.multiple_results else [result]
