"""Reward models beside TRL's trainer."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import trl_steps
from tests.helpers.trl_losses import as_rows
from zero.training.objectives.reward import Reward

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

pytestmark = trl_steps.WARNS

CENTER = 0.05


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Qwen2 with a head of scores, and a tokenizer whose padding does not end texts."""
    trl_steps.save_scored_folder(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.mark.wide  # the formula is compared by default
def test_steps_equal_trl(folder: Path, tmp_path: Path) -> None:
    """Loss and gradient norm of ten steps of RewardTrainer, from the same head and the same pairs."""
    import transformers
    from trl import RewardConfig, RewardTrainer

    pairs = [{name: line["prompt"] + line[name] for name in ("chosen", "rejected")} for line in trl_steps.PAIRS]
    trainer, expected = trl_steps.train(
        *(RewardTrainer, RewardConfig, folder, pairs, tmp_path),
        auto=transformers.AutoModelForSequenceClassification,
        center_rewards_coefficient=CENTER,
    )
    batch = trainer.data_collator(list(trainer.train_dataset))
    attended = np.asarray(batch["attention_mask"])
    rows = as_rows(batch["input_ids"], attended, attended, trl_steps.CONTEXT)
    texts = trl_steps.interleaved(*np.split(rows, 2))
    trl_steps.assert_same(trl_steps.steps_of_zero(folder, Reward(center=CENTER).objective(), texts, 2, 3), expected)
