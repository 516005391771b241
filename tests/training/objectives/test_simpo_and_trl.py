"""SimPO beside TRL's trainer."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import trl_steps
from zero.training.objectives.simpo import Simpo

pytestmark = trl_steps.WARNS

BETA, GAMMA = 2.0, 0.7


@pytest.mark.wide  # the formula is compared by default
def test_steps_equal_trl(trl_folder: Path, tmp_path: Path) -> None:
    """Loss and gradient norm of ten steps of CPOTrainer with loss_type="simpo" and no likelihood."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    keys: dict[str, Any] = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": BETA, "simpo_gamma": GAMMA}
    trainer, expected = trl_steps.train(CPOTrainer, CPOConfig, trl_folder, trl_steps.PAIRS, tmp_path, **keys)
    texts = trl_steps.labelled_texts(trainer)
    found = trl_steps.steps_of_zero(trl_folder, Simpo(beta=BETA, gamma=GAMMA).objective(), texts, 2, 3)
    trl_steps.assert_same(found, expected)
