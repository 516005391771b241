"""Which keys of a config.json zero reads or may ignore: every other one with a value is refused by name.

A key that `transformers` reads and zero does not would give other logits and no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero.base.errors import UserError
from zero.exchange.architecture import Architecture
from zero.exchange.codings import QUANTIZATION, coding_of

# Keys of all architectures that concern no logit: names, generation, training, caches, other heads.
_NO_LOGIT = frozenset(
    (
        *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "auto_map", "tokenizer_class"),
        *("use_cache", "cache_implementation", "initializer_range", "gradient_checkpointing", "is_decoder", "n_ctx"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type"),
        *("num_labels", "classifier_dropout", "task_specific_params", "prefix", "finetuning_task", "torchscript"),
        *(
            "ep_size",
            "aux_loss_alpha",
            "seq_aux",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "pretraining_tp",
            "is_llama_config",
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
            "use_bfloat16",
        ),
        *("reorder_and_upcast_attn", "slow_but_exact", "masked_softmax_fusion", "bias_dropout_fusion"),
        *("attention_softmax_in_fp32", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "attention_layers"),
        *("sliding_window", "max_window_layers", "initial_context_length", "experts_per_token", "hidden_act"),
        *("hidden_size", "intermediate_size", "max_position_embeddings", "do_sample", "temperature", "top_p", "top_k"),
    )
)
# Keys that EasyDeL adds to config.json about how it computes and stores; its export does not depend on them.
_OF_EASYDEL = frozenset(
    (
        *("attn_dtype", "attn_mechanism", "attn_softmax_dtype", "backend", "platform", "kvdtype", "easy_method"),
        *("mla_attn_dtype", "mla_attn_mechanism", "mla_attn_softmax_dtype", "moe_method", "precompute_masks"),
        *("moe_tiling_size_batch", "moe_tiling_size_dim", "moe_tiling_size_seqlen", "number_rep_kv"),
        *("blocksize_b", "blocksize_k", "blocksize_q", "pallas_k_block_size", "pallas_m_block_size"),
        *("pallas_n_block_size", "flash_attention_backward_pass_impl", "scan_mlp_chunk_size", "scan_ring_attention"),
        *("fcm_max_ratio", "fcm_min_ratio", "fsdp_is_ep_bound", "sp_is_ep_bound", "partition_axis"),
        *("kv_cache_sharding_sequence_axis_name", "sequence_axis_name", "sharding_axis_dims", "sharding_axis_names"),
    )
)
_PREFIXES = ("_", "output_", "summary_", "transformers.js")
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")
_OF_WINDOWS = ("layer_types", "sliding_window_pattern", "attention_types", "window_size")
_OF_MIXERS = ("layer_types", "full_attention_interval")
_OF_UNROTATED = ("no_rope_layers", "no_rope_layer_interval")
# Keys within rope_parameters.
_OF_ROPE = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"),
    *("low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
}
# How positions are divided between the sides of images; a text has the same position on all sides.
_OF_IMAGES = {"mrope_section", "mrope_interleaved"}
_BY_TYPE = {"full_attention", "sliding_attention"}


def check_keys(origin: str, config: Mapping[str, Any], architecture: Architecture, layers: int) -> None:
    """Raises UserError for a key that zero does not read and that has a value; `origin` begins the message.

    And for keys that contradict each other, of which transformers would take one.
    """
    known = {*architecture.keys, *architecture.aliases.values(), *architecture.fixed, *architecture.absent}
    known |= {*architecture.written, QUANTIZATION}
    if architecture.rotary is not None:
        known |= {*ROPE_KEYS, *filter(None, architecture.rotary)}
    if architecture.local_rotary is not None:
        known.add(architecture.local_rotary[0])
    if architecture.unrotated is not None:
        known |= {*_OF_UNROTATED}
    if architecture.windows:
        known |= {*_OF_WINDOWS}
    if architecture.delta:
        known |= {*_OF_MIXERS}
    for key, value in config.items():
        is_read = key in known or key in _NO_LOGIT | _OF_EASYDEL or key.startswith(_PREFIXES)
        if is_read or value in (None, False, "", [], {}) or _is_implied(key, config, architecture, layers):
            continue
        raise UserError(
            f"{origin}: {key} is {value!r}, which zero does not know for model_type {architecture.model_type!r}; "
            "delete it only if the weights were trained without it"
        )
    for key, alias in architecture.aliases.items():
        if key in config and alias in config and config[key] != config[alias]:
            raise UserError(
                f"{origin}: {key} is {config[key]!r} and {alias} {config[alias]!r}, two names for the same setting"
            )
    coding_of(origin, config)
    _check_rope(origin, config, architecture)


def _is_implied(key: str, config: Mapping[str, Any], architecture: Architecture, layers: int) -> bool:
    """Whether a key says what holds without it."""
    value = config[key]
    if "unrotated_width" in architecture.keys.values() and key in ("head_dim", "qk_head_dim"):
        parts = {"head_dim": ("qk_rope_head_dim",), "qk_head_dim": ("qk_rope_head_dim", "qk_nope_head_dim")}[key]
        widths = [config.get(name, architecture.absent[name]) for name in parts]
        return all(isinstance(width, int) for width in widths) and value == sum(widths)
    if key in architecture.implied:
        return bool(value == architecture.implied[key])
    if key == "head_dim":
        names = {name: key for key, name in architecture.keys.items()}
        width, heads = (config.get(names[name]) for name in ("embedding_dim", "num_head"))
        return isinstance(width, int) and isinstance(heads, int) and value * heads == width
    if key == "layer_types":
        return value == ["full_attention"] * layers
    return key in ("partial_rotary_factor", "rope_theta") and value == {"partial_rotary_factor": 1.0}.get(key)


def _check_rope(origin: str, config: Mapping[str, Any], architecture: Architecture) -> None:
    for name in ("rope_parameters", "rope_scaling"):
        parameters = config.get(name)
        if not isinstance(parameters, dict):
            continue
        parts = {name: parameters}
        if name == "rope_parameters" and architecture.local_rotary is not None:
            if unknown := sorted(set(parameters) - _BY_TYPE):
                raise UserError(f"{origin}: {name} has {unknown[0]!r}; expected {' and '.join(sorted(_BY_TYPE))}")
            parts = {f"{name}.{kind}": part for kind, part in parameters.items() if isinstance(part, dict)}
        for section, part in parts.items():
            if unknown := sorted(set(part) - _OF_ROPE - (_OF_IMAGES if architecture.delta else set())):
                raise UserError(f"{origin}: {section} has {unknown[0]!r}, which zero does not read")
            has_fraction = architecture.rotary is not None and architecture.rotary[1] is not None
            if not has_fraction and part.get("partial_rotary_factor", 1.0) != 1.0:
                raise UserError(
                    f"{origin}: partial_rotary_factor of {section} is {part['partial_rotary_factor']!r}, but for this "
                    "model_type zero rotates whole heads"
                )
            key = "original_max_position_embeddings"
            beside = config.get(key)
            within = part.get(key)
            is_beside = "longrope" in architecture.scaling_aliases.values()  # where Phi-3 reads it
            if not is_beside and None not in (beside, within) and beside != within:
                raise UserError(f"{origin}: {key} is {beside!r}, and {within!r} in {section}")
