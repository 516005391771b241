"""The architectures of `transformers` that models of zero equal: names of their tensors and keys of config.json.

The reasons for this choice are in docs/decisions/interchange.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from zero.base.errors import UserError
from zero.exchange.architecture import FUSED_QKV, Architecture, FurtherLayers
from zero.models.config import FIRST, HEAD, STACK, VOCABULARY, GPTConfig
from zero.models.mlp import XIELU_BETA, XIELU_EPSILON
from zero.models.mtp import MTP, MTP_JOIN, MTP_NORM
from zero.models.router import ROUTER_BIAS


def _layers(names: Mapping[str, str], prefix: str = "layers") -> dict[str, str]:
    """Modules of a layer, by name within it."""
    return {f"{STACK}/{name}": f"{prefix}.{{}}.{hf_name}" for name, hf_name in names.items()}


def _megatron_names(attention: str) -> dict[str, str]:
    """Modules of a layer as Megatron-LM names them, and after it BLOOM and GPT-NeoX."""
    return {
        "norm_attention": "input_layernorm",
        **dict.fromkeys(FUSED_QKV, f"{attention}.query_key_value"),
        "attention_out": f"{attention}.dense",
        "norm_mlp": "post_attention_layernorm",
        "mlp_in": "mlp.dense_h_to_4h",
        "mlp_out": "mlp.dense_4h_to_h",
    }


GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    family="gpt2",
    keys={
        "vocab_size": "vocab_size",
        "n_positions": "block_size",
        "n_embd": "embedding_dim",
        "n_layer": "N",
        "n_head": "num_head",
        "n_inner": "mlp_width",
        "layer_norm_epsilon": "norm_epsilon",
        "attn_pdrop": "attention_drop_rate",
        "resid_pdrop": "residual_drop_rate",
        "embd_pdrop": "embedding_dropout",
    },
    absent={"layer_norm_epsilon": 1e-5},
    of_servers={"n_ctx": "block_size"},
    aliases={
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
    fixed={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    prefix="transformer.",
    modules={
        VOCABULARY: "wte",
        "positions": "wpe",
        **_layers(
            {
                "norm_attention": "ln_1",
                **dict.fromkeys(FUSED_QKV, "attn.c_attn"),
                "attention_out": "attn.c_proj",
                "norm_mlp": "ln_2",
                "mlp_in": "mlp.c_fc",
                "mlp_out": "mlp.c_proj",
            },
            "h",
        ),
        "norm": "ln_f",
    },
    is_transposed=False,
    fused={"c_attn": "rows"},
)
BLOOM = Architecture(
    model_type="bloom",
    class_name="BloomForCausalLM",
    family="bloom",
    keys={
        "vocab_size": "vocab_size",
        "seq_length": "block_size",
        "hidden_size": "embedding_dim",
        "n_layer": "N",
        "n_head": "num_head",
        "layer_norm_epsilon": "norm_epsilon",
        "attention_dropout": "attention_drop_rate",
        "hidden_dropout": "residual_drop_rate",
    },
    absent={"layer_norm_epsilon": 1e-5, "seq_length": 2048},
    aliases={"n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},  # in bigscience's own
    fixed={"apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True},
    prefix="transformer.",
    modules={
        VOCABULARY: "word_embeddings",
        "embedding_norm": "word_embeddings_layernorm",
        **_layers(_megatron_names("self_attention"), "h"),
        "norm": "ln_f",
    },
    fused={"query_key_value": "head"},
)
GPT_NEO = Architecture(
    model_type="gpt_neo",
    class_name="GPTNeoForCausalLM",
    family="gpt_neo",
    keys={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "block_size",
        "hidden_size": "embedding_dim",
        "num_layers": "N",
        "num_heads": "num_head",
        "intermediate_size": "mlp_width",
        "layer_norm_epsilon": "norm_epsilon",
        "attention_dropout": "attention_drop_rate",
        "resid_dropout": "residual_drop_rate",
        "embed_dropout": "embedding_dropout",
    },
    absent={"layer_norm_epsilon": 1e-5, "attention_types": [[["global", "local"], 12]], "window_size": 256},
    aliases={"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"},
    fixed={"activation_function": "gelu_new", "tie_word_embeddings": True},
    prefix="transformer.",
    modules={
        **GPT2.modules,
        **_layers(
            {
                "query": "attn.attention.q_proj",
                "key": "attn.attention.k_proj",
                "value": "attn.attention.v_proj",
                "attention_out": "attn.attention.out_proj",
            },
            "h",
        ),
    },
    windows="attention_types",
)
GPT_NEOX = Architecture(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    family="gpt_neox",
    keys={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "block_size",
        "hidden_size": "embedding_dim",
        "num_hidden_layers": "N",
        "num_attention_heads": "num_head",
        "intermediate_size": "mlp_width",
        "layer_norm_eps": "norm_epsilon",
        "use_parallel_residual": "parallel_residual",
        "tie_word_embeddings": "tied",
        "attention_dropout": "attention_drop_rate",
        "hidden_dropout": "residual_drop_rate",
    },
    absent={
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
        "rotary_emb_base": 1e4,
        "rotary_pct": 0.25,
    },
    fixed={"hidden_act": "gelu", "attention_bias": True},
    prefix="gpt_neox.",
    modules={
        VOCABULARY: "embed_in",
        **_layers(_megatron_names("attention")),
        "norm": "final_layer_norm",
        HEAD: "embed_out",
    },
    rotary=("rotary_emb_base", "rotary_pct"),
    fused={"query_key_value": "head"},
)
_LLAMA_KEYS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "block_size",
    "hidden_size": "embedding_dim",
    "num_hidden_layers": "N",
    "num_attention_heads": "num_head",
    "num_key_value_heads": "key_heads",
    "head_dim": "head_width",
    "intermediate_size": "mlp_width",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied",
    "attention_dropout": "attention_drop_rate",
}
_LLAMA_MODULES = {
    VOCABULARY: "embed_tokens",
    **_layers(
        {
            "norm_attention": "input_layernorm",
            "query": "self_attn.q_proj",
            "query_norm": "self_attn.q_norm",  # Qwen 3
            "key": "self_attn.k_proj",
            "key_norm": "self_attn.k_norm",
            "value": "self_attn.v_proj",
            "attention_out": "self_attn.o_proj",
            "norm_mlp": "post_attention_layernorm",
            "mlp_gate": "mlp.gate_proj",
            "mlp_in": "mlp.up_proj",
            "mlp_out": "mlp.down_proj",
        }
    ),
    "norm": "norm",
    HEAD: "lm_head",
}
_ATTENTION_MODULES = {name: hf_name for name, hf_name in _LLAMA_MODULES.items() if "mlp." not in hf_name}
_NONE: Mapping[str, Any] = MappingProxyType({})
ALL_LOCAL = 1 << 30  # a period of windows beyond all layers: no layer is without one


def _like_llama(
    model_type: str,
    class_name: str,
    *,
    without: Sequence[str] = (),
    keys: Mapping[str, str] = _NONE,
    absent: Mapping[str, Any] = _NONE,
    modules: Mapping[str, str] = _LLAMA_MODULES,
    **others: Any,
) -> Architecture:
    """An architecture with the keys of Llama except `without`, and with `keys` beside them or in place of them.

    `absent` are its values of missing keys where Llama's differ; `others` are the other attributes.
    """
    missing = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4}
    attributes: dict[str, Any] = {"family": model_type, "rotary": ("rope_theta", None), **others}
    return Architecture(
        model_type=model_type,
        class_name=class_name,
        keys={**{key: name for key, name in _LLAMA_KEYS.items() if key not in without}, **keys},
        absent={**{key: value for key, value in missing.items() if key not in without}, **absent},
        prefix="model.",
        modules=modules,
        **attributes,
    )


_BIASES = {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
LLAMA = _like_llama(
    "llama",
    "LlamaForCausalLM",
    keys=_BIASES,
    absent=dict.fromkeys(_BIASES, False),
    fixed={"hidden_act": "silu"},
    width_divides=True,
)
ARCEE = _like_llama(
    "arcee",
    "ArceeForCausalLM",
    keys=_BIASES,
    absent={"rms_norm_eps": 1e-5, **dict.fromkeys(_BIASES, False)},
    fixed={"hidden_act": "relu2"},
    modules=_ATTENTION_MODULES | _layers({"mlp_in": "mlp.up_proj", "mlp_out": "mlp.down_proj"}),
    width_divides=True,
)
SEED_OSS = _like_llama(
    "seed_oss",
    "SeedOssForCausalLM",
    keys={
        "attention_bias": "qkv_bias",
        "attention_out_bias": "out_bias",
        "mlp_bias": "mlp_bias",
        "residual_dropout": "residual_drop_rate",
    },
    absent={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
    fixed={"hidden_act": "silu"},
)
APERTUS = _like_llama(
    "apertus",
    "ApertusForCausalLM",
    keys={"attention_bias": "attention_bias"},
    absent={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1.2e7,
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1.2e7,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    implied={"qk_norm": True},
    fixed={"hidden_act": "xielu"},
    modules=_ATTENTION_MODULES
    | _layers(
        {
            "norm_attention": "attention_layernorm",
            "norm_mlp": "feedforward_layernorm",
            "mlp_in": "mlp.up_proj",
            "activation/positive": "mlp.act_fn.alpha_p",
            "activation/negative": "mlp.act_fn.alpha_n",
            "mlp_out": "mlp.down_proj",
        }
    ),
    bare=("layers.{}.mlp.act_fn.alpha_p", "layers.{}.mlp.act_fn.alpha_n"),
    constants={"layers.{}.mlp.act_fn.beta": XIELU_BETA, "layers.{}.mlp.act_fn.eps": XIELU_EPSILON},
)
ERNIE4_5 = _like_llama(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    without=("attention_dropout",),
    keys={"use_bias": "linear_bias"},
    absent={
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 5e5,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "use_bias": False,
    },
    fixed={"hidden_act": "silu"},
)
GLM4 = _like_llama(
    "glm4",
    "Glm4ForCausalLM",
    keys={"attention_bias": "qkv_bias"},
    absent={
        "rms_norm_eps": 1.5625e-07,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    fixed={"hidden_act": "silu"},
    modules=_LLAMA_MODULES
    | _layers(
        {
            "norm_attention_after": "post_self_attn_layernorm",
            "norm_mlp_after": "post_mlp_layernorm",
            "mlp_gate": "mlp.gate_up_proj",
            "mlp_in": "mlp.gate_up_proj",
        }
    ),
    written={"pad_token_id": None},
    rotary=("rope_theta", "partial_rotary_factor"),
    fused={"gate_up_proj": "rows"},
)
MINISTRAL = _like_llama(
    "ministral",
    "MinistralForCausalLM",
    absent={"sliding_window": 4096, "num_key_value_heads": 8},
    fixed={"hidden_act": "silu"},
    windows="layer_types",
    window_period=ALL_LOCAL,
)
MISTRAL = _like_llama(
    "mistral",
    "MistralForCausalLM",
    absent={"sliding_window": 4096},
    fixed={"hidden_act": "silu"},
    windows="sliding_window",
)
QWEN2 = _like_llama("qwen2", "Qwen2ForCausalLM", fixed={"hidden_act": "silu", "use_sliding_window": False})
SMOLLM3 = _like_llama(
    "smollm3",
    "SmolLM3ForCausalLM",
    absent={"tie_word_embeddings": True, "rope_theta": 2e6},
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
    unrotated=4,
    written={"pad_token_id": None},
)
STABLELM = _like_llama(
    "stablelm",
    "StableLmForCausalLM",
    without=("rms_norm_eps", "head_dim"),
    keys={"layer_norm_eps": "norm_epsilon", "use_qkv_bias": "qkv_bias"},
    absent={"layer_norm_eps": 1e-5, "use_qkv_bias": False, "partial_rotary_factor": 0.25},
    fixed={"hidden_act": "silu", "qk_layernorm": False, "use_parallel_residual": False, "hidden_dropout": 0.0},
    rotary=("rope_theta", "partial_rotary_factor"),
    width_divides=True,
)
STARCODER2 = _like_llama(
    "starcoder2",
    "Starcoder2ForCausalLM",
    without=("rms_norm_eps", "head_dim"),
    keys={
        "norm_epsilon": "norm_epsilon",
        "residual_dropout": "residual_drop_rate",
        "embedding_dropout": "embedding_dropout",
    },
    absent={"norm_epsilon": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 2, "sliding_window": None},
    fixed={"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    modules=_ATTENTION_MODULES | _layers({"mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj"}),
    windows="sliding_window",
    width_divides=True,
)
_OLMO: dict[str, Any] = {
    "fixed": {"hidden_act": "silu", "attention_bias": False},
    "modules": _LLAMA_MODULES
    | _layers({"norm_attention_after": "post_attention_layernorm", "norm_mlp_after": "post_feedforward_layernorm"}),
}
OLMO2 = _like_llama("olmo2", "Olmo2ForCausalLM", absent={"rms_norm_eps": 1e-5}, **_OLMO)
OLMO3 = _like_llama(
    "olmo3",
    "Olmo3ForCausalLM",
    absent={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    windows="layer_types",
    window_period=4,
    local_rotary=("", 5e5),
    **_OLMO,
)
PHI3 = _like_llama(
    "phi3",
    "Phi3ForCausalLM",
    keys={"resid_pdrop": "residual_drop_rate"},
    absent={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "sliding_window": None},
    fixed={"hidden_act": "silu", "embd_pdrop": 0.0},
    modules=_LLAMA_MODULES
    | _layers(
        {
            **dict.fromkeys(FUSED_QKV, "self_attn.qkv_proj"),
            "mlp_gate": "mlp.gate_up_proj",
            "mlp_in": "mlp.gate_up_proj",
        }
    ),
    windows="sliding_window",
    written={"pad_token_id": None},
    rotary=("rope_theta", "partial_rotary_factor"),
    scalings=("longrope",),
    scaling_aliases={"su": "longrope", "yarn": "longrope"},  # as transformers has it for this one
    fused={"qkv_proj": "rows", "gate_up_proj": "rows"},
)
_GRANITE_KEYS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "score_multiplier",
    "logits_scaling": "logit_divisor",
}
GRANITE = _like_llama(
    "granite",
    "GraniteForCausalLM",
    keys=_GRANITE_KEYS,
    absent=dict.fromkeys(_GRANITE_KEYS, 1.0),
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)
QWEN3 = _like_llama(
    "qwen3", "Qwen3ForCausalLM", fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
)


def _expert_modules(block: str, router: str, gate: str, into: str, out: str) -> dict[str, str]:
    """The modules of Llama, with experts instead of the MLP."""
    names = {"mlp_gate": gate, "mlp_in": into, "mlp_out": out}
    experts = {f"experts/{name}": f"{block}.experts.{{}}.{hf_name}" for name, hf_name in names.items()}
    return _ATTENTION_MODULES | _layers({"experts/router": f"{block}.{router}", **experts})


MIXTRAL = _like_llama(
    "mixtral",
    "MixtralForCausalLM",
    keys={"num_local_experts": "experts", "num_experts_per_tok": "experts_per_token"},
    aliases={"num_local_experts": "num_experts"},
    absent={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
    fixed={"hidden_act": "silu"},
    modules=_expert_modules("block_sparse_moe", "gate", "w1", "w3", "w2"),
    windows="sliding_window",
)
# Of Qwen's families and OLMoE.
_ROUTER_KEYS = {
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "norm_topk_prob": "normalize_router",
}
# GGUF files hold a width of MLPs, though every layer has experts.
_ALL_EXPERTS = {"intermediate_size": "chosen_width"}
QWEN3_MOE = _like_llama(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    without=("intermediate_size",),
    keys={
        "moe_intermediate_size": "mlp_width",
        **_ROUTER_KEYS,
    },
    of_servers=_ALL_EXPERTS,
    absent={"num_experts_per_tok": 8, "norm_topk_prob": False},
    aliases={"num_experts": "num_local_experts"},  # as transformers 5 writes it
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    modules=_expert_modules("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
)
# An MLP beside the experts, with a gate.
_GATED_SHARED = {
    "mlp_gate": "mlp.shared_expert.gate_proj",
    "mlp_in": "mlp.shared_expert.up_proj",
    "mlp_out": "mlp.shared_expert.down_proj",
    "shared_gate": "mlp.shared_expert_gate",
}
QWEN2_MOE = _like_llama(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    without=("head_dim", "intermediate_size"),
    keys={
        "moe_intermediate_size": "mlp_width",
        **_ROUTER_KEYS,
        "shared_expert_intermediate_size": "shared_dim",
        "qkv_bias": "qkv_bias",
    },
    of_servers=_ALL_EXPERTS,
    absent={
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    fixed={"hidden_act": "silu", "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    modules=_expert_modules("mlp", "gate", "gate_proj", "up_proj", "down_proj") | _layers(_GATED_SHARED),
    width_divides=True,
)
_DELTA_KEYS = {
    "linear_num_key_heads": "delta_key_heads",
    "linear_num_value_heads": "delta_value_heads",
    "linear_key_head_dim": "delta_key_dim",
    "linear_value_head_dim": "delta_value_dim",
    "linear_conv_kernel_dim": "delta_taps",
}
_DELTA_ABSENT = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
}
_GATED_QUERIES = {
    "query": "self_attn.q_proj",  # of each head its queries, then the gate of its output
    "attention_gate": "self_attn.q_proj",
}
_DELTA_MODULES = _layers(
    {
        "query_convolution": "linear_attn.conv1d",
        "key_convolution": "linear_attn.conv1d",
        "value_convolution": "linear_attn.conv1d",
        "decay/log_rate": "linear_attn.A_log",
        "decay/offset": "linear_attn.dt_bias",
        "delta_norm": "linear_attn.norm",
        "attention_out": "linear_attn.out_proj",
    }
)
_DELTA: dict[str, Any] = {
    "bare": ("layers.{}.linear_attn.A_log", "layers.{}.linear_attn.dt_bias"),
    "rotary": ("rope_theta", "partial_rotary_factor"),
    "unread": "mtp.",
    "counts_unread": "mtp_num_hidden_layers",
    "implied": {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"},
}
# Gated DeltaNet of Qwen 3.5, whose gate and rates have modules of their own.
_DELTA_OF_QWEN3_5: dict[str, Any] = {
    "delta": _DELTA_MODULES
    | _layers(
        {
            **dict.fromkeys(FUSED_QKV, "linear_attn.in_proj_qkv"),
            "output_gate": "linear_attn.in_proj_z",
            "rate": "linear_attn.in_proj_b",
            "decay_input": "linear_attn.in_proj_a",
        }
    ),
    "fused": {"q_proj": "head", "in_proj_qkv": "rows", "conv1d": "rows"},
    **_DELTA,
}
QWEN3_5 = _like_llama(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    family="qwen3_5",
    keys=_DELTA_KEYS,
    absent={**_DELTA_ABSENT, "num_key_value_heads": 4},
    fixed={"hidden_act": "silu", "attention_bias": False},
    modules=_LLAMA_MODULES | _layers(_GATED_QUERIES),
    **_DELTA_OF_QWEN3_5,
)
QWEN3_5_MOE = _like_llama(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    family="qwen3_5_moe",
    without=("intermediate_size",),
    keys={
        **_DELTA_KEYS,
        "moe_intermediate_size": "mlp_width",
        "num_experts": "experts",
        "num_experts_per_tok": "experts_per_token",
        "shared_expert_intermediate_size": "shared_dim",
    },
    absent={
        **_DELTA_ABSENT,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 8,
        "shared_expert_intermediate_size": 512,
    },
    fixed={"hidden_act": "silu", "attention_bias": False},
    modules=_expert_modules("mlp", "gate", "gate_proj", "up_proj", "down_proj")
    | _layers({**_GATED_QUERIES, **_GATED_SHARED}),
    joint_experts={"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)},
    **_DELTA_OF_QWEN3_5,
)
QWEN3_NEXT = _like_llama(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    without=("intermediate_size",),
    keys={
        **_DELTA_KEYS,
        "moe_intermediate_size": "mlp_width",
        **_ROUTER_KEYS,
        "shared_expert_intermediate_size": "shared_dim",
    },
    of_servers=_ALL_EXPERTS,
    absent={
        **_DELTA_ABSENT,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512,
    },
    fixed={"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    modules=_expert_modules("mlp", "gate", "gate_proj", "up_proj", "down_proj")
    | _layers({**_GATED_QUERIES, **_GATED_SHARED}),
    delta=_DELTA_MODULES
    | _layers(
        {
            **dict.fromkeys((*FUSED_QKV, "output_gate"), "linear_attn.in_proj_qkvz"),
            **dict.fromkeys(("rate", "decay_input"), "linear_attn.in_proj_ba"),
        }
    ),
    fused={"q_proj": "head", "in_proj_qkvz": "delta_key_head", "in_proj_ba": "delta_key_head", "conv1d": "rows"},
    **_DELTA,
)
OLMOE = _like_llama(
    "olmoe",
    "OlmoeForCausalLM",
    without=("head_dim",),
    keys={
        **_ROUTER_KEYS,
        "attention_bias": "attention_bias",
    },
    absent={"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "norm_topk_prob": False, "attention_bias": False},
    aliases={"num_experts": "num_local_experts"},
    fixed={"hidden_act": "silu", "clip_qkv": None},
    modules=_expert_modules("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
    width_divides=True,
)
GRANITEMOE = _like_llama(
    "granitemoe",
    "GraniteMoeForCausalLM",
    without=("head_dim",),
    keys={
        **_GRANITE_KEYS,
        "num_local_experts": "experts",
        "num_experts_per_tok": "experts_per_token",
        "attention_bias": "attention_bias",
    },
    absent={**dict.fromkeys(_GRANITE_KEYS, 1.0), "num_experts_per_tok": 2, "attention_bias": False},
    aliases={"num_local_experts": "num_experts"},
    fixed={"hidden_act": "silu"},
    modules=_ATTENTION_MODULES
    | _layers(
        {
            "experts/router": "block_sparse_moe.router.layer",
            "experts/mlp_gate": "block_sparse_moe.input_linear",
            "experts/mlp_in": "block_sparse_moe.input_linear",
            "experts/mlp_out": "block_sparse_moe.output_linear",
        }
    ),
    fused={"input_linear": "rows"},
    width_divides=True,
)
GPT_OSS = _like_llama(
    "gpt_oss",
    "GptOssForCausalLM",
    keys={"num_local_experts": "experts", "num_experts_per_tok": "experts_per_token"},
    aliases={"num_local_experts": "num_experts"},
    absent={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1.5e5,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
            "rope_theta": 1.5e5,
        },
    },
    fixed={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    modules=_ATTENTION_MODULES
    | _layers(
        {
            "sinks": "self_attn.sinks",
            "experts/router": "mlp.router",
            "experts/mlp_gate": "mlp.experts.gate_up_proj",
            "experts/mlp_in": "mlp.experts.gate_up_proj",
            "experts/mlp_out": "mlp.experts.down_proj",
        }
    ),
    windows="layer_types",
    scalings=("linear", "llama3", "yarn", "yarn_unrounded"),
    fused={"gate_up_proj": "column"},
    bare=("layers.{}.self_attn.sinks", "layers.{}.mlp.experts.gate_up_proj", "layers.{}.mlp.experts.down_proj"),
)
# The keys and modules of GLM-4.5 and of DeepSeek-V3 that differ from Llama and its attention.
_BALANCED_KEYS = {
    "intermediate_size": "dense_width",
    "moe_intermediate_size": "mlp_width",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "n_shared_experts": "shared_experts",
    "first_k_dense_replace": "first_dense",
    "norm_topk_prob": "normalize_router",
    "routed_scaling_factor": "router_scale",
    "n_group": "router_groups",
    "topk_group": "router_groups_per_token",
}
_BALANCED: dict[str, Any] = {
    "aliases": {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    "further": FurtherLayers(
        MTP,
        "num_nextn_predict_layers",
        modules={
            f"{MTP_JOIN}/norm_next": "enorm",
            f"{MTP_JOIN}/norm_hidden": "hnorm",
            f"{MTP_JOIN}/product": "eh_proj",
            MTP_NORM: "shared_head.norm",
        },
        copies={"embed_tokens": VOCABULARY, "shared_head.head": HEAD},
    ),
    "written": {"num_nextn_predict_layers": 0},
    "bare": ("layers.{}.mlp.gate.e_score_correction",),
}


def _balanced_modules(attention: Mapping[str, str]) -> dict[str, str]:
    """The modules of a model whose first layers have an MLP, and whose others have experts and an MLP beside them.

    `attention` are those of attention, norms, and what is outside layers.
    """
    names = {"mlp_gate": "gate_proj", "mlp_in": "up_proj", "mlp_out": "down_proj"}
    first = {name.removeprefix(f"{STACK}/"): hf_name for name, hf_name in attention.items() if STACK in name}
    mlp = {name: f"layers.{{}}.mlp.{hf_name}" for name, hf_name in names.items()}
    return {
        **attention,
        **{f"{FIRST}/{name}": hf_name for name, hf_name in {**first, **mlp}.items()},
        **_layers(
            {
                "experts/router": "mlp.gate",
                **{f"experts/{name}": f"mlp.experts.{{}}.{hf_name}" for name, hf_name in names.items()},
                **{name: f"mlp.shared_experts.{hf_name}" for name, hf_name in names.items()},
            }
        ),
        f"{ROUTER_BIAS}/{STACK}/experts": "layers.{}.mlp.gate.e_score_correction",
    }


GLM4_MOE = _like_llama(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    without=("intermediate_size",),
    keys={**_BALANCED_KEYS, "attention_bias": "qkv_bias", "use_qk_norm": "qk_norm"},
    absent={
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
    },
    fixed={"hidden_act": "silu"},
    modules=_balanced_modules(_ATTENTION_MODULES),
    rotary=("rope_theta", "partial_rotary_factor"),
    **_BALANCED,
)
DEEPSEEK_V3 = _like_llama(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    without=("intermediate_size", "head_dim"),
    keys={
        **_BALANCED_KEYS,
        "q_lora_rank": "query_latent_dim",
        "kv_lora_rank": "latent_dim",
        "qk_nope_head_dim": "unrotated_width",
        "qk_rope_head_dim": "rotary_dim",
        "v_head_dim": "value_width",
        "rope_interleave": "rotary_interleaved",
    },
    absent={
        "num_key_value_heads": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
    },
    fixed={"hidden_act": "silu", "attention_bias": False},
    modules=_balanced_modules(
        {
            **{name: hf_name for name, hf_name in _ATTENTION_MODULES.items() if "self_attn." not in hf_name},
            **_layers(
                {
                    "query_latent": "self_attn.q_a_proj",
                    "query_latent_norm": "self_attn.q_a_layernorm",
                    "query": "self_attn.q_b_proj",
                    "latent": "self_attn.kv_a_proj_with_mqa",
                    "latent_norm": "self_attn.kv_a_layernorm",
                    "key_value": "self_attn.kv_b_proj",
                    "attention_out": "self_attn.o_proj",
                }
            ),
        }
    ),
    direct_queries={f"{stack}/query": "layers.{}.self_attn.q_proj" for stack in (STACK, FIRST)},
    implied={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    scales_scores=True,
    scalings=("linear", "llama3", "yarn", "yarn_unrounded"),
    **_BALANCED,
)
GEMMA = _like_llama(
    "gemma",
    "GemmaForCausalLM",
    without=("tie_word_embeddings",),
    absent={"tie_word_embeddings": True, "head_dim": 256},
    fixed={
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    },
    legacy={"hidden_act": "gelu", "use_bidirectional_attention": False},
)
_GEMMA_MODULES = _LLAMA_MODULES | _layers(
    {
        "norm_attention_after": "post_attention_layernorm",
        "norm_mlp": "pre_feedforward_layernorm",
        "norm_mlp_after": "post_feedforward_layernorm",
    }
)
GEMMA2 = _like_llama(
    "gemma2",
    "Gemma2ForCausalLM",
    without=("tie_word_embeddings",),
    keys={
        "query_pre_attn_scalar": "score_width",
        "attn_logit_softcapping": "attention_cap",
        "final_logit_softcapping": "logit_cap",
    },
    absent={
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "tie_word_embeddings": True},
    modules=_GEMMA_MODULES,
    windows="layer_types",
    width_divides=True,
)
GEMMA3 = _like_llama(
    "gemma3_text",
    "Gemma3ForCausalLM",
    family="gemma3",
    without=("tie_word_embeddings",),
    keys={"query_pre_attn_scalar": "score_width", "final_logit_softcapping": "logit_cap"},
    absent={
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
    },
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
    },
    modules=_GEMMA_MODULES,
    windows="layer_types",
    window_period=6,
    local_rotary=("rope_local_base_freq", 1e4),
    width_divides=True,
)
# If several equal a model, the first is exported.
_LLAMAS = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_5, SMOLLM3, STABLELM, STARCODER2, OLMO2, OLMO3, GRANITE, PHI3)
_OTHERS = (MINISTRAL, SEED_OSS, ARCEE, APERTUS, ERNIE4_5, GLM4)
_WITH_EXPERTS = (
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5_MOE,
    OLMOE,
    GRANITEMOE,
    GPT_OSS,
    GLM4_MOE,
    DEEPSEEK_V3,
)
_ALL = (GPT2, BLOOM, GPT_NEO, GPT_NEOX, *_LLAMAS, *_OTHERS, GEMMA, GEMMA2, GEMMA3, *_WITH_EXPERTS)
ARCHITECTURES = {architecture.model_type: architecture for architecture in _ALL}
# Other names of theirs, in folders with code of their own.
OTHER_TYPES = {"kimi_k2": "deepseek_v3"}
# Features of models that people ask for and that no model of zero has.
MISSING = {
    "deepseek_v2": "routing by groups of softmax scores",
    "llama4": "images; llama4_text has what is missing for text",
    "llama4_text": "shared experts, gates before experts, chunked attention and scaling of queries by position",
}


def architecture_of(model_config: GPTConfig, model_type: str | None = None) -> Architecture:
    """The architecture that computes the same as a model of this size; of several, `model_type`'s.

    Raises:
      UserError: there is none; the message names the differences from the nearest ones.
    """
    differences = {candidate: candidate.differences(model_config) for candidate in ARCHITECTURES.values()}
    fewest = min(map(len, differences.values()))
    nearest = {candidate: differing for candidate, differing in differences.items() if len(differing) == fewest}
    if fewest:
        raise UserError(
            "no architecture of transformers equals this model: "
            + "; ".join(
                f"{candidate.model_type} has {', '.join(differing)}" for candidate, differing in nearest.items()
            )
        )
    chosen = next((candidate for candidate in nearest if candidate.model_type == model_type), next(iter(nearest)))
    return (
        chosen.of_queries(model_config.query_latent_dim)
        .of_mixers(model_config.mixers)
        .of_scores(model_config.score_outputs)
    )
