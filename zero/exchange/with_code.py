"""An export that carries its own code, `modeling_zero.py`, for models that no architecture of `transformers` equals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from zero.base.errors import UserError
from zero.exchange.architecture import Architecture
from zero.models.config import HEAD, STACK, VOCABULARY, GPTConfig
from zero.models.part import ATTENTION
from zero.models.positions.rotary import rotation_of

CODE = Path(__file__).with_name("modeling_zero.py")
_OF_LAYERS = (
    *("norm_attention", "query", "query_norm", "key", "key_norm", "value", "attention_out", "norm_attention_after"),
    *("norm_mlp", "mlp_gate", "mlp_in", "mlp_out", "norm_mlp_after"),
)
_SAME = (  # keys of config.json that are attributes of `GPTConfig`
    *("vocab_size", "norm", "norm_gains", "norm_epsilon", "norm_place", "qk_norm", "qk_norm_over", "windows"),
    *("attention_cap", "extra_logit", "qkv_bias", "out_bias", "mlp_bias", "parallel_residual", "activation", "gated"),
    *("tied", "embedding_norm", "scale_embedding", "embedding_multiplier", "residual_multiplier", "final_norm"),
    *("logit_cap", "distance_base"),
)
_KEYS = {  # those that transformers and its users look for have its names
    "hidden_size": "embedding_dim",
    "num_hidden_layers": "N",
    "num_attention_heads": "num_head",
    "num_key_value_heads": "key_heads",
    "head_dim": "head_width",
    "intermediate_size": "mlp_width",
    "max_position_embeddings": "block_size",
    "positions": "position_kind",
}
ZERO = Architecture(
    model_type="zero",
    class_name="ZeroForCausalLM",
    family="gpt2",
    keys=_KEYS | {name: name for name in _SAME},
    fixed={},
    prefix="",
    modules={
        VOCABULARY: "vocabulary",
        "positions": "positions",
        "embedding_norm": "embedding_norm",
        STACK: "blocks.{}.relative_bias",
        **{f"{STACK}/{name}": f"blocks.{{}}.{name}" for name in _OF_LAYERS},
        "norm": "norm",
        HEAD: "head",
    },
    written={
        "auto_map": {"AutoConfig": f"{CODE.stem}.ZeroConfig", "AutoModelForCausalLM": f"{CODE.stem}.ZeroForCausalLM"},
        "tie_word_embeddings": False,  # the code itself shares the table
    },
)


def computed_keys(size: GPTConfig) -> dict[str, Any]:
    """The keys of config.json that are computed from several choices of a model.

    Raises:
      UserError: `modeling_zero.py` does not compute this model.
    """
    missing = {"layer: gated_units": size.layer == "gated_units", "experts": size.experts is not None}
    missing["latent_dim"] = size.latent_dim is not None
    missing["rotary_interleaved"] = size.rotary_interleaved
    missing[f"mixers: {list(size.mixers)}"] = {*size.mixers} != {ATTENTION}
    missing["attention_gate"] = size.attention_gate
    missing["extra_logit: learned"] = size.extra_logit == "learned"
    missing[f"activation: {size.activation}"] = size.activation in ("clamped_swiglu", "xielu")
    missing[f"rotary_scaling: {size.rotary_kind}"] = size.rotary_switch is not None
    for name, is_used in missing.items():
        if is_used:
            raise UserError(f"this model has {name}, which {CODE.name} does not compute: it cannot be exported")
    multipliers = {"linear": 1 / size.head_width, "none": 1.0}
    keys: dict[str, Any] = {
        "score_multiplier": multipliers.get(size.attention_scale, size.score_multiplier),
        "logit_multiplier": size.output_scale / (math.sqrt(size.embedding_dim) if size.scale_output else 1),
    }
    if size.position_kind == "rotary":
        keys["rotations"] = [_rotation(size, layer) for layer in range(size.N)]
        if keys["rotations"] == keys["rotations"][:1] * size.N:
            keys["rotations"] = keys["rotations"][:1]
    return keys


def _rotation(size: GPTConfig, layer: int) -> dict[str, Any]:
    """Scaled frequencies, so that the code needs no rule of any scaling."""
    frequencies_R, length = rotation_of(size, layer, size.block_size)
    return {"frequencies": np.asarray(frequencies_R, np.float64).tolist(), "length": float(length)}
