"""SimPO on shards: the numbers of its formula on logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.preferences import DEVICES, check_steps, lengths, log_probabilities, of_pairs
from zero.training.objectives.simpo import Simpo

BETA, GAMMA = 2.0, 0.7


def formula(params: Any, _: jax.Array, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Equation 6 of arXiv 2405.14734."""
    chosen, rejected = of_pairs(log_probabilities(params, rows) / lengths(rows).clip(1))
    metrics = {
        "rewards/chosen": BETA * chosen,
        "rewards/rejected": BETA * rejected,
        "rewards/accuracies": (chosen > rejected).astype(float),
        "rewards/margins": BETA * (chosen - rejected),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    losses = -jnp.log(jax.nn.sigmoid(BETA * chosen - BETA * rejected - GAMMA))
    return losses.mean(), {name: value.mean() for name, value in metrics.items()}


@pytest.mark.parametrize(("devices", "stage", "options"), DEVICES)
def test_steps_equal_the_formula(devices: int, stage: int, options: dict[str, Any]) -> None:
    check_steps(Simpo(beta=BETA, gamma=GAMMA).objective(), formula, devices, stage, options)
