"""Whole steps: eight devices, divided in every way, train alike for twenty steps."""

import dataclasses
from functools import partial

import numpy as np
import pytest

import zero
from tests.training.divisible_models import MODELS
from tests.training.small_gpt import CONFIG, advance, setup, tokens
from zero.models.config import GPTConfig

pytestmark = [pytest.mark.slow]
CONTEXT = 16
EXPERTS = dataclasses.replace(
    CONFIG, block_size=CONTEXT, mlp_bias=False, experts=8, experts_per_token=2, expert_capacity=1.0, balance_loss=0.1
)


def losses(config: GPTConfig, axis: zero.Axis | None, micro_batches: int) -> list[float]:
    on = setup(8, 3, micro_batches, config=config, axis=axis)
    _, metrics = advance(on, on.start(), range(20), partial(tokens, context=CONTEXT))
    return [one["loss"] for one in metrics]


def axes(config: GPTConfig) -> dict[str, zero.Axis]:
    """The ways to divide eight devices that this model allows; groups of tensor parallelism divide its key heads."""
    tensor = {
        f"{8 // n} x {n}": zero.Axis.with_tensor_groups("zero", 8, n) for n in (2, 4, 8) if not config.key_heads % n
    }
    tensor["2 copies of 2 x 2"] = zero.Axis.with_tensor_groups("zero", 8, 2, replicas=2)
    context = {f"{n} parts of a row": zero.Axis("zero", (1, 8), context=n) for n in (2, 4, 8)}
    return {"2 copies": zero.Axis("zero", (2, 4)), **tensor, **context}


@pytest.mark.parametrize("name", MODELS)
def test_all_groups_train_alike(name: str) -> None:
    """All ways to divide the devices into groups train alike."""
    expected = losses(MODELS[name], None, 1)
    assert len(set(expected)) == 20
    for way, axis in axes(MODELS[name]).items():
        np.testing.assert_allclose(losses(MODELS[name], axis, 3), expected, rtol=1e-5, err_msg=way)


def test_expert_groups_train_alike() -> None:
    """Expert groups and copies of them train alike."""
    expected = losses(EXPERTS, None, 1)
    for experts, copies in ((2, 1), (4, 1), (8, 1), (2, 2)):
        axis = zero.Axis.with_expert_groups("zero", 8, experts, copies)
        np.testing.assert_allclose(losses(EXPERTS, axis, 3), expected, rtol=1e-5, err_msg=f"{experts} x {copies}")
