"""Copies of the state over groups of devices, and collectives in phases, train as one group in one phase does."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

import zero
from tests.training.small_gpt import assert_close, run_on, setup

pytestmark = pytest.mark.usefixtures("quick_compilation")
GRIDS = {
    "two copies": zero.Axis("zero", (2, 4)),
    "a copy per device": zero.Axis("zero", (8, 1)),
    "copies of two phases": zero.Axis("zero", (2, 2, 2)),
    "two phases in another order": zero.Axis("zero", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "micro-batches": (3, {"micro_batches": 3}),
    "fused": (3, {"fused_update": True, "skip_bad_steps": False}),
}
QUICK = [("two copies", "stage 3"), ("two copies", "fused"), ("two phases in another order", "stage 3")]


@pytest.mark.parametrize(
    ("grid", "case"),
    QUICK
    + [pytest.param(g, c, marks=pytest.mark.slow) for g, c in itertools.product(GRIDS, CASES) if (g, c) not in QUICK],
)
def test_every_grid_trains_as_one_group(grid: str, case: str) -> None:
    stage, options = CASES[case]
    expected = run_on(setup(8, stage, max_norm=None, **options))
    got = run_on(setup(8, stage, max_norm=None, axis=GRIDS[grid], **options))
    assert_close(got, expected, rtol=1e-6)


def test_copies_are_equal_bit_for_bit_and_state_is_larger() -> None:
    flat, on = setup(8, 3, max_norm=None), setup(8, 3, max_norm=None, axis=GRIDS["two copies"])
    state = run_on(on).state
    assert state is not None
    for x in jax.tree.leaves(state):
        np.testing.assert_array_equal(np.asarray(x)[:4], np.asarray(x)[4:])
    assert on.layout.bytes_per_device() > 1.9 * flat.layout.bytes_per_device()
