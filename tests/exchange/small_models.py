"""A small model of each architecture of transformers that zero reads, with all keys of its class.

- `small`: the keys of its config.json. `theirs`: a model of transformers with them.
- `logits_of_peft`: what PEFT computes with a folder of adapters.
"""

from pathlib import Path
from typing import Any

import numpy as np

from zero.exchange.architecture_table import ARCHITECTURES

LAYERS = 4
SHAPES = (
    {"vocab_size": 101, "hidden_size": 40, "n_embd": 40, "intermediate_size": 52, "n_inner": 52},
    dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), LAYERS),
    dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    {"num_key_value_heads": 2, "max_position_embeddings": 64, "n_positions": 64, "seq_length": 64},
    {"head_dim": 10, "sliding_window": 7, "window_size": 7, "moe_intermediate_size": 24, "initializer_range": 0.4},
    {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "pad_token_id": None},
    {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 1},
    {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 14},
    {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 6, "linear_value_head_dim": 4},
    {"linear_conv_kernel_dim": 3, "shared_expert_intermediate_size": 28},
    {"attention_types": [[["global", "local"], 2]], "query_pre_attn_scalar": 11},
)


def small(model_type: str) -> dict[str, Any]:
    """The keys of a small model of this family that zero reads."""
    import transformers

    kind = transformers.CONFIG_MAPPING[model_type]
    known = {key for keys in SHAPES for key in keys} & {*kind().to_dict()}
    keys: dict[str, Any] = {key: value for part in SHAPES for key, value in part.items() if key in known}
    if model_type == "smollm3":
        keys["sliding_window"] = 7
    for key, value in ARCHITECTURES[model_type].fixed.items():
        keys[key] = value
    if model_type == "deepseek_v3":
        del keys["head_dim"]  # which the class sets to the rotated part
        keys["num_key_value_heads"] = 4
    if model_type in ("glm4", "glm4_moe"):
        keys["head_dim"] = 12  # of which the half is even
    if model_type in ("qwen3_5_text", "qwen3_next"):
        keys["head_dim"] = 16  # of which the quarter is even
        keys["initializer_range"] = 0.1  # with larger weights transformers rounds by more than the tests allow
    if model_type == "gpt_oss":
        keys["layer_types"] = ["sliding_attention", "full_attention"] * 2
    return kind(**keys).to_dict()


def theirs(keys: dict[str, Any]) -> Any:
    """A model of transformers with random weights."""
    import transformers

    config = transformers.CONFIG_MAPPING[keys["model_type"]].from_dict(dict(keys))
    transformers.set_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager")
    for name, x in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # which begins at zero
            x.normal_(0, 0.3)
    return model


def logits_of_peft(base: Path, adapters: Path, tokens: np.ndarray) -> np.ndarray:
    """The logits of the last position, `(rows, vocabulary)`, of a model of transformers with PEFT's adapters."""
    import peft
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = peft.PeftModel.from_pretrained(auto.from_pretrained(base, attn_implementation="eager"), str(adapters))
    with torch.no_grad():
        return np.asarray(model(torch.tensor(tokens)).logits[:, -1])
