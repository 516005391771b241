"""KTO beside TRL's trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import trl_steps
from tests.helpers.trl_losses import as_rows
from zero.training.objectives.kto import Kto

pytestmark = trl_steps.WARNS

KEYS: dict[str, Any] = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}


@pytest.mark.wide  # the formula is compared by default
def test_steps_equal_trl(trl_folder: Path, tmp_path: Path) -> None:
    """Loss and gradient norm of ten steps of KTOTrainer."""
    from trl import KTOConfig, KTOTrainer

    examples = [
        {"prompt": pair["prompt"], "completion": pair[which], "label": which == "chosen"}
        for number, pair in enumerate(trl_steps.PAIRS)
        for which in ("chosen", "rejected")[: 2 - number // 2]  # more of them are wanted
    ]
    trainer, expected = trl_steps.train(
        *(KTOTrainer, KTOConfig, trl_folder, examples, tmp_path), train_sampling_strategy="sequential", **KEYS
    )
    batch = trainer.data_collator(list(trainer.train_dataset))
    rows, mismatched = (
        as_rows(
            *(batch[f"{of}input_ids"], batch[f"{of}completion_mask"] == 1, batch[f"{of}attention_mask"]),
            trl_steps.CONTEXT,
        )
        for of in ("", "KL_")
    )
    labels = np.asarray(batch["label"]).astype(np.int32)
    texts = trl_steps.interleaved(rows, mismatched)
    found = trl_steps.steps_of_zero(trl_folder, Kto(**KEYS).objective(), texts, 3, 3, label=labels)
    trl_steps.assert_same(found, expected)
    assert max(line["kl"] for line in trainer.state.log_history if "kl" in line) > 0
