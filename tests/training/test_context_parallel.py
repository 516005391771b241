"""Devices that compute different positions of the same rows train as devices with whole rows do."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest

import zero
from tests.training.small_gpt import CONFIG, Run, Setup, run_on, setup, tokens
from zero.models.config import FAMILIES, GPTConfig

pytestmark = pytest.mark.usefixtures("quick_compilation")
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
    "llama": _of("llama", **_GROUPED, rotary_scaling=(8.0, 1.0, 4.0, 6.0)),
    "mistral": _of("mistral", **_GROUPED, windows=(9,)),
    "qwen3": _of("qwen3", **_GROUPED),
    "gemma2": _of("gemma2", **_GROUPED, N=4, windows=(5, 0), attention_cap=0.5, logit_cap=0.5),
    "dense_lm": _of("dense_lm", z_loss=0.1),
    "plain": ODD,
    "swap": dataclasses.replace(ODD, embedding_dim=48, num_head=8),
    "swap_dense_lm": _of("dense_lm", embedding_dim=48, num_head=8, kv_heads=4),
    "swap_gemma2": _of(
        "gemma2", **_GROUPED | {"num_head": 8, "kv_heads": 4}, N=4, windows=(5, 0), attention_cap=0.5, logit_cap=0.5
    ),
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "micro-batches": (3, {"micro_batches": 3}),
    "fused": (3, {"fused_update": True, "skip_bad_steps": False, "max_norm": None}),
    "nested": (3, {"remat": "nested"}),
    "not rematerialised": (3, {"remat": "none"}),
}
QUICK = [("plain", 2, "stage 3"), ("gemma2", 4, "stage 3"), ("dense_lm", 8, "stage 1")]
QUICK += [("swap", 8, "stage 3"), ("swap_dense_lm", 4, "stage 2"), ("swap_gemma2", 4, "stage 3")]


def trained(on: Setup) -> Run:
    return run_on(on, data=partial(tokens, context=CONTEXT))


def axis(context: int) -> zero.Axis:
    return zero.Axis("zero", (1, 8), context=context)


@pytest.mark.parametrize(("model", "context", "case"), QUICK)
def test_context_groups_train_as_devices_with_whole_rows(model: str, context: int, case: str) -> None:
    stage, options = CASES[case]
    plain = {name: value for name, value in options.items() if name == "max_norm"}
    expected = trained(setup(8, 3, config=MODELS[model], **plain))
    got = trained(setup(8, stage, config=MODELS[model], axis=axis(context), **options))
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-6)
