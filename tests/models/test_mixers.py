"""Each key of attention in models of each mixer: the program depends on it, or the model refuses it by name."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from zero.models.attention_keys import Attention
from zero.models.config import GPTConfig
from zero.models.delta_keys import Delta
from zero.models.latent_keys import Latent
from zero.models.linear_keys import Linear
from zero.models.mixer import LayerContext
from zero.models.mixers import MIXERS
from zero.models.part import own_keys
from zero.models.positions import Positions
from zero.models.positions.rotary import Rotary

SIZES: dict[str, Any] = {
    "embedding_dim": 16,
    "vocab_size": 16,
    "num_head": 2,
    "block_size": 8,
    "dropout": 0.0,
    "N": 1,
    "alibi_attn": False,
    "positions": "none",
    "qkv_bias": False,
    "out_bias": False,
}
ROTARY: dict[str, Any] = {"positions": "rotary"}
LATENT: dict[str, Any] = {**ROTARY, "rotary_dim": 4, "latent_dim": 6}
MODELS: dict[str, dict[str, Any]] = {
    "attention": {},
    "latent attention": LATENT,
    "delta": {"mixers": ("delta",)},
    "linear": {"mixers": ("linear",)},
}
# Keys, each with another value, and the keys that it needs.
CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    ("head_dim", 12, {}),
    ("kv_heads", 1, {}),
    ("windows", (2,), {}),
    ("qk_norm", True, {}),
    ("qk_norm_over", "projection", {"qk_norm": True, "norm": "rms"}),
    ("alibi_attn", True, {"positions": "learned"}),
    ("positions", "rotary", {}),
    ("positions", "t5", {}),
    ("rotary_base", 100.0, ROTARY),
    ("rotary_fraction", 0.5, ROTARY),
    ("rotary_dim", 2, ROTARY),
    ("rotary_interleaved", True, ROTARY),
    ("rotary_scaling", ("linear", 2.0), ROTARY),
    ("local_rotary_base", 100.0, {**ROTARY, "windows": (2,)}),
    ("unrotated_every", 1, ROTARY),
    ("attention_scale", "none", {}),
    ("attention_cap", 2.0, {}),
    ("extra_logit", True, {}),
    ("extra_logit", "learned", {}),
    ("qkv_bias", True, {}),
    ("out_bias", True, {}),
    ("attention_gate", True, {}),
    ("attention_dropout", 0.5, {}),
    ("latent_dim", 8, {**ROTARY, "rotary_dim": 4}),
    ("query_latent_dim", 6, LATENT),
    ("value_dim", 4, LATENT),
    ("delta_key_heads", 1, {}),
    ("delta_value_heads", 4, {}),
    ("delta_key_dim", 4, {}),
    ("delta_value_dim", 4, {}),
    ("delta_taps", 3, {}),
    ("linear_features", "relu", {}),
    ("linear_epsilon", 0.1, {}),
]


def test_each_key_of_a_mixer_has_a_change() -> None:
    parts = (Positions, Rotary, Attention, Latent, Delta, Linear)
    keys = {field.name for part in parts for field in own_keys(part)}
    assert keys <= {key for key, _, _ in CHANGES}, "CHANGES has no other value of a new key"


def program(keys: dict[str, Any]) -> tuple[str, list[Any]]:
    """The mixer of the first layer with its initial weights: its operations and its constants."""
    config = GPTConfig(**SIZES | keys)
    mixer = MIXERS[config.mixers[0]].module(config=config, dtype=jnp.float32)

    def output(key: jax.Array, h_BTD: jax.Array) -> Any:
        return mixer.init_with_output(key, h_BTD, None, LayerContext(0, 0, 0, None, key[None], None))

    traced = jax.make_jaxpr(output)(jax.random.key(0), jnp.zeros((1, 4, config.embedding_dim)))
    return str(traced.jaxpr), [constant.tolist() for constant in traced.consts]


# Of families whose layers of attention read them; config.json has them in a part without such layers too.
OF_OTHER_LAYERS = {
    "delta": {field.name for part in (Positions, Rotary, Attention, Latent) for field in own_keys(part)}
    | {"kv_heads", "windows", "qk_norm", "qk_norm_over"}
}


@pytest.mark.parametrize("mixer", MODELS)
def test_no_key_is_without_effect_in_silence(mixer: str) -> None:
    """In a model whose layers all have this mixer."""
    silent = []
    for key, value, needed in CHANGES:
        before = MODELS[mixer] | needed
        try:
            is_read = program(before | {key: value}) != program(before)
        except ValueError as refusal:
            is_read = re.search(rf"\b({'|'.join((key, *needed))})\b", str(refusal)) is not None
        is_excused = key in OF_OTHER_LAYERS.get(mixer, ())
        if not is_read and not is_excused and before.get(key, SIZES.get(key)) != value:
            silent.append(f"{key}={value}")
    assert not silent
