"""A reward model: the head's score of the chosen text of a pair becomes higher than the rejected one's.

Source: the Bradley-Terry model of pairs as in Ouyang et al., arXiv 2203.02155, equation 1; metrics have the names of
TRL's RewardTrainer where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from zero.base.keys import Mistakes, key, named, zero_or_more
from zero.models.config import GPTConfig
from zero.training.objectives.objective import Objective, ObjectiveKeys
from zero.training.objectives.pairs import metrics_of_rewards, values_of_rewards
from zero.training.objectives.whole_texts import HEAD, Texts, has_last_token, outputs_of_head, whole_texts

METRICS = metrics_of_rewards("the head's score of")


@dataclass(frozen=True)
class Reward(ObjectiveKeys):
    """A reward model, trained on pairs from zero-prepare --preferences (arXiv 2203.02155).

    It trains a model with model.override.score_outputs=1. docs/how-to/learn-preferences.md
    """

    name: str = named("reward")
    center: float = key(
        0.0,
        zero_or_more(),
        "Weight of the squared sum of a pair's rewards, which keeps them near 0 (arXiv 2312.09244), TRL's "
        "center_rewards_coefficient.",
    )

    def mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        if model_config.score_outputs not in (None, 1):
            yield (
                "objective",
                f"classification, as {model_label} has score_outputs={model_config.score_outputs}, a reward has 1",
            )

    def objective(self) -> Objective:
        return whole_texts(self.losses, METRICS, values=outputs_of_head, needs=(HEAD,), is_scored=has_last_token)

    def losses(self, texts: Texts) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of each pair `(P,)` and its metrics."""
        rewards_P2 = texts.values[..., 0]
        chosen, rejected = rewards_P2.T
        losses = -jax.nn.log_sigmoid(chosen - rejected) + self.center * (chosen + rejected) ** 2
        return losses, values_of_rewards(rewards_P2)
