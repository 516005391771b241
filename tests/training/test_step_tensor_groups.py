"""Whole steps of tensor groups, whose devices have the same rows and parts of the parameters, against no groups."""

import dataclasses
import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest

import zero
from tests.training.divisible_models import DIVISIBLE, MODELS
from tests.training.small_gpt import (
    RATE,
    Run,
    Setup,
    assert_close,
    assert_first_weights,
    run_on,
    setup,
    shapes_of,
    tokens,
)
from zero.base.errors import UserError
from zero.costs.hlo import collectives
from zero.inference.generate import generate
from zero.models.adapters import Adapters
from zero.models.config import GPTConfig
from zero.training.batch import Batch, Separators
from zero.training.host_rows import split_rows
from zero.training.inference import Sampling
from zero.training.optimizers.optimizer import make_optimizer
from zero.training.parts import StepOptions
from zero.training.programs import make_inference
from zero.training.sharded_gpt import ShardedGPT
from zero.training.step import state_layout
from zero.training.tuning import Tuning

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "micro-batches": (3, {"micro_batches": 3}),
    "fused": (3, {"fused_update": True, "skip_bad_steps": False, "max_norm": None}),
    "nested": (3, {"remat": "nested"}),
    "blockwise": (3, {"blockwise_from": 2}),
}
EVERY = [
    *(("plain", tensor, case) for tensor, case in itertools.product((2, 4, 8), CASES)),
    *((name, tensor, "stage 3") for name, tensor in itertools.product(MODELS, (2, 4))),
    *((name, 8, "stage 3") for name, model in MODELS.items() if model.key_heads == 8),
]


def trained(on: Setup) -> Run:
    return run_on(on, data=partial(tokens, context=DIVISIBLE.block_size))


def axis(stage: int, tensor: int) -> zero.Axis:
    """At stage 0 each part of the state is on all devices that compute with it."""
    return zero.Axis.with_tensor_groups("zero", 8, tensor, replicas=1 if stage else 8 // tensor)


# Short forms are test_documents_are_kept_apart and, of all parameters, test_step_mup.py.
@pytest.mark.slow
@pytest.mark.parametrize(("model", "tensor", "case"), sorted({*EVERY}))
def test_equals_devices_without_groups(model: str, tensor: int, case: str) -> None:
    """Tensor groups train as devices with rows of their own."""
    stage, options = CASES[case]
    plain = {name: value for name, value in options.items() if name == "max_norm"}
    expected = trained(setup(8, 3, config=MODELS[model], **plain))
    got = trained(setup(8, stage, config=MODELS[model], axis=axis(stage, tensor), **options))
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-6)
    if model == "plain":
        assert_close(got, expected, rtol=1e-6, config=DIVISIBLE)


@pytest.mark.slow  # test_groups_may_lie_anywhere has documents
@pytest.mark.parametrize(("model", "stage"), [("gemma2", 0), ("gemma2", 3), ("gpt2", 3)])
def test_documents_are_kept_apart(model: str, stage: int) -> None:
    """Documents of a row are kept apart in tensor groups."""
    options: dict[str, Any] = {"config": MODELS[model], "separators": Separators(ends=(7,))}
    expected = trained(setup(8, 3, **options))
    got = trained(setup(8, stage, axis=axis(stage, 4), **options))
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-6)
    assert (tokens(0, DIVISIBLE.block_size) == 7).any()  # tests/training/test_step_documents.py shows what it changes


@pytest.mark.wide
@pytest.mark.parametrize("stage", [0, 3])
def test_gated_delta_trains_as_one_device(stage: int) -> None:
    """Heads of gated DeltaNet are cut, beside gated attention, partial rotary positions, experts and a gated MLP."""
    options: dict[str, Any] = {"config": MODELS["qwen3_next"], "separators": Separators(ends=(7,))}
    got = trained(setup(8, stage, axis=axis(stage, 2), **options))
    assert_close(got, trained(setup(1, 0, **options)), rtol=2e-5, config=MODELS["qwen3_next"])


_MIXTURE: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "mlp_bias": False, "first_dense": 1}


@pytest.mark.parametrize("tuning", [None, Tuning(Adapters(2, 2.0, targets=("query",)))], ids=["all", "adapters"])
@pytest.mark.parametrize(
    ("devices", "changes", "leaf"),
    [
        (6, {}, "32, the size of blocks/.*"),
        (8, {**_MIXTURE, "dense_dim": 60}, "60, the size of first_blocks/mlp_in/.*"),
    ],
    ids=["heads", "first layers"],
)
def test_sizes_that_the_devices_do_not_divide(
    devices: int, changes: dict[str, Any], leaf: str, tuning: Tuning | None
) -> None:
    """Groups divide them, and the devices that hold the shards do not: refused by the name of the leaf."""
    config = dataclasses.replace(DIVISIBLE, embedding_dim=32, **changes)
    model = ShardedGPT(config, zero.Axis.with_tensor_groups("zero", devices, 2, 1), 3, tuning=tuning)
    message = f"zero.tensor_shards=2: {leaf} along which it is cut, does not divide over {devices} devices"
    with pytest.raises(UserError, match=message):
        state_layout(model, make_optimizer("adamw", 0.1, axes=model.axes), StepOptions(RATE))
        _ = model.frozen_layout


