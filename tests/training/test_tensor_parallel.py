"""Devices that compute the same rows with a part of the parameters each train as devices with rows of their own do."""

import dataclasses
import itertools
from typing import Any

import pytest

import zero
from tests.training.small_gpt import CONFIG, assert_close, run_on, setup

pytestmark = pytest.mark.usefixtures("quick_compilation")
DIVISIBLE = dataclasses.replace(CONFIG, embedding_dim=48, num_head=8, block_size=16)

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "micro-batches": (3, {"micro_batches": 3}),
    "fused": (3, {"fused_update": True, "skip_bad_steps": False, "max_norm": None}),
    "nested": (3, {"remat": "nested"}),
    "blockwise": (3, {"blockwise_from": 2}),
}
QUICK = [(2, "stage 3"), (4, "stage 0")]
REST = [pair for pair in itertools.product((2, 4, 8), CASES) if pair not in QUICK]


def axis(stage: int, tensor: int) -> zero.Axis:
    """At stage 0 each part of the state is on all devices that compute with it."""
    return zero.Axis.with_tensor_groups("zero", 8, tensor, replicas=1 if stage else 8 // tensor)


@pytest.mark.parametrize(("tensor", "case"), QUICK + [pytest.param(*pair, marks=pytest.mark.slow) for pair in REST])
def test_tensor_groups_train_as_devices_with_rows_of_their_own(tensor: int, case: str) -> None:
    stage, options = CASES[case]
    plain = {name: value for name, value in options.items() if name == "max_norm"}
    expected = run_on(setup(8, 3, config=DIVISIBLE, **plain))
    got = run_on(setup(8, stage, config=DIVISIBLE, axis=axis(stage, tensor), **options))
    assert_close(got, expected, rtol=1e-6, config=DIVISIBLE)
