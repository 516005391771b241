"""The metrics of objectives on pairs, a chosen text and a rejected one, with the names of TRL.

Shapes: P pairs of one device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zero.training.objectives.objective import Mean


def metrics_of_pairs(reward: str, logps: str = "log-probability of") -> tuple[Mean, ...]:
    """The declarations.

    Args:
      reward, logps: what a text's reward and its entry of `logps/...` are, as beginnings of sentences.
    """
    return (
        *metrics_of_rewards(reward),
        Mean("logps/chosen", f"{logps} the chosen text, nats", "Log-probabilities", "nats"),
        Mean("logps/rejected", f"{logps} the rejected text, nats", "Log-probabilities", "nats"),
    )


def metrics_of_rewards(reward: str) -> tuple[Mean, ...]:
    """Those of the rewards alone."""
    return (
        Mean("rewards/chosen", f"{reward} the chosen text", "Rewards"),
        Mean("rewards/rejected", "the same of the rejected text", "Rewards"),
        Mean("rewards/accuracies", "share of the pairs whose chosen text has the higher reward", "Accuracy", "share"),
        Mean("rewards/margins", "reward of the chosen text minus the reward of the rejected one", "Rewards"),
    )


def values_of_pairs(rewards_P2: jax.Array, logps_P2: jax.Array) -> dict[str, jax.Array]:
    """The values `(P,)` of these metrics for each pair.

    >>> values = values_of_pairs(jnp.asarray([[0.5, -0.5]]), jnp.asarray([[-5.0, -9.0]]))
    >>> values["rewards/margins"].tolist(), values["rewards/accuracies"].tolist()
    ([1.0], [1.0])
    """
    chosen, rejected = logps_P2.T
    return values_of_rewards(rewards_P2) | {"logps/chosen": chosen, "logps/rejected": rejected}


def values_of_rewards(rewards_P2: jax.Array) -> dict[str, jax.Array]:
    """Those of the rewards alone."""
    chosen, rejected = rewards_P2.T
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        "rewards/margins": chosen - rejected,
    }
