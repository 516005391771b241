"""Reward models on shards: losses, gradient norms and metrics of steps are those of a formula on one device."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.preferences import DEVICES, SIZE, check_steps, of_pairs, scores_of_texts
from zero.training.objectives.reward import Reward

SCORED = replace(SIZE, score_outputs=1)
CENTER = 0.3


def formula(params: Any, _: jax.Array, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    chosen, rejected = of_pairs(scores_of_texts(SCORED, params, rows)[:, 0])
    losses = jnp.log1p(jnp.exp(rejected - chosen)) + CENTER * (chosen + rejected) ** 2
    metrics = {"chosen": chosen, "rejected": rejected, "accuracies": chosen > rejected, "margins": chosen - rejected}
    return losses.mean(), {f"rewards/{name}": x.mean() for name, x in metrics.items()}


@pytest.mark.parametrize(("devices", "stage", "options"), DEVICES)
def test_steps_equal_the_formula(devices: int, stage: int, options: dict[str, Any]) -> None:
    check_steps(Reward(center=CENTER).objective(), formula, devices, stage, {"size": SCORED, **options})
