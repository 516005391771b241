"""IPO, a loss of `objective=dpo`, on shards: the numbers of its formula on logits, and of TRL's trainer."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers import trl_steps
from tests.helpers.preferences import DEVICES, check_steps, lengths, log_probabilities, of_pairs
from tests.helpers.trl_losses import as_rows
from zero.training.objectives.dpo import METRICS, Dpo

pytestmark = trl_steps.WARNS

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
    check_steps(Dpo(beta=BETA, loss="ipo").make(), formula, devices, stage, options)


@pytest.mark.wide
def test_steps_equal_trl(trl_folder: Path, tmp_path: Path) -> None:
    """Loss and gradient norm of ten steps of DPOTrainer with loss_type="ipo"."""
    from trl import DPOConfig, DPOTrainer

    trainer, expected = trl_steps.train(
        DPOTrainer, DPOConfig, trl_folder, trl_steps.PAIRS, tmp_path, beta=BETA, loss_type="ipo"
    )
    batch = trainer.data_collator(list(trainer.train_dataset))
    rows = as_rows(batch["input_ids"], batch["completion_mask"] == 1, batch["attention_mask"], trl_steps.CONTEXT)
    texts = trl_steps.interleaved(*np.split(rows, 2))
    objective = Dpo(beta=BETA, loss="ipo").make()
    trl_steps.assert_same(trl_steps.steps_of_zero(trl_folder, objective, texts, 2, 3), expected)
