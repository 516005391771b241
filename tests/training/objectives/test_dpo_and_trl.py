"""IPO, a loss of `objective=dpo`, beside TRL's trainer."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import trl_steps
from tests.helpers.trl_losses import as_rows
from zero.training.objectives.dpo import Dpo

pytestmark = trl_steps.WARNS

BETA = 0.4


@pytest.mark.wide  # the formula is compared by default
def test_steps_equal_trl(trl_folder: Path, tmp_path: Path) -> None:
    """Loss and gradient norm of ten steps of DPOTrainer with loss_type="ipo"."""
    from trl import DPOConfig, DPOTrainer

    trainer, expected = trl_steps.train(
        DPOTrainer, DPOConfig, trl_folder, trl_steps.PAIRS, tmp_path, beta=BETA, loss_type="ipo"
    )
    batch = trainer.data_collator(list(trainer.train_dataset))
    rows = as_rows(batch["input_ids"], batch["completion_mask"] == 1, batch["attention_mask"], trl_steps.CONTEXT)
    texts = trl_steps.interleaved(*np.split(rows, 2))
    objective = Dpo(beta=BETA, loss="ipo").objective()
    trl_steps.assert_same(trl_steps.steps_of_zero(trl_folder, objective, texts, 2, 3), expected)
