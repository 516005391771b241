"""Whole steps of context groups, whose devices compute different positions of the same rows, against whole rows."""

import dataclasses
import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.training.small_gpt import (
    CONFIG,
    ROWS,
    Run,
    Setup,
    assert_close,
    assert_first_weights,
    first_params,
    run_on,
    setup,
    shapes_of,
    tokens,
)
from zero.costs.hlo import collectives
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gpt import GPT
from zero.partition.collectives.context_group import ContextGroup
from zero.training.batch import Batch, Separators
from zero.training.host_rows import split_rows

CONTEXT = 48  # of 2 devices pieces of 12 positions, of 4 of 6, of 8 of 3
# 5 heads and 43 divide by nothing.
ODD = dataclasses.replace(CONFIG, embedding_dim=40, num_head=5, block_size=CONTEXT)
_GROUPED: dict[str, Any] = {"num_head": 6, "head_dim": 10, "kv_heads": 3, "mlp_dim": 43}


def _of(family: str, **changes: Any) -> GPTConfig:
    return dataclasses.replace(ODD, **{"embedding_norm": False, **FAMILIES[family], **changes})


MODELS = {
    "gpt2": _of("gpt2", embedding_dropout=0.2),
    "bloom": _of("bloom"),
    "gpt_neo": _of("gpt_neo", windows=(0, 5)),
    "gpt_neox": _of("gpt_neox"),
    "llama": _of("llama", **_GROUPED, rotary_scaling=("dynamic", 4.0, 6.0)),  # of whole rows
    "mistral": _of("mistral", **_GROUPED, windows=(9,)),
    "qwen3": _of("qwen3", **_GROUPED),
    "gemma2": _of("gemma2", **_GROUPED, N=4, windows=(5, 0), attention_cap=0.5, logit_cap=0.5),
    "dense_lm": _of("dense_lm", z_loss=0.1),
    "plain": ODD,
    "swap": dataclasses.replace(ODD, embedding_dim=48, num_head=8),
    "swap_dense_lm": _of("dense_lm", embedding_dim=48, num_head=8, kv_heads=4),
    "gpt_oss": _of("gpt_oss", **_GROUPED, windows=(5, 0), experts=5, experts_per_token=2),
    "swap_gpt_oss": _of("gpt_oss", **_GROUPED | {"num_head": 8, "kv_heads": 4}, experts=5, experts_per_token=2),
    "swap_gemma2": _of(
        "gemma2", **_GROUPED | {"num_head": 8, "kv_heads": 4}, N=4, windows=(5, 0), attention_cap=0.5, logit_cap=0.5
    ),
    "qwen3_5": _of(
        "qwen3_5", **_GROUPED | {"head_dim": 8}, mixers=("delta", "attention"), delta_key_heads=8, delta_value_heads=16,
        delta_key_dim=5, delta_value_dim=3, dropout=0.0,
    ),
}  # fmt: skip
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "micro-batches": (3, {"micro_batches": 3}),
    "fused": (3, {"fused_update": True, "skip_bad_steps": False, "max_norm": None}),
    "nested": (3, {"remat": "nested"}),
    "not rematerialized": (3, {"remat": "none"}),
}
EVERY = [
    *(("plain", context, case) for context, case in itertools.product((2, 4, 8), CASES)),
    *((name, context, "stage 3") for name, context in itertools.product(MODELS, (2, 4, 8))),
    ("dense_lm", 8, "stage 1"),
    *(("swap", context, case) for context, case in itertools.product((2, 4, 8), CASES)),
]
SHORT = [("swap_dense_lm", 4, "nested")]  # test_documents_are_kept_apart is a short form
SLOW = sorted({*EVERY} - {*SHORT})


def trained(on: Setup) -> Run:
    return run_on(on, data=partial(tokens, context=CONTEXT))


def axis(context: int, **options: Any) -> zero.Axis:
    return zero.Axis("zero", (1, 8), context=context, **options)


