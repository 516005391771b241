"""Kahneman-Tversky optimization: desirable answers become more likely, undesirable ones less, without pairs.

Source: Ethayarajh et al., arXiv 2402.01306, equation 8; metrics have the names of TRL's KTOTrainer. An example has two
texts: the prompt with its answer, and with the answer of another prompt. The mean log-ratio of the second texts to the
reference, at least 0, estimates the KL divergence from it, and rewards are compared with this estimate. It is averaged
over the examples of all devices in a micro-batch, as TRL gathers it over processes, and has no gradient. Examples
beside which there was no other prompt are left out of the estimate.

Shapes: E examples of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from zero.base.keys import Mistakes, key, named, positive, zero_or_more
from zero.corpus.format.example import LABELLED
from zero.training.batch import Entry
from zero.training.objectives.objective import REFERENCE, Mean, Objective, ObjectiveKeys
from zero.training.objectives.whole_texts import Texts, whole_texts

LABEL = Entry("label", of="example", dtype="int32")
_REWARD = "`objective.beta` times the log-ratio to the reference of"
METRICS = (
    Mean("kl", "estimate of the divergence from the reference, nats", "Divergence from the reference", "nats"),
    Mean("share/chosen", "share of the examples with a desirable answer", "Desirable examples", "share"),
    Mean("share/rejected", "share of the others", "Desirable examples", "share"),
    Mean("rewards/chosen", f"{_REWARD} desirable answers", "Rewards", over="share/chosen"),
    Mean("rewards/rejected", f"{_REWARD} undesirable ones", "Rewards", over="share/rejected"),
    Mean("logps/chosen", "log-probability of desirable answers, nats", "Log-probabilities", "nats", "share/chosen"),
    Mean("logps/rejected", "log-probability of undesirable ones, nats", "Log-probabilities", "nats", "share/rejected"),
)


@dataclass(frozen=True)
class Kto(ObjectiveKeys):
    """Kahneman-Tversky optimization on labeled answers from zero-prepare --labels (arXiv 2402.01306).

    Answers are compared with the model at model.model_path. docs/how-to/learn-preferences.md
    """

    name: str = named("kto")
    beta: float = key(0.1, positive(), "Inverse temperature: a larger value keeps the model closer to the reference.")
    desirable_weight: float = key(1.0, zero_or_more(), "Weight of the losses of desirable answers.")
    undesirable_weight: float = key(1.0, zero_or_more(), "Weight of the losses of undesirable answers.")

    def start_mistakes(self) -> Mistakes:
        if self.desirable_weight == self.undesirable_weight == 0:
            yield "objective.desirable_weight", "more than 0, or objective.undesirable_weight: no answer has a loss"

    def objective(self) -> Objective:
        return whole_texts(self.losses, METRICS, (REFERENCE, LABEL), LABELLED)

    def losses(self, texts: Texts) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of each example `(E,)` and its metrics."""
        ratios, mismatched = (texts.values - texts.extra[REFERENCE.name]).T
        divergence = jnp.maximum(texts.mean(mismatched, texts.is_scored[:, 1]), 0)
        is_desirable = texts.extra[LABEL.name] > 0
        sign = jnp.where(is_desirable, 1, -1)
        weight = jnp.where(is_desirable, self.desirable_weight, self.undesirable_weight)
        losses = weight * (1 - jax.nn.sigmoid(self.beta * sign * (ratios - divergence)))
        metrics = {"kl": jnp.full_like(ratios, divergence)}
        for name, share in (("chosen", is_desirable), ("rejected", ~is_desirable)):
            metrics[f"share/{name}"] = share.astype(jnp.float32)
            metrics[f"rewards/{name}"] = jnp.where(share, self.beta * ratios, 0)
            metrics[f"logps/{name}"] = jnp.where(share, texts.values[:, 0], 0)
        return losses, metrics
