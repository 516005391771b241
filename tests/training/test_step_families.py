"""Whole steps of every family on shards against one device, and of layers that differ from each other."""

import dataclasses
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import zero
from tests.training.divisible_models import MODELS
from tests.training.small_gpt import CONFIG, Run, assert_close, assert_first_weights, reference, run_on, setup, tokens
from zero.models.attention.blockwise import blockwise_attention
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gpt import parameter_axes
from zero.training.objectives.mtp import Mtp
from zero.training.optimizers.optimizer import make_optimizer

# Nothing divides by 8: grouped heads of 10, windows shorter than the context of 12.
_GROUPED: dict[str, Any] = {"num_head": 6, "head_dim": 10, "kv_heads": 3, "mlp_dim": 61}


def _of(family: str, **changes: Any) -> GPTConfig:
    return dataclasses.replace(CONFIG, **{"embedding_norm": False, "dropout": 0.0, **FAMILIES[family], **changes})


TRAINED = {
    "gpt2": _of("gpt2"),
    "bloom": _of("bloom"),
    "gpt_neo": _of("gpt_neo", windows=(0, 5)),
    "gpt_neox": _of("gpt_neox", embedding_dim=48),
    "llama": _of("llama", **_GROUPED, rotary_scaling=(8.0, 1.0, 4.0, 6.0)),
    "mistral": _of("mistral", **_GROUPED, windows=(5,)),
    "qwen3": _of("qwen3", **_GROUPED),
    "qwen2": _of("qwen2", **_GROUPED, rotary_scaling=("yarn", 4.0, 6.0, 8.0, 1.0, 1.2)),
    "smollm3": _of("smollm3", **_GROUPED, unrotated_every=2),
    "olmo2": _of("olmo2", **_GROUPED),
    "olmo3": _of("olmo3", **_GROUPED, N=4, windows=(5, 0), rotary_scaling=("linear", 4.0)),
    "stablelm": _of("stablelm", **{**_GROUPED, "kv_heads": 6}, rotary_fraction=0.4),
    "starcoder2": _of("starcoder2", **{**_GROUPED, "kv_heads": 1}, windows=(5,)),
    "granite": _of(
        "granite", **_GROUPED, embedding_multiplier=3.0, residual_multiplier=0.5, attention_scale=0.25,
        output_scale=0.5,
    ),
    "glm4_moe": _of(
        "glm4_moe", **{**_GROUPED, "head_dim": 12}, N=3, experts=5, experts_per_token=2, shared_dim=13, dense_dim=21,
        router_bias_rate=None,
    ),
    "deepseek_v3": _of(
        "deepseek_v3", num_head=3, head_dim=11, rotary_dim=4, latent_dim=13, query_latent_dim=17, value_dim=9, N=3,
        mlp_dim=13, experts=8, experts_per_token=2, shared_dim=13, dense_dim=21, router_bias_rate=None, first_dense=1,
        attention_scale=0.4, router_groups=4, router_groups_per_token=2,
    ),
    "seed_oss": _of("seed_oss", **_GROUPED),
    "arcee": _of("arcee", **_GROUPED),
    "apertus": _of("apertus", **_GROUPED, rotary_scaling=(8.0, 1.0, 4.0, 6.0)),
    "glm4": _of("glm4", **{**_GROUPED, "head_dim": 12}),
    "olmoe": _of("olmoe", **_GROUPED, experts=5, experts_per_token=2),
    "granitemoe": _of("granitemoe", **_GROUPED, experts=5, experts_per_token=2, attention_scale=0.25),
    "gemma": _of("gemma", **_GROUPED),
    "gemma3": _of("gemma3", **_GROUPED, N=4, windows=(5, 0), logit_cap=0.5, attention_scale=0.25),
    "gemma2": _of("gemma2", **_GROUPED, N=4, windows=(5, 0), attention_cap=0.5, logit_cap=0.5),
    "gpt_oss": _of("gpt_oss", **_GROUPED, windows=(5, 0), experts=5, experts_per_token=2),
    "gpt_oss, one window": _of("gpt_oss", **_GROUPED, windows=(7,), experts=5, experts_per_token=2),
    "dense_lm": _of(  # with the norms of Olmo 2 and 3
        "dense_lm", **{**_GROUPED, "kv_heads": 1}, z_loss=0.1, norm_place="after", qk_norm=True,
        qk_norm_over="projection",
    ),
    "qwen3_5": _of(
        "qwen3_5", **{**_GROUPED, "head_dim": 8}, N=4, mixers=("delta", "attention"), delta_key_heads=3,
        delta_value_heads=6, delta_key_dim=5, delta_value_dim=7,
    ),
    "qwen3_next": _of(
        "qwen3_next", **{**_GROUPED, "head_dim": 8, "mlp_dim": 13}, N=4, mixers=("delta", "attention"),
        delta_key_heads=3, delta_value_heads=3, delta_key_dim=5, experts=5, experts_per_token=2, shared_dim=21,
    ),
    "qwen2_moe": _of("qwen2_moe", **{**_GROUPED, "mlp_dim": 13}, experts=5, experts_per_token=2, shared_dim=21),
    "others": _of(
        "gpt2", positions="none", norm="rms", norm_place="after", activation="squared_relu", attention_scale="linear",
        windows=(0, 3), qk_norm=True,
    ),
    "dropouts": _of("gpt2", N=4, embedding_dropout=0.2, attention_dropout=0.3),
}  # fmt: skip


