"""Direct preference optimization: of two texts the chosen one becomes more likely than the rejected one.

The loss of a pair is -log sigmoid(h), where h is beta times the difference of the log-ratios of both texts to a
reference model (Rafailov et al., arXiv 2305.18290, equation 7). Metrics have the names of TRL's DPOTrainer.

Shapes: R rows of one device, chosen and rejected texts in turn; P = R / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero.config.constraints import one_of, positive
from zero.config.keys import Check, key, named
from zero.corpus.format.example import PAIR
from zero.partition.layout import PyTree
from zero.training.batch import Batch, Rows, next_tokens
from zero.training.objective import REFERENCE, Keys, Mean, Objective
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import neutral_shards

METRICS = (
    Mean("rewards/chosen", "`objective.beta` times the log-ratio of the chosen text to the reference", "Rewards"),
    Mean("rewards/rejected", "the same of the rejected text", "Rewards"),
    Mean("rewards/accuracies", "share of the pairs whose chosen text has the higher reward", "Accuracy", "share"),
    Mean("rewards/margins", "reward of the chosen text less that of the rejected one", "Rewards"),
    Mean("logps/chosen", "log-probability of the chosen text, nats", "Log-probabilities", "nats"),
    Mean("logps/rejected", "log-probability of the rejected text, nats", "Log-probabilities", "nats"),
)


def _conservative(margins: jax.Array, flipped: float) -> jax.Array:
    """The expected loss where this share of the preferences is wrong (arXiv 2403.00409, equation 8)."""
    return -(1 - flipped) * jax.nn.log_sigmoid(margins) - flipped * jax.nn.log_sigmoid(-margins)


def _robust(margins: jax.Array, flipped: float) -> jax.Array:
    """What the loss would be without the wrong preferences, in the mean (Chowdhury et al., arXiv 2403.00409, eq. 9)."""
    of_wrong = flipped * jax.nn.log_sigmoid(-margins)
    return (of_wrong - (1 - flipped) * jax.nn.log_sigmoid(margins)) / (1 - 2 * flipped)


# From the margins of rewards (P,) and the share of preferences that are wrong, below 0.5, to the losses (P,). In TRL
# these are "robust", and "aot" with batches of one pair; where no preference is wrong both are "sigmoid".
LOSSES: Mapping[str, Callable[[jax.Array, float], jax.Array]] = MappingProxyType(
    {"conservative": _conservative, "robust": _robust}
)

_CERTAIN = partial(_conservative, flipped=0.0)


@dataclass
class Dpo(Keys):
    """Direct preference optimization of pairs of zero-prepare --preferences (arXiv 2305.18290).

    The chosen text of a pair becomes more likely than the rejected one, compared with the model at model.model_path.
    training.batch_size and all rows count pairs. docs/how-to/learn-preferences.md
    """

    name: str = named("dpo")
    beta: float = key(0.1, positive(), "Inverse temperature: the larger, the closer the model stays to the reference.")
    label_smoothing: float = key(
        0.0,
        Check(lambda value: 0 <= value < 0.5, "at least 0, less than 0.5"),
        "The share of the pairs whose preference is wrong, as TRL's label_smoothing.",
    )
    smoothing: str = key(
        "conservative",
        one_of(*LOSSES),
        "What follows from it: conservative, the expected loss; or robust (arXiv 2403.00409), TRL's loss_type=robust.",
    )

    def make(self) -> Objective:
        return dpo(self.beta, self.label_smoothing, self.smoothing)


def dpo(beta: float, label_smoothing: float = 0.0, smoothing: str = "conservative") -> Objective:
    """The objective.

    Args:
      beta: the inverse temperature of the implicit rewards.
      label_smoothing: the share of the preferences that are wrong.
      smoothing: what follows from it, an entry of `LOSSES`.
    """

    def loss(margins: jax.Array) -> jax.Array:
        return LOSSES[smoothing](margins, label_smoothing)

    return Objective(_count, partial(_total, beta=beta, loss=loss), METRICS, (REFERENCE,), PAIR)


def pair_losses(
    logps_P2: jax.Array,
    reference_P2: jax.Array,
    beta: float,
    loss: Callable[[jax.Array], jax.Array] = _CERTAIN,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of each pair `(P,)` and its metrics, from log-probabilities of the chosen and the rejected text.

    >>> losses, metrics = pair_losses(jnp.asarray([[-5.0, -9.0]]), jnp.asarray([[-6.0, -8.0]]), beta=0.5)
    >>> round(losses[0].item(), 4), metrics["rewards/margins"].tolist(), metrics["rewards/accuracies"].tolist()
    (0.3133, [1.0], [1.0])
    """
    rewards_P2 = beta * (logps_P2 - reference_P2)
    chosen, rejected = rewards_P2.T
    values = (chosen, rejected, (chosen > rejected).astype(jnp.float32), chosen - rejected, *logps_P2.T)
    names = [metric.name for metric in METRICS]
    return loss(chosen - rejected), dict(zip(names, values, strict=True))


