"""Odds ratio preference optimization: the likelihood of chosen answers, and their odds relative to rejected ones.

Source: Hong et al., arXiv 2403.07691, equations 2, 6 and 7; metrics have the names of TRL's ORPOTrainer. There is no
reference. As in the paper, the likelihood is a mean over the tokens of each answer; TRL's is one over all tokens of a
batch, prompts included.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from zero.base.keys import key, named, positive
from zero.training.objectives.objective import Mean, Objective, ObjectiveKeys
from zero.training.objectives.pairs import metrics_of_pairs, values_of_pairs
from zero.training.objectives.whole_texts import Texts, whole_texts

METRICS = (
    *metrics_of_pairs("`objective.beta` times the log-probability per token of", "log-probability per token of"),
    Mean("nll_loss", "negative log-likelihood per token of the chosen text, nats", "Log-probabilities", "nats"),
    Mean("log_odds_chosen", "log-odds of the chosen text minus the log-odds of the rejected one", "Log-odds"),
    Mean("log_odds_ratio", "their log-sigmoid", "Log-odds"),
)


@dataclass(frozen=True)
class Orpo(ObjectiveKeys):
    """Odds ratio preference optimization on pairs from zero-prepare --preferences (arXiv 2403.07691).

    It needs no reference, and learns chosen texts as well. docs/how-to/learn-preferences.md
    """

    name: str = named("orpo")
    beta: float = key(0.1, positive(), "Weight of the odds ratio, relative to the likelihood of chosen texts.")

    def objective(self) -> Objective:
        return whole_texts(self.losses, METRICS)

    def losses(self, texts: Texts) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of each pair `(P,)` and its metrics."""
        logps_P2 = texts.values / texts.lengths
        chosen, rejected = log_odds(logps_P2).T
        ratios = jax.nn.log_sigmoid(chosen - rejected)
        of_pairs = {"nll_loss": -logps_P2[:, 0], "log_odds_chosen": chosen - rejected, "log_odds_ratio": ratios}
        metrics = values_of_pairs(self.beta * logps_P2, logps_P2) | of_pairs
        return of_pairs["nll_loss"] - self.beta * ratios, metrics


def log_odds(logps: jax.Array) -> jax.Array:
    """log(p / (1 - p)) from log p, which is below 0 except for rounding.

    >>> [round(x, 4) for x in log_odds(jnp.log(jnp.asarray([0.5, 0.9]))).tolist()]
    [0.0, 2.1972]
    """
    below_zero = jnp.minimum(logps, -jnp.finfo(logps.dtype).eps)
    return logps - jnp.where(below_zero > -0.7, jnp.log(-jnp.expm1(below_zero)), jnp.log1p(-jnp.exp(below_zero)))
