"""Direct preference optimization on shards: losses and metrics of TRL's formulas on logits, at any stage and N."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers.preferences import (
    CONTEXTS,
    READ,
    SIZE,
    TENSOR,
    On,
    log_probabilities,
    of_pairs,
    other_params,
    pairs,
    plain,
    programs_on,
    references,
)
from tests.training.small_gpt import MAX_NORM, first_params
from zero.models.adapters import Adapters
from zero.training.objectives.dpo import METRICS, Dpo
from zero.training.tuning import Tuning

STEPS, BETA = 6, 0.5
NAMES = [metric.name for metric in METRICS]
OBJECTIVE = Dpo(beta=BETA).objective()
ADAPTERS = Adapters(rank=3, alpha=6.0)


def trl(params: Any, reference: jax.Array, rows: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and metrics of DPOTrainer (loss_type="sigmoid") for the pairs that were read."""
    chosen, rejected = of_pairs(log_probabilities(params, rows))
    ref_chosen, ref_rejected = of_pairs(reference)
    logits = (chosen - rejected) - (ref_chosen - ref_rejected)
    chosen_rewards, rejected_rewards = BETA * (chosen - ref_chosen), BETA * (rejected - ref_rejected)
    values = (
        *(chosen_rewards, rejected_rewards, (chosen_rewards > rejected_rewards).astype(float)),
        *(chosen_rewards - rejected_rewards, chosen, rejected),
    )
    metrics = {name: value.mean() for name, value in zip(NAMES, values, strict=True)}
    return -jax.nn.log_sigmoid(BETA * logits).mean(), metrics


@cache
def on(devices: int, stage: int, **options: Any) -> On:
    return programs_on(OBJECTIVE, devices, stage, **options)


@pytest.mark.parametrize(
    ("devices", "stage", "options"),
    [
        pytest.param(1, 3, {}, marks=pytest.mark.slow),
        pytest.param(3, 1, {"micro_batches": 4}, marks=pytest.mark.wide),
        pytest.param(8, 0, {}, marks=pytest.mark.slow),
        pytest.param(8, 2, {"micro_batches": 3}, marks=pytest.mark.slow),
        pytest.param(8, 3, {}, marks=pytest.mark.slow),
        (8, 3, {"axis": TENSOR, "micro_batches": 2}),
        pytest.param(8, 3, {"axis": CONTEXTS}, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_trl(devices: int, stage: int, options: dict[str, Any]) -> None:
    """Losses and metrics of some steps are those of TRL's formulas on logits, in a loop on one device."""
    one = on(devices, stage, max_gradient_norm=MAX_NORM, **options)
    state = one.start()
    got = one.steps(state, lambda step: one.rows(references(step)), count=STEPS)
    for name in ("loss", *NAMES):
        for step, (found, expected) in enumerate(zip(got, plain(trl, STEPS), strict=True)):
            assert found[name] == pytest.approx(expected[name], rel=1e-5 if step == 0 else 1e-4, abs=1e-5), name
    assert got[-1]["loss"] < got[0]["loss"] - 0.1


@pytest.mark.parametrize(
    ("devices", "stage", "options"),
    [pytest.param(3, 1, {"micro_batches": 4}, marks=pytest.mark.wide), (8, 3, {"axis": TENSOR, "micro_batches": 2})],
)
def test_reference_and_evaluation_equal_trl(devices: int, stage: int, options: dict[str, Any]) -> None:
    """Log-probabilities of a reference are those of its logits; an evaluation sums what a step takes the means of."""
    one = on(devices, stage, max_gradient_norm=MAX_NORM, **options)
    rows, group = one.rows(pairs(0)), one.model.axis.row_group
    got = one.programs.reference(one.place(other_params(), one.model), rows)
    np.testing.assert_allclose(np.asarray(got)[::group].ravel(), references(0), rtol=1e-5, atol=1e-5)
    total, count, sums = one.programs.evaluate(one.place(first_params(SIZE), one.model), rows, {"reference": got})
    assert count.item() == len(READ)
    means = {"loss": total.item() / count.item(), **{name: x.item() / count.item() for name, x in sums.items()}}
    expected = plain(trl, STEPS)[0]
    assert means == pytest.approx({name: expected[name] for name in means}, rel=1e-5, abs=1e-5)


@pytest.mark.wide  # a pair
def test_adapters_have_their_base_as_reference() -> None:
    """New adapters equal the reference that is their base without them, and learn the preference from there."""
    one = on(8, 3, tuning=Tuning(ADAPTERS))
    frozen = one.place(other_params(), one.model.base)
    found = {step: one.programs.reference(frozen, one.rows(pairs(step))) for step in (0, 1)}
    np.testing.assert_allclose(np.asarray(found[0]).ravel(), references(0), rtol=1e-5, atol=1e-5)
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    state = one.programs.start(one.programs.init(np.stack([key] * 8)))
    got = one.steps(state, found.__getitem__, frozen, count=20)
    assert got[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert got[0]["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert got[-1]["loss"] < 0.6 and got[-1]["rewards/accuracies"] > 0.8
    assert got[-1]["rewards/margins"] == pytest.approx(
        got[-1]["rewards/chosen"] - got[-1]["rewards/rejected"], rel=1e-4
    )


@pytest.mark.slow
def test_fused_update_learns_pairs() -> None:
    """An update inside the backward pass has the same loss and metrics, and then a lower loss."""
    one = on(8, 3, fused_update=True, remat="full")
    state = one.start()
    got = one.steps(state, lambda step: one.rows(references(step)), count=3)
    for name in ("loss", *NAMES):
        assert got[0][name] == pytest.approx(plain(trl, STEPS)[0][name], rel=1e-5, abs=1e-5)
    assert got[2]["loss"] < got[0]["loss"] - 0.03


def test_unknown_token_is_no_number() -> None:
    """A token past the vocabulary makes the loss NaN, so that its update is skipped."""
    one = on(8, 3, max_gradient_norm=MAX_NORM, axis=TENSOR, micro_batches=2)
    rows = pairs(0)
    rows[0, 0] = SIZE.vocab_size
    total, count, _ = one.programs.evaluate(
        one.place(first_params(SIZE), one.model), one.rows(rows), {"reference": one.rows(references(0))}
    )
    assert np.isnan(total.item()) and count.item() == len(READ)
