"""Direct preference optimization: the chosen text of a pair becomes more likely than the rejected one.

A loss is a function of the margin of a pair, beta times the difference of the log-ratios of both texts to a reference
model (Rafailov et al., arXiv 2305.18290, equation 7). Metrics have the names of TRL's DPOTrainer.

Shapes: P pairs of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import jax

from zero.base.keys import Check, key, named, one_of, positive
from zero.training.objectives.objective import REFERENCE, Objective, ObjectiveKeys
from zero.training.objectives.pairs import metrics_of_pairs, values_of_pairs
from zero.training.objectives.whole_texts import Texts, whole_texts

METRICS = metrics_of_pairs("`objective.beta` times the log-ratio to the reference of")


class Loss(NamedTuple):
    """A loss of pairs.

    Attributes:
      of_margins: `(margins (P,), beta)` to losses `(P,)`.
      per_token: whether log-ratios are averaged over the tokens of a text instead of summed.
    """

    of_margins: Callable[[jax.Array, float], jax.Array]
    per_token: bool = False


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "sigmoid": Loss(lambda margins, beta: -jax.nn.log_sigmoid(margins)),
        # Azar et al., arXiv 2310.12036, equation 17.
        "ipo": Loss(lambda margins, beta: ((margins - 0.5) / beta) ** 2, per_token=True),
    }
)


def _conservative(right: jax.Array, wrong: jax.Array, flipped: float) -> jax.Array:
    """The expected loss if this share of the preferences is wrong (arXiv 2403.00409, equation 8)."""
    return (1 - flipped) * right + flipped * wrong


def _robust(right: jax.Array, wrong: jax.Array, flipped: float) -> jax.Array:
    """An unbiased estimate of the loss without the wrong preferences (Chowdhury et al., arXiv 2403.00409, eq. 9)."""
    return ((1 - flipped) * right - flipped * wrong) / (1 - 2 * flipped)


# From the losses (P,) of the margins and of their opposites, and the share of preferences that are wrong, below 0.5.
SMOOTHINGS: Mapping[str, Callable[[jax.Array, jax.Array, float], jax.Array]] = MappingProxyType(
    {"conservative": _conservative, "robust": _robust}
)


@dataclass(frozen=True)
class Dpo(ObjectiveKeys):
    """Direct preference optimization on pairs from zero-prepare --preferences (arXiv 2305.18290).

    The chosen text of a pair becomes more likely than the rejected one, compared with the model at model.model_path.
    training.batch_size and all rows count pairs. docs/how-to/learn-preferences.md
    """

    name: str = named("dpo")
    beta: float = key(0.1, positive(), "Inverse temperature: a larger value keeps the model closer to the reference.")
    loss: str = key(
        "sigmoid",
        one_of(*LOSSES),
        "Loss of a pair's margin: sigmoid, its negative log-sigmoid; or ipo, a square (arXiv 2310.12036), as TRL's "
        "loss_type=ipo.",
    )
    label_smoothing: float = key(
        0.0,
        Check(lambda value: 0 <= value < 0.5, "at least 0, less than 0.5"),
        "Share of the pairs whose preference is assumed to be wrong, as TRL's label_smoothing.",
    )
    smoothing: str = key(
        "conservative",
        one_of(*SMOOTHINGS),
        "How label_smoothing changes the loss: conservative, the expected loss; or robust (arXiv 2403.00409), TRL's "
        "loss_type=robust.",
    )

    def objective(self) -> Objective:
        return whole_texts(self.losses, METRICS, (REFERENCE,))

    def losses(self, texts: Texts) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of each pair `(P,)` and its metrics."""
        loss = LOSSES[self.loss]
        rewards_P2 = self.beta * (texts.values - texts.extra[REFERENCE.name])
        chosen, rejected = (rewards_P2 / texts.lengths if loss.per_token else rewards_P2).T
        margins = chosen - rejected
        right, wrong = (loss.of_margins(x, self.beta) for x in (margins, -margins))
        losses = SMOOTHINGS[self.smoothing](right, wrong, self.label_smoothing)
        return losses, values_of_pairs(rewards_P2, texts.values)