@cache
def trained(family: str, devices: int, stage: int, **options: Any) -> Run:
    return run_on(setup(devices, stage, config=TRAINED[family], **options))


# Of the parameters of the other families it lacks the table of positions (test_step_last_target.py), experts
# (test_step_experts.py), the norm of the embedding (test_step.py) and norms of single heads, which are as those of a
# projection. tests/models compares what layers compute.
# Sharding has no branch for a family.
WIDE = [("gemma2", 8, 3), ("gpt_oss, one window", 8, 3), ("dense_lm", 3, 1), ("qwen3_5", 3, 3), ("qwen3_next", 3, 3)]
UNROLLED = {"gemma2": {"remat": "none"}}  # layers of different windows, which test_fused_update.py has in its loops
SLOW = {(family, devices, stage) for family in TRAINED for devices in (1, 3, 8) for stage in range(4)} - {*WIDE}


@pytest.mark.parametrize(
    ("family", "devices", "stage"),
    [
        *(pytest.param(*case, marks=pytest.mark.wide) for case in WIDE),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(SLOW)),
    ],
)
def test_every_stage_trains_as_one_device(family: str, devices: int, stage: int) -> None:
    expected = trained(family, 1, 0)
    losses = expected.metrics["loss"]
    got = trained(family, devices, stage, **UNROLLED.get(family, {}))
    np.testing.assert_allclose(got.metrics["loss"], losses, rtol=1e-6)
    norms = expected.metrics["gradient_norm"]
    np.testing.assert_allclose(got.metrics["gradient_norm"], norms, rtol=1e-4)


MTP: dict[str, Any] = {"objective": Mtp().objective()}
WITH_MTP = dataclasses.replace(TRAINED["deepseek_v3"], predictor=True)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("config", "objective"), [(WITH_MTP, MTP), (TRAINED["qwen3_next"], {})], ids=["deepseek_v3", "qwen3_next"]
)
def test_muon_trains_as_one_device(config: GPTConfig, objective: dict[str, Any]) -> None:
    """Its matrices are those of latent attention, of gated DeltaNet, and of a predictor's layer with experts too.

    Convolutions and decays are Adam's.
    """
    muon = make_optimizer("muon", 0.1, axes=parameter_axes(config))
    options: dict[str, Any] = {"config": config, "tx": muon, **objective}
    expected, got = run_on(setup(1, 0, **options)), run_on(setup(3, 3, **options))
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=pytest.mark.wide if family == "gemma2" else pytest.mark.slow) for family in TRAINED],
)
def test_first_weights(family: str) -> None:
    """First weights equal those of the model on one device."""
    assert_first_weights(setup(3, 3, config=TRAINED[family]))


