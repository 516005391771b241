"""IPO, a loss of `objective=dpo`, on shards: the numbers of its formula on logits."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers.preferences import DEVICES, check_steps, lengths, log_probabilities, of_pairs
from zero.training.objectives.dpo import METRICS, Dpo

BETA = 0.4


def formula(params: Any, reference: jax.Array, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Equation 17 of arXiv 2310.12036, of means over the tokens of a text, as in TRL."""
    logps = log_probabilities(params, rows)
    chosen, rejected = of_pairs(logps)
    ratios = of_pairs((logps - reference) / lengths(rows).clip(1))
    rewards = of_pairs(BETA * (logps - reference))
    values = (
        *(*rewards, (rewards[0] > rewards[1]).astype(float), rewards[0] - rewards[1]),
        *(chosen, rejected),
    )
    metrics = {metric.name: value.mean() for metric, value in zip(METRICS, values, strict=True)}
    return ((ratios[0] - ratios[1] - 1 / (2 * BETA)) ** 2).mean(), metrics


@pytest.mark.parametrize(("devices", "stage", "options"), DEVICES)
def test_steps_equal_the_formula(devices: int, stage: int, options: dict[str, Any]) -> None:
    check_steps(Dpo(beta=BETA, loss="ipo").objective(), formula, devices, stage, options)
