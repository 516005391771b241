"""Whole steps with linear attention on shards and in groups of devices, beside one device."""

import dataclasses
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import zero
from tests.training.small_gpt import CONFIG, Run, assert_close, reference, run_on, setup, tokens
from zero.training.batch import Separators

CONTEXT = 16
LINEAR = dataclasses.replace(
    CONFIG, embedding_dim=48, num_head=8, kv_heads=4, block_size=CONTEXT, dropout=0.0, alibi_attn=False,
    positions="none", mixers=("linear", "attention"),
)  # fmt: skip
TENSOR, CONTEXTS = zero.Axis.with_tensor_groups("zero", 8, 4), zero.Axis("zero", (1, 8), context=2)
_WIDE = pytest.mark.wide
DATA = partial(tokens, context=CONTEXT)


@cache
def one_device() -> Run:
    return reference(LINEAR, data=DATA)


@pytest.mark.parametrize(
    ("devices", "stage", "options"),
    [
        pytest.param(1, 0, {}, marks=_WIDE),
        pytest.param(1, 3, {}, marks=_WIDE),
        pytest.param(3, 0, {}, marks=_WIDE),
        pytest.param(3, 3, {}, marks=_WIDE),
        pytest.param(8, 0, {}, marks=_WIDE),
        pytest.param(8, 0, {"axis": TENSOR}, marks=_WIDE),
        (8, 3, {"axis": TENSOR}),
        pytest.param(8, 3, {"axis": CONTEXTS}, marks=_WIDE),
    ],
)
def test_steps_are_those_of_one_device(devices: int, stage: int, options: dict[str, Any]) -> None:
    got = run_on(setup(devices, stage, config=LINEAR, **options), data=DATA)
    assert_close(got, one_device(), rtol=5e-5, config=LINEAR)


@pytest.mark.wide
def test_documents_start_anew_in_context_groups() -> None:
    """In the middle of a piece of a row."""
    tokens = DATA(0)
    end = int(np.bincount(tokens[tokens >= 0]).argmax())
    assert (tokens == end).sum() > 3
    options: dict[str, Any] = {"config": LINEAR, "separators": Separators(ends=(end,))}
    expected = run_on(setup(1, 0, **options), data=DATA)
    assert_close(run_on(setup(8, 3, axis=CONTEXTS, **options), data=DATA), expected, rtol=5e-5, config=LINEAR)