FUSED: dict[str, Any] = {"fused_update": True, "max_norm": None, "skip_bad_steps": False}


@pytest.mark.slow
@pytest.mark.parametrize("options", [FUSED, {"remat": "none"}], ids=["fused", "unrolled"])
def test_layers_of_different_windows(options: dict[str, Any]) -> None:
    """Layers of different windows train the same with every loop over the layers."""
    same = {name: value for name, value in options.items() if name in ("max_norm", "skip_bad_steps")}
    expected = trained("gemma2", 8, 3, **same)
    np.testing.assert_allclose(trained("gemma2", 8, 3, **options).metrics["loss"], expected.metrics["loss"], rtol=1e-6)


# test_step_context_groups.py has dropout in nested layers, test_gpt.py the rates, test_step_last_target.py learned
# positions.
@pytest.mark.parametrize(
    "remat", [pytest.param("nested", marks=pytest.mark.wide), pytest.param("full", marks=pytest.mark.slow)]
)
def test_dropout_masks(remat: str) -> None:
    """Dropout masks equal those of the model on one device."""
    losses = trained("dropouts", 8, 3, **({} if remat == "full" else {"remat": remat})).metrics["loss"]
    np.testing.assert_allclose(losses, reference(TRAINED["dropouts"]).metrics["loss"], rtol=1e-5)


@pytest.mark.slow  # the test above has those of nested layers
@pytest.mark.parametrize("options", [FUSED, {"remat": "nested"}], ids=["fused", "nested"])
def test_embedding_masks(options: dict[str, Any]) -> None:
    """Masks of the embedding are the same in every pass."""
    same = {name: value for name, value in options.items() if name in ("max_norm", "skip_bad_steps")}
    expected = trained("dropouts", 8, 3, **same)
    np.testing.assert_allclose(
        trained("dropouts", 8, 3, **options).metrics["loss"], expected.metrics["loss"], rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_norm_over_a_cut_projection(stage: int) -> None:
    """In tensor groups a norm over all heads is that of the heads of all devices."""
    config = dataclasses.replace(TRAINED["olmo3"], embedding_dim=48, num_head=8, kv_heads=4, head_dim=8, mlp_dim=64)
    axis = zero.Axis.with_tensor_groups("zero", 8, 2, 1)
    got = run_on(setup(8, stage, config=config, axis=axis)).metrics["loss"]
    np.testing.assert_allclose(got, run_on(setup(1, 0, config=config)).metrics["loss"], rtol=1e-5)


GROUPS = {
    "tensor": zero.Axis.with_tensor_groups("zero", 8, 2, 1),
    "context": zero.Axis("zero", (1, 8), context=2),
}


@pytest.mark.wide
@pytest.mark.parametrize("kind", GROUPS)
def test_learned_scalars_of_an_activation_in_groups(kind: str) -> None:
    """Devices of a group have other hidden values or positions; the gradient of a scalar is the sum over all."""
    config = MODELS["apertus"]
    rows = partial(tokens, context=config.block_size)
    got = run_on(setup(8, 3, config=config, axis=GROUPS[kind]), data=rows)
    expected = run_on(setup(1, 0, config=config), data=rows)
    assert_close(got, expected, rtol=1e-5, config=config)


@pytest.mark.slow
def test_blocks_of_positions_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero.models.self_attention.blockwise_attention", partial(blockwise_attention, block=3))
    for family in ("gemma2", "dense_lm"):
        got = trained(family, 8, 3, blockwise_from=2)
        np.testing.assert_allclose(got.metrics["loss"], trained(family, 1, 0).metrics["loss"], rtol=1e-6)
