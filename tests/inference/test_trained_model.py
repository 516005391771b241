"""Mixtures of experts whose weights are held as codes for inference."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.training.small_gpt import CONFIG, RATE, first_params, tokens
from zero.inference.trained_model import IN_INT8, placed_weights
from zero.models.config import STACK, GPTConfig
from zero.models.families import FAMILIES
from zero.training.block_codes import dequantize, quantize
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.programs import make_programs
from zero.training.sharded_gpt import ShardedGPT

GROUPED: dict[str, Any] = {"num_head": 6, "head_dim": 10, "kv_heads": 3, "embedding_norm": False, "mlp_dim": 13}
MIXTURES = {
    "mixtral": GROUPED | {"experts": 5, "experts_per_token": 2},
    "gpt_oss": GROUPED | {"experts": 8, "experts_per_token": 2, "windows": (5, 0)},
}


def mixture(family: str) -> GPTConfig:
    return dataclasses.replace(CONFIG, dropout=0.0, **{**FAMILIES[family], **MIXTURES[family]})


def trained_params(size: GPTConfig) -> Any:
    """Weights as large as after training, so that rounding them is seen in the loss."""
    return jax.tree.map(lambda x: 8 * x, first_params(size))


def held_and_thawed(size: GPTConfig) -> Any:
    """The weights of which the codes of an int8 base are; norms stay float32."""

    def rounded(path: Any, x: jax.Array) -> jax.Array:
        return x if path[-1].key == "scale" else x.astype(jnp.bfloat16).astype(jnp.float32)

    def coded(blocks: Any) -> Any:
        return jax.tree.map(
            lambda x, code: dequantize(x.shape, code, "int8", jnp.float32), blocks, quantize(blocks, "int8")
        )

    params = jax.tree_util.tree_map_with_path(rounded, trained_params(size))
    return {**params, STACK: jax.jit(coded)(params[STACK])}


def loss_of(model: ShardedGPT, weights: Any) -> float:
    """Nats per token over rows of eight devices."""
    programs = make_programs(model, adamw(0.1, axes=model.axes), StepOptions(RATE), jax.devices()[:8])
    total, terms, _ = programs.evaluate(weights, tokens(0).reshape(8, -1, 12))
    return float(total) / int(terms)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("mixtral", (3,)),
        pytest.param("mixtral", (0,), marks=pytest.mark.wide),
        pytest.param("gpt_oss", (0, 3), marks=pytest.mark.slow),
    ],
)
def test_experts_in_int8_are_what_their_codes_stand_for(family: str, stages: tuple[int, ...]) -> None:
    """Sharded and whole, a mixture in codes scores as its weights after rounding, and not as the exact ones."""
    size = mixture(family)
    exact = ShardedGPT(size, zero.Axis("zero", (1, 8)), 3, drops=False)

    def placed(model: ShardedGPT, params: Any) -> Any:
        whole = model.layout.map(lambda leaf, x: np.asarray(x, leaf.dtype), params)
        return zero.to_devices(whole, model.layout, model.axis, jax.devices()[:8])

    expected = loss_of(exact, placed(exact, held_and_thawed(size)))
    for stage in stages:
        model = dataclasses.replace(exact, stage=stage, tuning=IN_INT8)
        weights = placed_weights(lambda base: placed(base, trained_params(size)), model)
        assert loss_of(model, weights) == pytest.approx(expected, rel=1e-5)
    assert abs(loss_of(exact, placed(exact, trained_params(size))) / expected - 1) > 1e-4
