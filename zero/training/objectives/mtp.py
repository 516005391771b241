"""Multi-token prediction: beside the next token, a further layer of the model predicts the one after it.

As in the source both sums are divided by the number of scored tokens. The token after the next is a target where it is
one for the next position, and the next token does not begin another document.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 24 and 25; `zero.models.mtp` has the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from zero.base.keys import key, named, positive
from zero.models.gpt import Scores
from zero.models.mtp import MTP, MtpInputs
from zero.training.batch import Batch, Rows, document_starts, next_tokens, token_ids
from zero.training.objectives.objective import Mean, Need, Objective, ObjectiveKeys
from zero.training.sharded_gpt import ShardedGPT

METRICS = (
    Mean("next_loss", "negative log-likelihood of the next token, nats per token", "Tokens ahead", "nats per token"),
    Mean(
        "ahead_loss",
        "negative log-likelihood of the token after the next one by the further layer, a sum over tokens divided by "
        "the number of next tokens",
        "Tokens ahead",
        "nats per token",
    ),
)


@dataclass(frozen=True)
class Mtp(ObjectiveKeys):
    """Multi-token prediction by a model with predictor: true (arXiv 2412.19437, section 2.2)."""

    name: str = named("multi_token")
    weight: float = key(
        0.3,
        positive(),
        "Weight of the loss of the token after the next one; the loss of the next one has weight 1.",
    )

    def objective(self) -> Objective:
        needs = (Need(MTP.key, lambda model, batch: mtp_inputs(model, batch.tokens), MTP),)
        return Objective(ShardedGPT.count_scored, partial(_total, weight=self.weight), METRICS, needs=needs)


def mtp_inputs(model: ShardedGPT, tokens: Rows) -> MtpInputs:
    """The next token of each position of whole rows, and its target, which is none where a document begins."""
    read = token_ids(tokens)
    targets = next_tokens(model.targets(tokens))
    if (starts := document_starts(read, model.separators)) is not None:
        is_start = jnp.pad(starts[:, 1:] != starts[:, :-1], ((0, 0), (0, 1)))[:, : targets.shape[1]]
        targets = jnp.where(is_start, -1, targets)
    following = next_tokens(read)[:, : targets.shape[1]]
    return MtpInputs(jnp.maximum(following, 0), targets)


def sum_mtp(model: ShardedGPT, losses: jax.Array, tokens: Rows) -> jax.Array:
    """As `ShardedGPT.sum_scored`, of the tokens after the targets."""
    is_scored = model.own_positions(mtp_inputs(model, tokens).targets_BT) >= 0
    return jnp.sum(model.row_group.zero_if_duplicate(jnp.where(is_scored, losses, 0)))


def _total(model: ShardedGPT, scores: Scores, batch: Batch, *, weight: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    next_loss = model.sum_scored(scores.losses_BT, batch.tokens)
    ahead_loss = sum_mtp(model, scores.extra[MTP.key], batch.tokens)
    return next_loss + weight * ahead_loss, {"next_loss": next_loss, "ahead_loss": ahead_loss}
