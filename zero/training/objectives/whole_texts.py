"""Objectives whose terms are examples of one or more whole texts, from the log-probabilities of these texts.

Shapes: R rows of one device, the k texts of an example in turn; E = R / k examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zero.corpus.format.example import PAIR, Example
from zero.models.gpt import Scores
from zero.training.batch import Batch, Entry, Rows, next_tokens
from zero.training.objectives.objective import Mean, Objective
from zero.training.sharded_gpt import ShardedGPT


class Texts(NamedTuple):
    """The examples of one device.

    Attributes:
      logps: `(E, k)`, the log-probability in nats of the scored tokens of each text.
      lengths: float32 `(E, k)`, the number of these tokens, at least 1.
      extra: what the objective reads, `(E, k)` of rows and `(E,)` of examples.
      mean: of values `(E,)` that are constants to the gradient, over the examples of all devices in a micro-batch.
    """

    logps: jax.Array
    lengths: jax.Array
    extra: Mapping[str, jax.Array]
    mean: Callable[[jax.Array], jax.Array]


Loss = Callable[[Texts], tuple[jax.Array, dict[str, jax.Array]]]


def whole_texts(
    loss: Loss, metrics: tuple[Mean, ...], reads: tuple[Entry, ...] = (), example: Example = PAIR
) -> Objective:
    """An objective whose terms are examples.

    Args:
      loss: from the texts of some examples to their losses `(E,)` and to the values `(E,)` of each metric, by name. It
        depends on each example alone, except for `Texts.mean`.
    """
    total = partial(_total, loss=loss, reads=reads, example=example)
    return Objective(partial(_count, example=example), total, metrics, reads, example)


def _is_read(tokens_RT: Rows, example: Example) -> jax.Array:
    """Whether all texts of an example have scored tokens, `(E,)`: a row that could not be read has none."""
    return jnp.all(jnp.any(next_tokens(tokens_RT) >= 0, axis=1).reshape(-1, example.texts), axis=1)


def _count(model: ShardedGPT, tokens_RT: Rows, *, example: Example) -> jax.Array:
    return jnp.sum(_is_read(tokens_RT, example) & model.is_first_of_group())


def _total(
    model: ShardedGPT, scores: Scores, batch: Batch, *, loss: Loss, reads: tuple[Entry, ...], example: Example
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss is not a sum over tokens, and a device of a group has only some of the tokens of its rows.

    So the loss and its slope by the log-probability of each row are computed from sums over the group, and each device
    multiplies the slope by its own part.
    """
    own_R = -model.sum_rows(scores.losses_BT, batch.tokens)
    is_read_E = _is_read(batch.tokens, example)
    is_first = model.is_first_of_group()
    lengths_R = jnp.maximum(jnp.sum(next_tokens(batch.tokens) >= 0, axis=1), 1).astype(jnp.float32)
    shapes = {"row": (-1, example.texts), "example": (-1,)}
    extra = {entry.name: jnp.reshape(batch.extra[entry.name], shapes[entry.of]) for entry in reads}

    def mean(x_E: jax.Array) -> jax.Array:
        is_own = is_read_E & is_first
        sums = jnp.sum(jnp.where(is_own, lax.stop_gradient(x_E), 0)), jnp.sum(is_own)
        total, count = lax.psum(sums, model.axis.name)
        return total / jnp.maximum(count, 1)

    def of_rows(logps_R: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        of_shape = (-1, example.texts)
        texts = Texts(logps_R.reshape(of_shape), lengths_R.reshape(of_shape), extra, mean)
        total, sums = jax.tree.map(lambda x_E: jnp.sum(jnp.where(is_read_E, x_E, 0)), loss(texts))
        return total, sums

    (total, sums), slope_R = jax.value_and_grad(of_rows, has_aux=True)(model.sum_over_group(lax.stop_gradient(own_R)))
    once = jax.tree.map(lambda x: jnp.where(is_first, x, 0), (total, sums))
    return once[0] + jnp.sum(slope_R * (own_R - lax.stop_gradient(own_R))), once[1]
