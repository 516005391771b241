"""KTO on shards: the numbers of its formula on logits."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.config.composing import compose
from tests.helpers.preferences import (
    DEVICES,
    LABELS,
    PAIRS,
    READ,
    SIZE,
    Formula,
    check_steps,
    log_probabilities,
    of_pairs,
    pairs,
    plain,
    programs_on,
    references,
)
from tests.training.small_gpt import first_params
from zero.base.errors import UserError
from zero.commands.modes import check
from zero.job.sizes import load_sizes
from zero.training.batch import Batch
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


@pytest.mark.quick
def test_weights_that_are_both_zero_are_refused() -> None:
    keys = ("objective=kto", "model.size=test", "objective.desirable_weight=0", "objective.undesirable_weight=0")
    with pytest.raises(UserError, match=r"objective.desirable_weight=0.0: expected more than 0, or objective.undes"):
        check(compose(*keys), load_sizes())


def test_examples_without_another_answer() -> None:
    """They are learned, and the estimate of the divergence leaves them out."""
    one = programs_on(Kto(**KEYS).objective(), 1, 0)
    rows, reference = pairs(0), references(0)
    alone = np.arange(0, PAIRS, 3)
    rows.reshape(PAIRS, 2, -1)[alone, 1] = np.minimum(rows.reshape(PAIRS, 2, -1)[alone, 1], -1)
    whole = log_probabilities(first_params(SIZE), rows) - np.where((rows[:, 1:] >= 0).any(1), reference, 0)
    ratios, mismatched = np.asarray(whole).reshape(PAIRS, 2).T
    kl = max(mismatched[np.setdiff1d(READ, alone)].mean(), 0)
    sign = np.where(LABELS == 1, 1, -1)
    weight = np.where(LABELS == 1, KEYS["desirable_weight"], KEYS["undesirable_weight"])
    losses = weight * (1 - jax.nn.sigmoid(KEYS["beta"] * sign * (ratios - kl)))
    extra = one.extra(0, lambda step: one.rows(np.where((rows[:, 1:] >= 0).any(1), reference, 0)))
    _, metrics = one.programs.step(one.start(), Batch(one.rows(rows), np.zeros(1, np.int32), extra), None)
    assert metrics["kl"].item() == pytest.approx(kl, rel=1e-4) and kl > 0
    assert metrics["loss"].item() == pytest.approx(float(losses[READ].mean()), rel=1e-5)


@pytest.mark.parametrize(("devices", "stage", "options"), DEVICES)
def test_steps_equal_the_formula(devices: int, stage: int, options: dict[str, Any]) -> None:
    axis = options.get("axis")
    groups = devices if axis is None else devices // axis.row_group
    formula = formula_of(groups, options.get("micro_batches", 1))
    check_steps(Kto(**KEYS).objective(), formula, devices, stage, options)
    assert max(step["kl"] for step in plain(formula, 10)) > 0
