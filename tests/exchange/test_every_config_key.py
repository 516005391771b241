"""No key of config.json is ignored: with another value transformers computes the same, or zero reads it or refuses it.

Each key of the configuration of each family is changed alone, and the logits that transformers computes with the same
weights are compared with those before.
"""

import os
from collections import Counter
from typing import Any

import pytest

from zero.errors import UserError
from zero.exchange.architecture_table import ARCHITECTURES
from zero.exchange.hf_config import read_architecture, read_size

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

LAYERS = 4
SHAPES = (
    {"vocab_size": 101, "hidden_size": 40, "n_embd": 40, "intermediate_size": 52, "n_inner": 52},
    dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), LAYERS),
    dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    {"num_key_value_heads": 2, "max_position_embeddings": 64, "n_positions": 64, "seq_length": 64},
    {"head_dim": 10, "sliding_window": 7, "window_size": 7, "moe_intermediate_size": 24, "initializer_range": 0.4},
    {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "pad_token_id": None},
    {"attention_types": [[["global", "local"], 2]], "query_pre_attn_scalar": 11},
)
# Read by tests of their own: these change which weights there are.
APART = {"tie_word_embeddings", "model_type", "dtype", "transformers_version", "architectures"}
FOREIGN = {"head_dim": 6, "layer_types": ["full_attention", "sliding_attention"] * 2, "rotary_pct": 0.5}
FOREIGN |= {"original_max_position_embeddings": 16, "partial_rotary_factor": 0.5, "num_hidden_layers": 2}
FOREIGN |= {"attention_bias": True, "attn_logit_softcapping": 2.0, "rope_theta": 77.0}


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
    if model_type == "gpt_oss":
        keys["layer_types"] = ["sliding_attention", "full_attention"] * 2
    return kind(**keys).to_dict()


def others(value: Any) -> list[Any]:
    """Values to put in place of one."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, max(1, value // 2)]
        case float():
            return [value * 2 + 0.5]
        case str():
            return ["gelu", "other"]
        case list() if value and isinstance(value[0], str):
            return [value[1:] + value[:1], ["full_attention"] * len(value), value[:-1]]
        case list() if value and isinstance(value[0], int):
            return [[1 - x for x in value]]
        case dict() if value:
            changed = [{**value, key: other} for key, inner in value.items() for other in others(inner)]
            return [*changed, {**value, "partial_rotary_factor": 0.5}]
        case None:
            return [1, 0.5, True]
    return []


def logits(keys: dict[str, Any], weights: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Of a model of transformers with these keys and weights, and the weights. It raises what transformers raises."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[keys["model_type"]].from_dict(dict(keys))
    transformers.set_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if weights is not None:
        model.load_state_dict(weights)
    tokens = torch.arange(40)[None] * 7 % 101
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits, model.state_dict()


SOME = ("mistral", "gpt_neo")


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_no_key_is_ignored(model_type: str) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    base = small(model_type)
    before, weights = logits(base, None)
    architecture = read_architecture("config.json", base)
    size = read_size("config.json", base, architecture, LAYERS)
    results: Counter[str] = Counter()
    silent = []
    changes = [(key, other) for key, value in base.items() if key not in APART for other in others(value)]
    changes += [(key, value) for key, value in FOREIGN.items() if base.get(key) != value]
    for key, value in changes:
        keys = {**base, key: value}
        try:
            changed = read_size("config.json", keys, read_architecture("config.json", keys), LAYERS)
        except UserError:
            results["refused"] += 1
            continue
        if changed != size:
            results["read"] += 1
            continue
        try:
            after, _ = logits(keys, weights)
        except Exception:  # noqa: BLE001  transformers raises whatever its checks and PyTorch raise
            results["refused by transformers"] += 1
            continue
        if float((after - before).abs().max()) < 1e-4:
            results["equal"] += 1
        else:
            silent.append((key, value))
    print(model_type, dict(results))
    assert not silent
    assert results["equal"] > 10 and results["read"] > 3 and results["refused"] > 3


def test_published_keys_are_read() -> None:
    """What published folders hold beside the keys of the architecture is no reason to refuse them."""
    from zero.exchange.config_keys import check_keys

    rope: dict[str, Any] = {"factor": 8.0, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    of_llama: dict[str, Any] = {
        "pretraining_tp": 1,
        "mlp_bias": False,
        "is_llama_config": True,
        "rope_interleaved": False,
    }
    of_llama |= {"rope_scaling": {**rope, "original_max_position_embeddings": 8}, "head_dim": 4}
    published: dict[str, dict[str, Any]] = {
        "llama": {**of_llama, "transformers.js_config": {"kv_cache_dtype": {}}},
        "mistral": {"sliding_window": None, "torch_dtype": "bfloat16"},
        "qwen2": {"max_window_layers": 28, "sliding_window": 32768, "use_mrope": False, "use_sliding_window": False},
        "phi3": {"auto_map": {"AutoConfig": "x"}, "attention_bias": False, "original_max_position_embeddings": 4096},
        "gemma2": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "query_pre_attn_scalar": 256},
        "bloom": {"attention_softmax_in_fp32": True, "masked_softmax_fusion": True, "offset_alibi": 100},
        "gpt2": {"n_ctx": 1024, "summary_type": "cls_index", "task_specific_params": {"text-generation": {}}},
        "gpt_neo": {"gradient_checkpointing": False, "tokenizer_class": "GPT2Tokenizer"},
        "gpt_neox": {"rotary_pct": 0.25, "classifier_dropout": 0.1, "is_decoder": False},
        "gpt_oss": {"initial_context_length": 4096, "quantization_config": {"quant_method": "mxfp4"}},
    }
    for model_type, keys in published.items():
        check_keys("config.json", {"hidden_size": 8, "num_attention_heads": 2, **keys}, ARCHITECTURES[model_type], 2)
