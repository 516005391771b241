"""The architectures of `transformers` that models of zero equal: names of their tensors and keys of config.json.

The reasons for this choice are in docs/decisions/interchange.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero.models.config import HEAD, STACK, VOCABULARY, GPTConfig
from zero.runtime.errors import UserError
from zero.runtime.weights.architecture import FUSED_QKV, Architecture


def _layers(names: Mapping[str, str], prefix: str) -> dict[str, str]:
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
    fused="rows",
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
    absent={"layer_norm_epsilon": 1e-5},
    aliases={"n_head": "num_attention_heads"},  # in bigscience's own
    fixed={"apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True},
    prefix="transformer.",
    modules={
        VOCABULARY: "word_embeddings",
        "embedding_norm": "word_embeddings_layernorm",
        **_layers(_megatron_names("self_attention"), "h"),
        "norm": "ln_f",
    },
    fused="head",
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
    absent={
        "layer_norm_epsilon": 1e-5,
        "attention_types": [[["global", "local"], 12]],
        "window_size": 256,
    },
    fixed={"activation_function": "gelu_new", "tie_word_embeddings": True},
    prefix="transformer.",
    modules={
        VOCABULARY: "wte",
        "positions": "wpe",
        **_layers(
            {
                "norm_attention": "ln_1",
                "query": "attn.attention.q_proj",
                "key": "attn.attention.k_proj",
                "value": "attn.attention.v_proj",
                "attention_out": "attn.attention.out_proj",
                "norm_mlp": "ln_2",
                "mlp_in": "mlp.c_fc",
                "mlp_out": "mlp.c_proj",
            },
            "h",
        ),
        "norm": "ln_f",
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
        **_layers(_megatron_names("attention"), "layers"),
        "norm": "final_layer_norm",
        HEAD: "embed_out",
    },
    rotary=("rotary_emb_base", "rotary_pct"),
    fused="head",
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
        },
        "layers",
    ),
    "norm": "norm",
    HEAD: "lm_head",
}
_LLAMA_SHARED: dict[str, Any] = {
    "keys": _LLAMA_KEYS,
    "absent": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4},
    "prefix": "model.",
    "modules": _LLAMA_MODULES,
    "rotary": ("rope_theta", None),
}
LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    family="llama",
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    width_divides=True,
    **_LLAMA_SHARED,
)
MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    family="mistral",
    fixed={"hidden_act": "silu"},
    windows="sliding_window",
    **{**_LLAMA_SHARED, "absent": {**_LLAMA_SHARED["absent"], "sliding_window": 4096}},
)
QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    family="qwen2",
    fixed={"hidden_act": "silu", "use_sliding_window": False},
    **_LLAMA_SHARED,
)
SMOLLM3 = Architecture(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    family="smollm3",
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
    unrotated=4,
    written={"pad_token_id": None},
    **{**_LLAMA_SHARED, "absent": {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 2e6}},
)
STABLELM = Architecture(
    model_type="stablelm",
    class_name="StableLmForCausalLM",
    family="stablelm",
    fixed={"hidden_act": "silu", "qk_layernorm": False, "use_parallel_residual": False, "hidden_dropout": 0.0},
    width_divides=True,
    **{
        **_LLAMA_SHARED,
        "keys": {key: name for key, name in _LLAMA_KEYS.items() if key not in ("rms_norm_eps", "head_dim")}
        | {"layer_norm_eps": "norm_epsilon", "use_qkv_bias": "qkv_bias"},
        "absent": {
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "use_qkv_bias": False,
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
        },
        "rotary": ("rope_theta", "partial_rotary_factor"),
    },
)
_OLMO_SHARED: dict[str, Any] = {
    **_LLAMA_SHARED,
    "fixed": {"hidden_act": "silu", "attention_bias": False},
    "modules": _LLAMA_MODULES
    | _layers(
        {"norm_attention_after": "post_attention_layernorm", "norm_mlp_after": "post_feedforward_layernorm"}, "layers"
    ),
}
OLMO2 = Architecture(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    family="olmo2",
    **{**_OLMO_SHARED, "absent": {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 1e4}},
)
OLMO3 = Architecture(
    model_type="olmo3",
    class_name="Olmo3ForCausalLM",
    family="olmo3",
    windows="layer_types",
    window_period=4,
    local_rotary=("", 5e5),
    **{
        **_OLMO_SHARED,
        "absent": {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 5e5, "sliding_window": 4096},
    },
)
PHI3 = Architecture(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    family="phi3",
    fixed={"hidden_act": "silu", "embd_pdrop": 0.0},
    windows="sliding_window",
    written={"pad_token_id": None},
    scalings=("longrope",),
    scaling_aliases={"su": "longrope", "yarn": "longrope"},  # as transformers has it for this one
    fused="rows",
    **{
        **_LLAMA_SHARED,
        "keys": {**_LLAMA_KEYS, "resid_pdrop": "residual_drop_rate"},
        "absent": {
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
        "modules": _LLAMA_MODULES
        | _layers(
            {
                **dict.fromkeys(FUSED_QKV, "self_attn.qkv_proj"),
                "mlp_gate": "mlp.gate_up_proj",
                "mlp_in": "mlp.gate_up_proj",
            },
            "layers",
        ),
        "rotary": ("rope_theta", "partial_rotary_factor"),
    },
)
GRANITE = Architecture(
    model_type="granite",
    class_name="GraniteForCausalLM",
    family="granite",
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    **{
        **_LLAMA_SHARED,
        "keys": _LLAMA_KEYS
        | {
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "attention_multiplier": "score_multiplier",
            "logits_scaling": "logit_divisor",
        },
        "absent": {
            **_LLAMA_SHARED["absent"],
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    },
)
QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    family="qwen3",
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    **_LLAMA_SHARED,
)
_ATTENTION_MODULES = {name: hf_name for name, hf_name in _LLAMA_MODULES.items() if "mlp." not in hf_name}


def _expert_modules(block: str, router: str, gate: str, into: str, out: str) -> dict[str, str]:
    """The modules of Llama, with experts instead of the MLP."""
    names = {"mlp_gate": gate, "mlp_in": into, "mlp_out": out}
    experts = {f"experts/{name}": f"{block}.experts.{{}}.{hf_name}" for name, hf_name in names.items()}
    return _ATTENTION_MODULES | _layers({"experts/router": f"{block}.{router}", **experts}, "layers")


MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    family="mixtral",
    fixed={"hidden_act": "silu"},
    windows="sliding_window",
    **{
        **_LLAMA_SHARED,
        "keys": {**_LLAMA_KEYS, "num_local_experts": "experts", "num_experts_per_tok": "experts_per_token"},
        "absent": {**_LLAMA_SHARED["absent"], "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
        "modules": _expert_modules("block_sparse_moe", "gate", "w1", "w3", "w2"),
    },
)
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    family="qwen3_moe",
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    aliases={"num_experts": "num_local_experts"},  # as transformers 5 writes it
    **{
        **_LLAMA_SHARED,
        "keys": {
            **{key: name for key, name in _LLAMA_KEYS.items() if name != "mlp_width"},
            "moe_intermediate_size": "mlp_width",
            "num_experts": "experts",
            "num_experts_per_tok": "experts_per_token",
            "norm_topk_prob": "normalise_router",
        },
        "absent": {**_LLAMA_SHARED["absent"], "num_experts_per_tok": 8, "norm_topk_prob": False},
        "modules": _expert_modules("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
    },
)
GPT_OSS = Architecture(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    family="gpt_oss",
    fixed={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    windows="layer_types",
    scalings=("linear", "llama3", "yarn", "yarn_unrounded"),
    fused="columns",
    bare=("layers.{}.self_attn.sinks", "layers.{}.mlp.experts.gate_up_proj", "layers.{}.mlp.experts.down_proj"),
    **{
        **_LLAMA_SHARED,
        "keys": {**_LLAMA_KEYS, "num_local_experts": "experts", "num_experts_per_tok": "experts_per_token"},
        "absent": {
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
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
        "modules": _ATTENTION_MODULES
        | _layers(
            {
                "sinks": "self_attn.sinks",
                "experts/router": "mlp.router",
                "experts/mlp_gate": "mlp.experts.gate_up_proj",
                "experts/mlp_in": "mlp.experts.gate_up_proj",
                "experts/mlp_out": "mlp.experts.down_proj",
            },
            "layers",
        ),
    },
)
GEMMA = Architecture(
    model_type="gemma",
    class_name="GemmaForCausalLM",
    family="gemma",
    fixed={
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    },
    legacy={"hidden_act": "gelu", "use_bidirectional_attention": False},
    **{
        **_LLAMA_SHARED,
        "keys": {key: name for key, name in _LLAMA_KEYS.items() if name != "tied"},
        "absent": {**_LLAMA_SHARED["absent"], "tie_word_embeddings": True, "head_dim": 256},
    },
)
_GEMMA_KEYS = {
    "query_pre_attn_scalar": "score_width",
    "attn_logit_softcapping": "attention_cap",
    "final_logit_softcapping": "logit_cap",
}
_GEMMA_MODULES = _LLAMA_MODULES | _layers(
    {
        "norm_attention_after": "post_attention_layernorm",
        "norm_mlp": "pre_feedforward_layernorm",
        "norm_mlp_after": "post_feedforward_layernorm",
    },
    "layers",
)
GEMMA2 = Architecture(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    family="gemma2",
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "tie_word_embeddings": True},
    windows="layer_types",
    width_divides=True,
    **{
        **_LLAMA_SHARED,
        "keys": {key: name for key, name in _LLAMA_KEYS.items() if name != "tied"} | _GEMMA_KEYS,
        "absent": {
            **_LLAMA_SHARED["absent"],
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        "modules": _GEMMA_MODULES,
    },
)
GEMMA3 = Architecture(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    family="gemma3",
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
    },
    windows="layer_types",
    window_period=6,
    local_rotary=("rope_local_base_freq", 1e4),
    width_divides=True,
    **{
        **_LLAMA_SHARED,
        "keys": {key: name for key, name in _LLAMA_KEYS.items() if name != "tied"}
        | {"query_pre_attn_scalar": "score_width", "final_logit_softcapping": "logit_cap"},
        "absent": {
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": None,
        },
        "modules": _GEMMA_MODULES,
    },
)
# If several equal a model, the first is exported.
_LLAMAS = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, STABLELM, OLMO2, OLMO3, GRANITE, PHI3)
_ALL = (GPT2, BLOOM, GPT_NEO, GPT_NEOX, *_LLAMAS, GEMMA, GEMMA2, GEMMA3, MIXTRAL, QWEN3_MOE, GPT_OSS)
ARCHITECTURES = {one.model_type: one for one in _ALL}
# What models that are asked for have and no model of zero has.
MISSING = {
    "deepseek_v2": "latent attention (compressed keys and values) and shared experts",
    "deepseek_v3": "latent attention (compressed keys and values), shared experts and routing by groups with biases",
    "gemma3": "images; a folder of the text alone (gemma3_text) is read",
    "llama4": "images; llama4_text has what is missing for text",
    "llama4_text": "shared experts, gates before experts, chunked attention and scaling of queries by position",
}


def architecture_of(size: GPTConfig) -> Architecture:
    """The architecture that computes the same as a model of this size.

    Raises:
      UserError: there is none; the message names the differences from the nearest ones.
    """
    differences = {one: one.differences(size) for one in ARCHITECTURES.values()}
    fewest = min(map(len, differences.values()))
    nearest = {one: found for one, found in differences.items() if len(found) == fewest}
    if fewest:
        raise UserError(
            "no architecture of transformers equals this model: "
            + "; ".join(f"{one.model_type} has {', '.join(found)}" for one, found in nearest.items())
        )
    return next(iter(nearest))
