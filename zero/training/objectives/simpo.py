"""Simple preference optimization: the chosen answer becomes more likely per token than the rejected one, by a margin.

Source: Meng et al., arXiv 2405.14734, equation 6; metrics have the names of TRL's CPOTrainer with loss_type="simpo".
There is no reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from zero.base.keys import key, named, positive, zero_or_more
from zero.training.objectives.objective import Objective, ObjectiveKeys
from zero.training.objectives.pairs import metrics_of_pairs, values_of_pairs
from zero.training.objectives.whole_texts import Texts, whole_texts

METRICS = metrics_of_pairs("`objective.beta` times the log-probability per token of", "log-probability per token of")


@dataclass(frozen=True)
class Simpo(ObjectiveKeys):
    """Simple preference optimization on pairs from zero-prepare --preferences (arXiv 2405.14734).

    It needs no reference. docs/how-to/learn-preferences.md
    """

    name: str = named("simpo")
    beta: float = key(2.0, positive(), "Multiplies log-probabilities per token to make rewards.")
    gamma: float = key(0.5, zero_or_more(), "Target margin between the rewards, TRL's simpo_gamma.")

    def objective(self) -> Objective:
        return whole_texts(self.losses, METRICS)

    def losses(self, texts: Texts) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of each pair `(P,)` and its metrics."""
        logps_P2 = texts.values / texts.lengths
        rewards_P2 = self.beta * logps_P2
        chosen, rejected = rewards_P2.T
        return -jax.nn.log_sigmoid(chosen - rejected - self.gamma), values_of_pairs(rewards_P2, logps_P2)