def _is_pair(tokens_RT: Rows) -> jax.Array:
    """Whether both texts of a pair have scored tokens, `(P,)`: a row that could not be read has none."""
    return jnp.all(jnp.any(next_tokens(tokens_RT) >= 0, axis=1).reshape(-1, 2), axis=1)


def _count(model: ShardedGPT, tokens_RT: Rows) -> jax.Array:
    return jnp.sum(_is_pair(tokens_RT) & model.is_first_of_group())


def _total(
    model: ShardedGPT, losses: jax.Array, batch: Batch, *, beta: float, loss: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A pair's loss is no sum over tokens, and a device of a group has only some of the tokens of its rows.

    So the loss and its slope by the log-probability of each row are computed from sums over the group, and each device
    multiplies the slope by its own part.
    """
    reference_P2 = jnp.reshape(batch.extra[REFERENCE.name], (-1, 2))
    own_R = -model.sum_rows(losses, batch.tokens)
    is_pair_P = _is_pair(batch.tokens)
    is_first = model.is_first_of_group()

    def of_rows(logps_R: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        of_pairs = pair_losses(logps_R.reshape(-1, 2), reference_P2, beta, loss)
        total, sums = jax.tree.map(lambda x_P: jnp.sum(jnp.where(is_pair_P, x_P, 0)), of_pairs)
        return total, sums

    (total, sums), slope_R = jax.value_and_grad(of_rows, has_aux=True)(model.sum_over_group(lax.stop_gradient(own_R)))
    once = jax.tree.map(lambda x: jnp.where(is_first, x, 0), (total, sums))
    return once[0] + jnp.sum(slope_R * (own_R - lax.stop_gradient(own_R))), once[1]


def reference_step(weights: PyTree, tokens: jax.Array, *, model: ShardedGPT, micro_batches: int = 1) -> jax.Array:
    """The log-probability in nats of the scored tokens of each row, by a reference model.

    Per device: int32 tokens `(R, T)` as in `Batch`; float32 `(R,)` out, the same on all devices of a group. The
    reference of adapters is the model without them, and `weights` are its frozen parameters, as they are held;
    otherwise it is the model with these weights. Call inside pmap.

    Args:
      micro_batches: parts that the rows are split into, one forward pass each; divides R.
    """
    if model.tuning is not None:  # x W + s (x A) B with zeros for A and B
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.layout.shard_shapes())
        layouts: Any = {"layout": model.base.layout, "held": model.frozen_layout, "low": model.layout}
        adapters = neutral_shards(weights, zeros, **layouts, axis=model.axis, tuning=model.tuning)
        weights = model.weights(adapters, {}, weights)
    variables = model.gather_params(weights)

    def of_rows(rows: jax.Array) -> jax.Array:
        losses = model.scores(variables, rows, None).losses_BT
        return model.sum_over_group(-model.sum_rows(losses, rows))

    return lax.map(of_rows, tokens.reshape(micro_batches, -1, tokens.shape[-1])).reshape(-1)
