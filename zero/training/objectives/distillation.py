"""Offline distillation: the model's next-token distribution approaches a teacher's.

The teacher's K most likely tokens at each position are stored with their log-probabilities. The loss is the forward KL
divergence from the teacher over K + 1 outcomes: these tokens, and any other, which has the remaining probability in
teacher and model. Renormalizing over the K tokens instead would teach the model that nothing else can follow, a bias
that Anshumann et al. examine (Sparse Logit Sampling, arXiv 2503.16870, section 3). By the data processing inequality
the loss is a lower bound of the divergence over all tokens, with equality if K is the size of the vocabulary.

Shapes: R rows of one device, P positions of them on this device, K tokens of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from zero.base.keys import Check, Mistakes, at_least, key, named
from zero.models.gpt import CANDIDATES, Scores
from zero.training.batch import Batch, Entry
from zero.training.objectives.objective import Mean, Need, Objective, ObjectiveKeys
from zero.training.sharded_gpt import ShardedGPT

TOKENS = Entry("teacher/tokens", source="teacher", of="position", dtype="int32")
LOG_PROBABILITIES = Entry("teacher/log_probabilities", source="teacher", of="position")
METRICS = (
    Mean("divergence", "forward divergence from the teacher, nats per token", "Distillation", "nats per token"),
    Mean("likelihood_loss", "negative log-likelihood of the tokens, nats per token", "Distillation", "nats per token"),
)
_LEAST = 1e-6  # the least probability of all other tokens: smaller sums in float32 are rounding errors


@dataclass(frozen=True)
class Distillation(ObjectiveKeys):
    """Distillation from a teacher's most likely tokens, which evaluate.top_tokens stores (arXiv 1503.02531).

    docs/how-to/distill.md
    """

    name: str = named("distillation")
    top_tokens: int = key(
        32,
        at_least(1),
        "How many of the most likely tokens of a position are compared, at most as many as are stored; all other "
        "tokens count as one.",
    )
    weight: float = key(
        1.0,
        Check(lambda value: 0 <= value <= 1, "0 to 1"),
        "Share of the divergence from the teacher in the loss; the rest is the likelihood of the tokens.",
    )

    def start_mistakes(self) -> Mistakes:
        if self.weight == 0:
            yield "objective.weight", "more than 0: nothing else in the loss depends on the teacher"

    def objective(self) -> Objective:
        tokens, log_probabilities = (entry._replace(shape=(self.top_tokens,)) for entry in (TOKENS, LOG_PROBABILITIES))
        total = partial(_total, weight=self.weight)
        needs = (Need(CANDIDATES, lambda model, batch: batch.extra[TOKENS.name]),)
        return Objective(ShardedGPT.count_scored, total, METRICS, (tokens, log_probabilities), needs=needs)


def _total(model: ShardedGPT, scores: Scores, batch: Batch, *, weight: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    teacher_RPK = model.own_positions(batch.extra[LOG_PROBABILITIES.name])
    divergence_RP = divergence(teacher_RPK, scores.extra[CANDIDATES])
    losses_RP = weight * divergence_RP + (1 - weight) * scores.losses_BT
    if scores.penalty_BT is not None:
        losses_RP += weight * scores.penalty_BT
    sums: Callable[[jax.Array], jax.Array] = partial(model.sum_scored, tokens=batch.tokens)
    return sums(losses_RP), {"divergence": sums(divergence_RP), "likelihood_loss": sums(scores.losses_BT)}


def divergence(teacher_RPK: jax.Array, model_RPK: jax.Array) -> jax.Array:
    """The forward divergence `(R, P)` from log-probabilities of the same tokens; all others are one outcome.

    >>> teacher, model = jnp.log(jnp.asarray([[[0.5, 0.25]]])), jnp.log(jnp.asarray([[[0.25, 0.25]]]))
    >>> round(divergence(teacher, model).item(), 4), abs(round(divergence(teacher, teacher).item(), 4))
    (0.1733, 0.0)
    """
    left_RP = _log_of_others(teacher_RPK)
    of_tokens = jnp.sum(jnp.exp(teacher_RPK) * (teacher_RPK - model_RPK), axis=-1)
    return of_tokens + jnp.exp(left_RP) * (left_RP - _log_of_others(model_RPK))


def _log_of_others(logps_RPK: jax.Array) -> jax.Array:
    """The log-probability of all other tokens."""
    return jnp.log(jnp.maximum(1 - jnp.sum(jnp.exp(logps_RPK), axis=-1), _LEAST))
