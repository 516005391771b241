"""The operations of a traced program."""

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def equations(program: Jaxpr) -> Iterator[JaxprEqn]:
    """Those of a program and of all that it calls."""
    for equation in program.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
