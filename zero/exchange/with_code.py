"""An export that carries its own code, `modeling_zero.py`, for models that no architecture of `transformers` equals.

The code is one more architecture: keys of a model that it reads are written, all others must have their defaults.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zero.base.errors import UserError
from zero.exchange.architecture import Architecture
from zero.models.config import HEAD, STACK, VOCABULARY, GPTConfig
from zero.models.gpt import parameter_axes
from zero.models.positions.rotary import rotation_of

CODE = Path(__file__).with_name("modeling_zero.py")
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
        "norm": "norm",
        HEAD: "head",
    },
    computed={
        "positions": ("positions", "alibi_attn"),
        "score_multiplier": ("attention_scale",),
        "logit_multiplier": ("output_scale", "scale_output"),
        "rotations": (
            *("rotary_base", "rotary_fraction", "rotary_dim", "rotary_scaling"),
            *("local_rotary_base", "unrotated_every"),
        ),
    },
    values={
        "norm": ("layer", "rms", "rms_offset"),
        "norm_place": ("before", "after", "both"),
        "qk_norm_over": ("head", "projection"),
        "activation": ("gelu", "gelu_exact", "relu", "squared_relu", "selu", "silu"),
        "position_kind": ("learned", "alibi", "rotary", "t5", "sinusoidal", "none"),
        "extra_logit": (False, True),
        "rotary_switch": (None,),  # no frequencies that depend on the length of the text
    },
    written={
        "auto_map": {"AutoConfig": f"{CODE.stem}.ZeroConfig", "AutoModelForCausalLM": f"{CODE.stem}.ZeroForCausalLM"},
        "tie_word_embeddings": False,  # the code itself shares the table
    },
)


def architecture_with_code(model_config: GPTConfig) -> Architecture:
    """`ZERO` with the modules of this model's layers, which the code calls by the same names."""
    of_layers = [name.rpartition("/")[0] for name, axes in parameter_axes(model_config).items() if axes.is_of_layers]
    same = {name: name.replace(STACK, f"{STACK}.{{}}", 1).replace("/", ".") for name in of_layers if name != STACK}
    return replace(ZERO, modules={**ZERO.modules, **same})


def computed_keys(model_config: GPTConfig) -> dict[str, Any]:
    """`ZERO.computed` of this model.

    Raises:
      UserError: `modeling_zero.py` does not compute this model.
    """
    if differing := ZERO.differences(model_config):
        raise UserError(f"{CODE.name} does not compute this model: it has {', '.join(differing)}")
    multipliers = {"linear": 1 / model_config.head_width, "none": 1.0}
    keys: dict[str, Any] = {
        "score_multiplier": multipliers.get(model_config.attention_scale, model_config.score_multiplier),
        "logit_multiplier": model_config.output_scale
        / (math.sqrt(model_config.embedding_dim) if model_config.scale_output else 1),
    }
    if model_config.position_kind == "rotary":
        keys["rotations"] = [_rotation(model_config, layer) for layer in range(model_config.N)]
        if keys["rotations"] == keys["rotations"][:1] * model_config.N:
            keys["rotations"] = keys["rotations"][:1]
    return keys


def _rotation(model_config: GPTConfig, layer: int) -> dict[str, Any]:
    """Scaled frequencies, so that the code needs no rule of any scaling."""
    frequencies_R, length = rotation_of(model_config, layer, model_config.block_size)
    return {"frequencies": np.asarray(frequencies_R, np.float64).tolist(), "length": float(length)}