WIDE = GPTConfig(embedding_dim=256, vocab_size=512, num_head=8, block_size=128, dropout=0.0, N=4, vocab_chunks=2)


@pytest.mark.parametrize(
    "tensor",
    [pytest.param(4, marks=pytest.mark.wide), *(pytest.param(tensor, marks=pytest.mark.slow) for tensor in (1, 2, 8))],
)
def test_bytes_sent(tensor: int) -> None:
    """The bytes sent are those of the formula.

    Of docs/explanation/groups.md, "Tensor groups".
    """
    rows, context = 4, WIDE.block_size
    on = setup(8, 3, config=WIDE, axis=axis(3, tensor))
    batch = Batch(np.zeros((8, rows, context), np.int32), np.zeros(8, np.int32))
    compiled = on.programs.step.lower(shapes_of(on), batch).compile()
    sent = sum(collective.sent for collective in collectives(compiled.as_text()))
    weights = 0.0
    for leaf in on.model.layout_by_parts.leaves:
        spread = math.prod(move.over for move in leaf.moves)
        weights += 3 * math.prod(leaf.gathered_shape) * (spread - 1) / spread
    moves = 11 * WIDE.N + 4
    activations = moves * rows * context * WIDE.embedding_dim * (tensor - 1) / tensor
    assert sent == pytest.approx(4 * (weights + activations), rel=0.05)


APART = zero.Axis("zero", (1, 4, 2), tensor=4)  # positions 0, 2, 4, 6 and 1, 3, 5, 7 of the pmap axis
SHUFFLED = zero.Axis("zero", (1, 2, 4), (3, 6, 0, 5, 7, 2, 1, 4), tensor=2)


@pytest.mark.parametrize("placed", [APART, pytest.param(SHUFFLED, marks=pytest.mark.slow)])
def test_groups_may_lie_anywhere(placed: zero.Axis) -> None:
    """Groups of devices that are no neighbors train as devices alone, and decode alike; their losses are wide.

    Documents of a row are kept apart in them.
    """
    options: dict[str, Any] = {"config": DIVISIBLE, "separators": Separators(ends=(7,))}
    alone, on = setup(1, 3, **options), setup(8, 3, axis=placed, **options)
    expected = trained(alone)
    assert (tokens(0, DIVISIBLE.block_size) == 7).any()
    assert_close(trained(on), expected, rtol=1e-5, config=DIVISIBLE)
    found = []
    for one in (alone, on):
        programs = make_inference(one.model, Sampling(temperature=0), devices=one.devices)
        rows = np.maximum(tokens(0, 13)[:8], 0)
        found.append(
            list(generate(programs, one.first_weights(), [row[:3] for row in rows[:3]], 4, seed=0, chunk=4))[-1]
        )
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.slow
def test_copies_train_alike() -> None:
    """Copies of tensor groups train the same."""
    expected = trained(setup(8, 3, config=DIVISIBLE))
    copies = zero.Axis.with_tensor_groups("zero", 8, 2, replicas=2)
    assert_close(trained(setup(8, 3, config=DIVISIBLE, axis=copies)), expected, rtol=1e-6, config=DIVISIBLE)


def test_first_weights() -> None:
    """First weights of tensor groups equal those of the model on one device."""
    assert_first_weights(setup(8, 3, config=DIVISIBLE, axis=axis(3, 4)))


@pytest.mark.parametrize(
    "model",
    [
        *(pytest.param(name, marks=pytest.mark.wide) for name in ("plain", "qwen3_next")),
        pytest.param("gemma2", marks=pytest.mark.slow),
    ],
)
def test_losses_and_text(model: str) -> None:
    """Losses and text equal those of devices without groups.

    Also of rows that do not divide into equal parts of positions.
    """
    found, totals = [], []
    for on in (setup(8, 3, config=MODELS[model]), setup(8, 3, config=MODELS[model], axis=axis(3, 4))):
        programs = make_inference(on.model, Sampling(temperature=0), devices=on.devices)
        params = on.first_weights()
        rows = np.maximum(tokens(0, 13)[:8], 0)
        losses, is_greedy = programs.score(params, split_rows(rows, on.model.axis))
        prompts = [row[: 3 + i] for i, row in enumerate(rows[:3])]
        text = list(generate(programs, params, prompts, 6, seed=0, chunk=3))[-1]
        shown = split_rows(tokens(0, 13), on.model.axis)
        found.append((np.asarray(losses), np.asarray(is_greedy), text))
        total, scored, _ = on.programs.evaluate(params, shown)
        assert int(scored) == np.sum(tokens(0, 13)[:, 1:] >= 0)
        totals.append(float(total))
    assert totals[1] == pytest.approx(totals[0], rel=1e-5)
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    np.testing.assert_array_equal(found[1][1], found[0][1])
    np.testing.assert_array_equal(found[1][2], found[0][2])
