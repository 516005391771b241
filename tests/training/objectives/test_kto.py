"""KTO on shards: the numbers of its formula on logits, and of TRL's trainer."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import trl_steps
from tests.helpers.preferences import (
    DEVICES,
    LABELS,
    PAIRS,
    READ,
    Formula,
    check_steps,
    log_probabilities,
    of_pairs,
    plain,
)
from tests.helpers.trl_losses import as_rows
from zero.training.objectives.kto import Kto

pytestmark = trl_steps.WARNS

KEYS: dict[str, Any] = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}


@cache
def formula_of(groups: int, micro_batches: int) -> Formula:
    """Equation 8 of arXiv 2402.01306; the divergence is estimated over each micro-batch of all groups of devices."""
    of_group = PAIRS // groups
    micro_batch = (np.arange(PAIRS) % of_group // (of_group // micro_batches))[READ]
    label = LABELS[READ]

    def formula(params: Any, reference: jax.Array, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
        logps = log_probabilities(params, rows)
        answers, _ = of_pairs(logps)
        ratios, mismatched = of_pairs(logps - reference)
        estimates = [jnp.maximum(mismatched[micro_batch == k].mean(), 0) for k in range(micro_batches)]
        divergence = jax.lax.stop_gradient(jnp.stack(estimates)[micro_batch])
        wanted = KEYS["desirable_weight"] * (1 - jax.nn.sigmoid(KEYS["beta"] * (ratios - divergence)))
        other = KEYS["undesirable_weight"] * (1 - jax.nn.sigmoid(KEYS["beta"] * (divergence - ratios)))
        metrics = {"kl": divergence.mean(), "share/chosen": label.mean(), "share/rejected": 1 - label.mean()}
        for name, is_one in (("chosen", label == 1), ("rejected", label == 0)):
            metrics[f"rewards/{name}"] = KEYS["beta"] * ratios[is_one].mean()
            metrics[f"logps/{name}"] = answers[is_one].mean()
        return jnp.where(label, wanted, other).mean(), jax.tree.map(jnp.asarray, metrics)

    return formula


@pytest.mark.parametrize(("devices", "stage", "options"), DEVICES)
def test_steps_equal_the_formula(devices: int, stage: int, options: dict[str, Any]) -> None:
    axis = options.get("axis")
    groups = devices if axis is None else devices // axis.row_group
    formula = formula_of(groups, options.get("micro_batches", 1))
    check_steps(Kto(**KEYS).make(), formula, devices, stage, options)
    assert max(step["kl"] for step in plain(formula, 10)) > 0


@pytest.mark.wide
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
    found = trl_steps.steps_of_zero(trl_folder, Kto(**KEYS).make(), texts, 3, 3, label=labels)
    trl_steps.assert_same(found, expected)
    assert max(line["kl"] for line in trainer.state.log_history if "kl" in line) > 0
