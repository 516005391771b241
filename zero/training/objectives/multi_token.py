"""Multi-token prediction: beside the next token, a further layer of the model predicts the one after it.

As in the source both sums are divided by the number of scored tokens. The token after the next is a target where it is
one for the next position, and the next token does not begin another document.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 24 and 25; `zero.models.predictor` has the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from zero.config.constraints import positive
from zero.config.keys import key, named
from zero.models.gpt import Scores
from zero.training.batch import Batch
from zero.training.objectives.objective import Keys, Mean, Objective
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
class MultiToken(Keys):
    """Multi-token prediction by a model with predictor: true (arXiv 2412.19437, section 2.2)."""

    name: str = named("multi_token")
    weight: float = key(0.3, positive(), "Weight of the loss of the token after the next one, beside the next one's 1.")

    def make(self) -> Objective:
        return Objective(ShardedGPT.count_scored, partial(_total, weight=self.weight), METRICS, looks_ahead=True)


def _total(model: ShardedGPT, scores: Scores, batch: Batch, *, weight: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    assert scores.ahead_BT is not None
    next_loss = model.sum_scored(scores.losses_BT, batch.tokens)
    ahead_loss = model.sum_ahead(scores.ahead_BT, batch.tokens)
    return next_loss + weight * ahead_loss, {"next_loss": next_loss, "ahead_loss": ahead_loss}
