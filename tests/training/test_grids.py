"""Whole steps with copies of the state over groups of devices, and with phases, against one group in one phase."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.training.small_gpt import assert_close, run_on, setup, shapes_of
from zero.runtime.planning.hlo import across_hosts, bytes_by_kind, collectives
from zero.training.batch import Batch

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


def test_copies_of_the_state() -> None:
    """Copies are equal bit for bit, and each device holds more state."""
    flat, on = setup(8, 3, max_norm=None), setup(8, 3, max_norm=None, axis=GRIDS["two copies"])
    state = run_on(on).state
    assert state is not None
    for x in jax.tree.leaves(state):
        np.testing.assert_array_equal(np.asarray(x)[:4], np.asarray(x)[4:])
    assert on.layout.bytes_per_device() > 1.9 * flat.layout.bytes_per_device()


INT8: dict[str, Any] = {"max_norm": None, "wire_dtype": jnp.int8, "gather_dtype": jnp.int8}


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))])
def test_int8_between_devices(stage: int) -> None:
    """With int8 between devices training is nearly the same, with fewer bytes.

    An element is off by at most its block's largest / 254, of parameters and of each summand of a gradient.
    """
    plain, short = setup(8, stage, max_norm=None), setup(8, stage, **INT8)
    expected, got = run_on(plain), run_on(short)
    assert got.metrics["loss"] != expected.metrics["loss"]
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=3e-3)
    batch = Batch(np.zeros((8, 3, 12), np.int32), np.zeros(8, np.int32))
    programs = [on.programs.step.lower(shapes_of(on), batch).compile().as_text() for on in (plain, short)]
    sent = [sum(collective.sent for collective in collectives(text)) for text in programs]
    assert sent[1] < 0.5 * sent[0]  # not a fourth: the smallest leaves fill less than a block each


@pytest.mark.slow
def test_int8_at_every_stage() -> None:
    """With int8 between devices training is near float32 at every stage and in copies.

    Blocks of a stack of layers are others than those of its layers.
    """
    high = run_on(setup(8, 3, **INT8))
    for other in (setup(8, 1, **INT8), setup(8, 2, **INT8), setup(8, 3, axis=GRIDS["two copies"], **INT8)):
        np.testing.assert_allclose(run_on(other).metrics["loss"], high.metrics["loss"], rtol=3e-3)


def test_one_sum_over_copies() -> None:
    """Gradients are summed over copies once per step.

    Whatever the number of layers and of micro-batches.
    """
    batch = Batch(np.zeros((8, 3, 12), np.int32), np.zeros(8, np.int32))
    on = [setup(8, 3, parts, max_norm=None, axis=GRIDS["two copies"]) for parts in (1, 3)]
    programs = [each.programs.step.lower(shapes_of(each), batch).compile().as_text() for each in on]
    once, thrice = (
        bytes_by_kind(across_hosts(collectives(text), [0] * 4 + [1] * 4))["all-reduce"] for text in programs
    )
    shards = 4 * sum(int(np.prod(leaf.shard_shape)) for leaf in on[0].model.layout.leaves)
    assert shards <= once < 1.1 * shards and thrice == pytest.approx(once, rel=0.01)
