"""A device that errs in the backward pass; its losses are right."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from zero.models.experts import ResidualStream
from zero.models.gpt import GPT, Scores

Fault: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]  # of gradients and the targets of the rows


def slightly_off(grads: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """By 2^-20 of each gradient."""
    return grads * (1 + 2.0**-20)


def nan_in_some_steps(grads: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """NaN where the first target of the device's rows is an odd byte."""
    return jnp.where(targets_BT[0, 0] % 2 == 1, jnp.nan, grads)


def install(place: int, fault: Fault = slightly_off) -> None:
    """Makes programs that are traced from now on err on the device at this place of the pmap axis "zero"."""

    @jax.custom_vjp
    def passed(x: jax.Array, targets_BT: jax.Array) -> jax.Array:
        return x

    def backward(targets_BT: jax.Array, grads: jax.Array) -> tuple[jax.Array, None]:
        return jnp.where(lax.axis_index("zero") == place, fault(grads, targets_BT), grads), None

    passed.defvjp(lambda x, targets_BT: (x, targets_BT), backward)
    score = GPT.score

    def score_on(self: GPT, stream: ResidualStream, targets_BT: jax.Array, *more: Any) -> Scores:
        return score(self, (passed(stream[0], targets_BT), stream[1]), targets_BT, *more)

    setattr(GPT, "score", score_on)  # noqa: B010  mypy refuses an assignment
