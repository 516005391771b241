"""KTO on shards: the numbers of its formula on logits."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
from zero.training.objectives.kto import Kto

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
