"""SimPO on shards: the numbers of its formula on logits, and of TRL's trainer."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import trl_steps
from tests.helpers.preferences import DEVICES, check_steps, lengths, log_probabilities, of_pairs
from zero.training.objectives.simpo import Simpo

pytestmark = trl_steps.WARNS

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
    check_steps(Simpo(beta=BETA, gamma=GAMMA).make(), formula, devices, stage, options)


@pytest.mark.wide
def test_steps_equal_trl(trl_folder: Path, tmp_path: Path) -> None:
    """Loss and gradient norm of ten steps of CPOTrainer with loss_type="simpo" and no likelihood."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    keys: dict[str, Any] = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": BETA, "simpo_gamma": GAMMA}
    trainer, expected = trl_steps.train(CPOTrainer, CPOConfig, trl_folder, trl_steps.PAIRS, tmp_path, **keys)
    texts = trl_steps.labelled_texts(trainer)
    found = trl_steps.steps_of_zero(trl_folder, Simpo(beta=BETA, gamma=GAMMA).make(), texts, 2, 3)
    trl_steps.assert_same(found, expected)
