"""Objectives whose terms are examples of one or more whole texts, from their log-probabilities or a head's scores.

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
from zero.models.score_head import HEAD_OF_SCORES
from zero.training.batch import Batch, Entry, Rows, next_tokens
from zero.training.objectives.objective import Mean, Need, Objective
from zero.training.sharded_gpt import ShardedGPT


class Texts(NamedTuple):
    """The examples of one device.

    Attributes:
      values: of each text what the objective learns from: by default, `(E, k)`, the log-probability in nats of its
        scored tokens; or the outputs of a head, `(E, k, C)`.
      lengths: float32 `(E, k)`, the number of these tokens, at least 1.
      is_scored: `(E, k)`, whether there are any.
      extra: what the objective reads, `(E, k)` of rows and `(E,)` of examples.
      mean: of values `(E,)` that are constants to the gradient, over those examples of all devices in a micro-batch
        for which the second argument `(E,)` is true.
    """

    values: jax.Array
    lengths: jax.Array
    is_scored: jax.Array
    extra: Mapping[str, jax.Array]
    mean: Callable[[jax.Array, jax.Array], jax.Array]


Loss = Callable[[Texts], tuple[jax.Array, dict[str, jax.Array]]]
# From the scores of rows to this device's share of `Texts.values`, `(R, ...)`; the shares of a group add up to them.
Values = Callable[[ShardedGPT, Scores, Batch], jax.Array]
IsScored = Callable[[Rows], jax.Array]  # `(R,)` of the rows of a device


def log_probabilities(model: ShardedGPT, scores: Scores, batch: Batch) -> jax.Array:
    """`(R,)`: of the scored tokens of each text, in nats."""
    return -model.sum_rows(scores.losses_BT, batch.tokens)


def outputs_of_head(model: ShardedGPT, scores: Scores, batch: Batch) -> jax.Array:
    """`(R, C)`: what the head of scores makes of the last token of each text, which is its last scored one."""
    is_scored_RT = jnp.asarray(batch.tokens) >= 0
    is_last_RT = is_scored_RT & (lax.cumsum(is_scored_RT.astype(jnp.int32), axis=1, reverse=True) == 1)
    return model.sum_where(scores.extra[HEAD_OF_SCORES.key], is_last_RT, batch.tokens)


def has_targets(tokens_RT: Rows) -> jax.Array:
    """`(R,)`: whether a text has tokens that are predicted."""
    return jnp.any(next_tokens(tokens_RT) >= 0, axis=1)


def has_last_token(tokens_RT: Rows) -> jax.Array:
    """`(R,)`: whether a text has a token that `outputs_of_head` reads."""
    return jnp.any(jnp.asarray(tokens_RT) >= 0, axis=1)


HEAD = Need(HEAD_OF_SCORES.key, lambda model, batch: (), HEAD_OF_SCORES)  # of an objective with `outputs_of_head`


def whole_texts(
    loss: Loss,
    metrics: tuple[Mean, ...],
    reads: tuple[Entry, ...] = (),
    example: Example = PAIR,
    values: Values = log_probabilities,
    needs: tuple[Need, ...] = (),
    is_scored: IsScored = has_targets,
) -> Objective:
    """An objective whose terms are examples.

    Args:
      loss: from the texts of some examples to their losses `(E,)` and to the values `(E,)` of each metric, by name. It
        depends on each example alone, except for `Texts.mean`.
      values: what the loss reads of each text.
      needs: what `values` read in `Scores.extra`.
      is_scored: whether a text has the tokens that `values` read.
    """
    total = partial(_total, loss=loss, reads=reads, example=example, values=values, is_scored=is_scored)
    return Objective(partial(_count, example=example, is_scored=is_scored), total, metrics, reads, example, needs)


def _is_read(is_scored_Ek: jax.Array, example: Example) -> jax.Array:
    """Whether an example has the texts that it needs, `(E,)`: a row that could not be read has no scored tokens."""
    return jnp.all(is_scored_Ek[:, : example.texts - example.optional], axis=1)


def _count(model: ShardedGPT, tokens_RT: Rows, *, example: Example, is_scored: IsScored) -> jax.Array:
    is_scored_Ek = is_scored(tokens_RT).reshape(-1, example.texts)
    return jnp.sum(_is_read(is_scored_Ek, example) & model.is_first_of_group())


def _total(
    model: ShardedGPT,
    scores: Scores,
    batch: Batch,
    *,
    loss: Loss,
    reads: tuple[Entry, ...],
    example: Example,
    values: Values,
    is_scored: IsScored,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss is not a sum over tokens, and a device of a group has only some of the tokens of its rows.

    So the loss and its slope by the value of each row are computed from sums over the group, and each device multiplies
    the slope by its own part.
    """
    own = values(model, scores, batch)
    is_scored_Ek = is_scored(batch.tokens).reshape(-1, example.texts)
    is_read_E = _is_read(is_scored_Ek, example)
    is_first = model.is_first_of_group()
    lengths_R = jnp.maximum(jnp.sum(next_tokens(batch.tokens) >= 0, axis=1), 1).astype(jnp.float32)
    shapes = {"row": (-1, example.texts), "example": (-1,)}
    extra = {entry.name: jnp.reshape(batch.extra[entry.name], shapes[entry.of]) for entry in reads}

    def mean(x_E: jax.Array, is_counted_E: jax.Array) -> jax.Array:
        is_own = is_read_E & is_counted_E & is_first
        sums = jnp.sum(jnp.where(is_own, lax.stop_gradient(x_E), 0)), jnp.sum(is_own)
        total, count = lax.psum(sums, model.axis.name)
        return total / jnp.maximum(count, 1)

    def of_rows(values_R: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        of_shape = (-1, example.texts)
        texts = Texts(
            values_R.reshape(*of_shape, *values_R.shape[1:]), lengths_R.reshape(of_shape), is_scored_Ek, extra, mean
        )
        total, sums = jax.tree.map(lambda x_E: jnp.sum(jnp.where(is_read_E, x_E, 0)), loss(texts))
        return total, sums

    whole = model.sum_over_group(lax.stop_gradient(own))
    (total, sums), slope = jax.value_and_grad(of_rows, has_aux=True)(whole)
    once = jax.tree.map(lambda x: jnp.where(is_first, x, 0), (total, sums))
    return once[0] + jnp.sum(slope * (own - lax.stop_gradient(own))), once[1]
