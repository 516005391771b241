"""Model families: the keys that the published models of a family share."""

from __future__ import annotations

from typing import Any

# Keys that differ from the defaults; an entry of conf/model_config.yaml with `family` starts from them.
_ROTARY: dict[str, Any] = {"alibi_attn": False, "positions": "rotary"}
_NO_BIASES: dict[str, Any] = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_LLAMA: dict[str, Any] = {
    **_ROTARY,
    **_NO_BIASES,
    "norm": "rms",
    "norm_epsilon": 1e-5,
    "activation": "silu",
    "gated": True,
    "tied": False,
}
_OLMO2: dict[str, Any] = {
    **_LLAMA,
    "norm_epsilon": 1e-6,
    "norm_place": "after",
    "qk_norm": True,
    "qk_norm_over": "projection",
    "rotary_base": 5e5,
}
_GEMMA: dict[str, Any] = {
    **_ROTARY,
    **_NO_BIASES,
    "norm": "rms_offset",
    "activation": "gelu",
    "gated": True,
    "scale_embedding": True,
}
# Experts of DeepSeek-V3, arXiv 2412.19437, section 4.2.
_BALANCED: dict[str, Any] = {
    "router": "sigmoid",
    "normalize_router": True,
    "router_bias_rate": 0.001,
    "experts_per_token": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"alibi_attn": False, "norm_epsilon": 1e-5},
    "bloom": {"embedding_norm": True, "norm_epsilon": 1e-5},
    "gpt_neo": {
        "alibi_attn": False,
        "norm_epsilon": 1e-5,
        "windows": (0, 256),
        "attention_scale": "none",
        "qkv_bias": False,
    },
    "gpt_neox": {
        **_ROTARY,
        "rotary_fraction": 0.25,
        "norm_epsilon": 1e-5,
        "parallel_residual": True,
        "activation": "gelu_exact",
        "tied": False,
    },
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "windows": (4096,)},
    "qwen2": {**_LLAMA, "qkv_bias": True, "norm_epsilon": 1e-6, "rotary_base": 1e6},
    "smollm3": {**_LLAMA, "norm_epsilon": 1e-6, "rotary_base": 5e6, "unrotated_every": 4, "tied": True},
    "olmo2": _OLMO2,
    "olmo3": {**_OLMO2, "windows": (4096, 4096, 4096, 0), "local_rotary_base": 5e5},
    "stablelm": {**_LLAMA, "norm": "layer", "rotary_fraction": 0.25},
    "starcoder2": {**_ROTARY, "norm_epsilon": 1e-5, "windows": (4096,)},
    "phi3": _LLAMA,
    "granite": {**_LLAMA, "norm_epsilon": 1e-6, "tied": True},
    "qwen3": {**_LLAMA, "qk_norm": True, "norm_epsilon": 1e-6, "rotary_base": 1e6},
    "mixtral": {
        **_LLAMA,
        "rotary_base": 1e6,
        "experts": 8,
        "experts_per_token": 2,
        "normalize_router": True,
        "balance_loss": 0.02,
    },
    "qwen3_moe": {
        **_LLAMA,
        "qk_norm": True,
        "norm_epsilon": 1e-6,
        "rotary_base": 1e6,
        "experts": 128,
        "experts_per_token": 8,
        "normalize_router": True,
        "balance_loss": 0.001,
    },
    "glm4_moe": {
        **_LLAMA,
        **_BALANCED,
        "rotary_fraction": 0.5,
        "rotary_base": 1e6,
        "experts": 128,
        "first_dense": 1,
    },
    "deepseek_v3": {
        **_LLAMA,
        **_BALANCED,
        "norm_epsilon": 1e-6,
        "head_dim": 192,
        "rotary_dim": 64,
        "rotary_interleaved": True,
        "latent_dim": 512,
        "query_latent_dim": 1536,
        "value_dim": 128,
        "experts": 256,
        "router_groups": 8,
        "router_groups_per_token": 4,
        "router_scale": 2.5,
        "first_dense": 3,
    },
    "gpt_oss": {
        **_LLAMA,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "rotary_base": 1.5e5,
        "rotary_scaling": ("yarn_unrounded", 32.0, 4096.0, 32.0, 1.0, 1.3465735902799727),
        "windows": (128, 0),
        "extra_logit": "learned",
        "activation": "clamped_swiglu",
        "experts": 32,
        "experts_per_token": 4,
        "normalize_router": True,
    },
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "norm_place": "both", "windows": (4096, 0), "attention_cap": 50.0, "logit_cap": 30.0},
    "gemma3": {
        **_GEMMA,
        "norm_place": "both",
        "qk_norm": True,
        "windows": (1024, 1024, 1024, 1024, 1024, 0),
        "rotary_base": 1e6,
        "local_rotary_base": 1e4,
    },
    # The dense models of Lingvo's GShard examples (lingvo/tasks/lm/params/synthetic_packed_input.py).
    "dense_lm": {
        **_NO_BIASES,
        "alibi_attn": False,
        "positions": "t5",
        "norm": "rms",
        "activation": "gelu",
        "gated": True,
        "extra_logit": True,
        "scale_output": True,
        "z_loss": 1e-4,
    },
    # Transformer-VQ, arXiv 2309.16354.
    "vq": {"layer": "gated_units", "alibi_attn": False, "positions": "none", "norm": "rms", "num_head": 1},
}