@pytest.mark.parametrize(
    ("model", "context", "case"),
    [
        *(pytest.param(*each, marks=pytest.mark.wide) for each in SHORT),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_equals_whole_rows(model: str, context: int, case: str) -> None:
    """Context groups train as one device, with whole rows, does.

    With dropout, whose masks are those of whole rows.
    """
    stage, options = CASES[case]
    plain = {name: value for name, value in options.items() if name == "max_norm"}
    expected = trained(setup(1, 3, config=MODELS[model], **plain))
    got = trained(setup(8, stage, config=MODELS[model], axis=axis(context), **options))
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=2e-6)
    if model == "plain":
        assert_close(got, expected, rtol=1e-5, config=ODD)


@pytest.mark.parametrize(
    "model", ["mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "gpt2"))]
)
def test_documents_are_kept_apart(model: str) -> None:
    """Documents of a row are kept apart across the pieces of the row."""
    options: dict[str, Any] = {"config": MODELS[model], "separators": Separators(ends=(7,))}
    expected = trained(setup(1, 3, **options))
    got = trained(setup(8, 3, axis=axis(4), **options))
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=2e-6)
    assert (tokens(0, CONTEXT) == 7).sum() > ROWS / 4  # tests/training/test_step_documents.py shows what they change


@pytest.mark.wide
@pytest.mark.parametrize(("stage", "context"), [(0, 2), (3, 4)])
def test_gated_delta_trains_as_one_device(stage: int, context: int) -> None:
    """With documents, whose states and convolutions start anew in the middle of a piece."""
    options: dict[str, Any] = {"config": MODELS["qwen3_5"], "separators": Separators(ends=(7,))}
    got = trained(setup(8, stage, axis=axis(context), **options))
    # Adam makes of the tiny gradients of the decay as much on eight devices without groups.
    assert_close(got, trained(setup(1, 0, **options)), rtol=1e-4, config=MODELS["qwen3_5"])


@pytest.mark.parametrize(
    "on", [zero.Axis("zero", (2, 4), context=4), zero.Axis("zero", (1, 2, 4), (0, 4, 1, 5, 2, 6, 3, 7), context=2)]
)
@pytest.mark.slow
def test_copies_and_phases(on: zero.Axis) -> None:
    """Results of context groups do not depend on copies and phases."""
    expected = trained(setup(8, 3, config=ODD))
    assert_close(trained(setup(8, 3, config=ODD, axis=on)), expected, rtol=1e-6, config=ODD)


@pytest.mark.wide
def test_first_weights() -> None:
    """First weights of context groups equal those of the model on one device."""
    assert_first_weights(setup(8, 3, config=ODD, axis=axis(4)))


@pytest.mark.wide  # a step has the same forward pass
def test_evaluation_equals_whole_rows() -> None:
    """An evaluation gives the sums of whole rows."""
    totals = []
    rows = tokens(0, CONTEXT)
    for on in (setup(8, 3, config=ODD), setup(8, 3, config=ODD, axis=axis(4))):
        params = on.first_weights()
        total, scored, _ = on.programs.evaluate(params, split_rows(rows, on.model.axis))
        assert int(scored) == np.sum(rows[:, 1:] >= 0)
        totals.append(float(total))
    assert totals[1] == pytest.approx(totals[0], rel=1e-6)


def test_generation_with_whole_rows() -> None:
    """Generation has whole rows on each device of a group.

    Logits with a cache are those of a device by itself, where `hidden` asks the group for all positions.
    """
    shown = jnp.asarray(tokens(0, CONTEXT)[:2].clip(0))
    params = first_params(ODD)

    def logits(model: GPT) -> Any:
        return model.apply({"params": params}, shown, method="logits")[0]

    group = ContextGroup(axis(4))
    got = jax.pmap(lambda _: logits(GPT(ODD, row_group=group)), "zero")(jnp.zeros(8))
    np.testing.assert_allclose(got, np.broadcast_to(logits(GPT(ODD)), got.shape), rtol=1e-5, atol=1e-5)


LONG = GPTConfig(64, 128, 8, 8192, 0.0, 2)


@pytest.mark.slow  # a figure, not what a group computes; test_bytes_sent has the other one
@pytest.mark.parametrize("heads", [8, 3], ids=["swapped heads", "ring"])
def test_memory_of_activations(heads: int) -> None:
    """The memory of activations falls with the number of devices."""

    def temporaries(context: int) -> int:
        config = dataclasses.replace(LONG, num_head=heads, head_dim=8)
        on = setup(8, 3, config=config, axis=axis(context), blockwise_from=2)
        batch = Batch(np.zeros((8, 1, LONG.block_size), np.int32), np.zeros(8, np.int32))
        analysis: Any = on.programs.step.lower(shapes_of(on), batch).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    assert temporaries(8) < 1.25 * temporaries(1) / 8  # 1.21 with jaxlib 0.10.0, below 1.15 since


WIDE = GPTConfig(256, 512, 8, 128, 0.0, 4, vocab_chunks=2)


@pytest.mark.parametrize(
    ("context", "heads"),
    [
        (4, 8),
        pytest.param(4, 9, marks=pytest.mark.wide),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 8), (8, 8), (2, 9), (8, 9))),
    ],
)
def test_bytes_sent(context: int, heads: int) -> None:
    """The bytes sent are those of the formula.

    Of docs/explanation/groups.md, "Context groups".
    """
    rows, config = 4, dataclasses.replace(WIDE, num_head=heads, head_dim=32)
    on = setup(8, 3, config=config, axis=axis(context))
    batch = Batch(np.zeros((8, rows, WIDE.block_size), np.int32), np.zeros(8, np.int32))
    text = on.programs.step.lower(shapes_of(on), batch).compile().as_text()
    sent = sum(one.sent for one in collectives(text))
    weights = sum(3 * math.prod(leaf.shape) * 7 / 8 for leaf in on.model.layout.leaves)
    own = rows * WIDE.block_size / context * heads * config.head_width  # elements of queries, of keys and of values
    swapped, ring = 3 * 4 * own * (context - 1) / context, 3 * 2 * own * (context - 1) + 2 * own * context
    activations = WIDE.N * (ring if heads % context else swapped)
    assert sent == pytest.approx(4 * (weights + activations), rel=0.05)
