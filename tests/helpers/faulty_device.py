"""A device that errs in the backward pass, by 2^-20 of a gradient; its losses are right."""

import jax
import jax.numpy as jnp
from jax import lax

from zero.models.experts import ResidualStream
from zero.models.gpt import GPT, Scores


def install(place: int) -> None:
    """Makes programs that are traced from now on err on the device at this place of the pmap axis "zero"."""

    @jax.custom_vjp
    def passed(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, grads: jax.Array) -> tuple[jax.Array]:
        return (jnp.where(lax.axis_index("zero") == place, grads * (1 + 2.0**-20), grads),)

    passed.defvjp(lambda x: (x, None), backward)
    score = GPT.score

    def score_on(self: GPT, stream: ResidualStream, targets_BT: jax.Array) -> Scores:
        return score(self, (passed(stream[0]), stream[1]), targets_BT)

    setattr(GPT, "score", score_on)  # noqa: B010  mypy refuses an assignment
