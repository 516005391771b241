"""Whole steps with copies of the state over groups of devices, and with phases, against one group in one phase."""

import itertools
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.training.small_gpt import PLAIN, Run, assert_close, batch, run_on, setup
from zero.costs.hlo import across_hosts, bytes_by_kind, collectives

GRIDS = {
    "two copies": zero.Axis("zero", (2, 4)),
    "a copy per device": zero.Axis("zero", (8, 1)),
    "copies of two phases": zero.Axis("zero", (2, 2, 2)),
    "two phases in another order": zero.Axis("zero", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
    "an exchange": zero.Axis("zero", (1, 8), exchanges=True),
    "an exchange in two copies": zero.Axis("zero", (2, 4), exchanges=True),
}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "micro-batches": (3, {"micro_batches": 3}),
    "fused": (3, {"fused_update": True, "skip_bad_steps": False}),
}
QUICK = [  # test_fused_update.py has two copies
    ("an exchange in two copies", "stage 3"),
    # Phases in another order are in tests/partition.
]
WIDE = [("two phases in another order", "stage 3"), ("two copies", "stage 3"), ("an exchange", "stage 3")]


@cache
def compiled(stage: int, **options: Any) -> tuple[Run, str]:
    """A run whose gradients are not clipped, and the text of the compiled step."""
    on = setup(8, stage, max_norm=None, config=PLAIN, **options)
    step = on.programs.step.lower(on.start(), batch(on, 0)).compile()
    return run_on(on._replace(programs=on.programs._replace(step=step))), step.as_text()


@pytest.mark.parametrize(
    ("grid", "case"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.wide) for case in WIDE),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(GRIDS, CASES)
            if case not in QUICK + WIDE
        ),
    ],
)
def test_every_grid_trains_as_one_group(grid: str, case: str) -> None:
    stage, options = CASES[case]
    expected, _ = compiled(stage, **options if case == "micro-batches" else {})  # a fused update is the same update
    got, _ = compiled(stage, axis=GRIDS[grid], **options)
    assert_close(got, expected, rtol=1e-6)


def test_copies_of_the_state() -> None:
    """Copies are equal bit for bit, and each device holds more state."""
    copies = GRIDS["an exchange in two copies"]
    flat, on = setup(8, 3, max_norm=None), setup(8, 3, max_norm=None, axis=copies)
    state = compiled(3, axis=copies)[0].state
    assert state is not None
    for x in jax.tree.leaves(state):
        np.testing.assert_array_equal(np.asarray(x)[:4], np.asarray(x)[4:])
    assert on.layout.bytes_per_device() > 1.9 * flat.layout.bytes_per_device()


INT8: dict[str, Any] = {"wire_dtype": jnp.int8, "gather_dtype": jnp.int8}


@pytest.mark.parametrize(
    "stage",
    [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))],
)
def test_int8_between_devices(stage: int) -> None:
    """With int8 between devices training is nearly the same, with fewer bytes.

    An element is off by at most its block's largest / 254, of parameters and of each summand of a gradient.
    """
    (expected, plain), (got, short) = compiled(stage), compiled(stage, **INT8)
    assert got.metrics["loss"] != expected.metrics["loss"]
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=3e-3)
    sent = [sum(collective.sent for collective in collectives(text)) for text in (plain, short)]
    assert sent[1] < 0.5 * sent[0]  # not a fourth: the smallest leaves fill less than a block each


@pytest.mark.slow
def test_int8_at_every_stage() -> None:
    """With int8 between devices training is near float32 at every stage and in copies.

    Blocks of a stack of layers are others than those of its layers.
    """
    high, _ = compiled(3, **INT8)
    for other, _ in (compiled(1, **INT8), compiled(2, **INT8), compiled(3, axis=GRIDS["two copies"], **INT8)):
        np.testing.assert_allclose(other.metrics["loss"], high.metrics["loss"], rtol=3e-3)


@pytest.mark.wide  # test_step.py counts the sums of each loop
def test_one_sum_over_copies() -> None:
    """Gradients are summed over copies once per step, whatever the number of layers and of micro-batches.

    Of one micro-batch each part sums its own: a tied table is part of the embedding and of the head.
    """
    axis = GRIDS["two copies"]
    programs = compiled(3, axis=axis)[1], compiled(3, axis=axis, micro_batches=3)[1]
    once, thrice = (
        bytes_by_kind(across_hosts(collectives(text), [0] * 4 + [1] * 4))["all-reduce"] for text in programs
    )
    layout = setup(8, 3, max_norm=None, axis=axis).model.layout
    bytes_of = {leaf.name: 4 * int(np.prod(leaf.shard_shape)) for leaf in layout.leaves}
    shards = sum(bytes_of.values())
    assert thrice == pytest.approx(shards, rel=0.01)
    assert once == pytest.approx(shards + bytes_of["vocabulary/table"], rel=0.01)
