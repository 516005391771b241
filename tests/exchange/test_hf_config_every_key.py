"""No key of config.json is ignored: with another value zero computes what transformers does, or refuses it by name.

Each key of the configuration of each family is changed alone, under each of its names: `attribute_map` of transformers
and its reading of rotary parameters have a second name of some. Where the model of zero stays the same, the logits that
transformers computes with the same weights have to stay the same; where it is another one, they have to be its logits.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.exchange.random_weights import model_of, variables, whole
from tests.exchange.small_models import LAYERS, small, theirs
from zero.base.errors import UserError
from zero.exchange.architecture_table import ARCHITECTURES
from zero.exchange.hf_config import read_architecture, read_size
from zero.exchange.hf_folder import HuggingFaceFolder
from zero.models.config import GPTConfig
from zero.models.gpt import GPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

# Read by tests of their own: these change which weights there are.
APART = {"tie_word_embeddings", "model_type", "dtype", "transformers_version", "architectures"}
FOREIGN = {"head_dim": 6, "layer_types": ["full_attention", "sliding_attention"] * 2, "rotary_pct": 0.5}
FOREIGN |= {"original_max_position_embeddings": 16, "partial_rotary_factor": 0.5, "num_hidden_layers": 2}
FOREIGN |= {"attention_bias": True, "attn_logit_softcapping": 2.0, "rope_theta": 77.0}


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
            return [*changed, {**value, "partial_rotary_factor": 0.5}, *renamed(value)]
        case None:
            return [1, 0.5, True]
    return []


def renamed(rope: dict[str, Any]) -> list[dict[str, Any]]:
    """Rotary parameters with `type`, the older name, in place of `rope_type`, and another type of positions."""
    if "rope_type" not in rope:
        return []
    without = {key: value for key, value in rope.items() if key != "rope_type"}
    linear = {"type": "linear", "factor": 4.0}
    return [{**without, "type": rope["rope_type"]}, {**without, **linear}, {**rope, **linear}]


def under_other_names(base: dict[str, Any]) -> list[tuple[str, Any]]:
    """Values under the names that `attribute_map` of the configuration's class maps to its keys."""
    import transformers

    names = transformers.AutoConfig.for_model(base["model_type"]).attribute_map
    return [(name, other) for name, key in names.items() if key in base for other in others(base[key])]


TOKENS = np.arange(40)[None] * 7 % 101
EQUAL = 1e-4  # largest difference of logits, which are of the size of 10


def logits(keys: dict[str, Any], weights: dict[str, Any]) -> np.ndarray:
    """After the last token, of a model of transformers with these keys and weights. It raises what they raise."""
    import torch

    model = theirs(keys)
    model.load_state_dict(weights)
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS), use_cache=False).logits[:, -1].numpy()


def own_logits(folder: Path, size: GPTConfig) -> np.ndarray:
    """As `logits`, of the model of zero with the weights of a folder; raises UserError where they do not fit it."""
    model = model_of(size)
    with HuggingFaceFolder(folder) as opened:
        params = whole(opened.params(model), model)
    with jax.disable_jit():  # a compilation for each of these models would cost more than all of their products
        return np.asarray(GPT(size, drops=False).apply(variables(size, params), TOKENS, method="logits")[0])


SOME = ("mistral",)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=pytest.mark.wide if name in SOME else pytest.mark.slow) for name in ARCHITECTURES],
)
def test_no_key_is_ignored(model_type: str, tmp_path: Path) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    base = small(model_type)
    model = theirs(base)
    model.save_pretrained(tmp_path)
    weights = model.state_dict()
    before = logits(base, weights)
    architecture = read_architecture("config.json", base)
    size = read_size("config.json", base, architecture, LAYERS)
    np.testing.assert_allclose(own_logits(tmp_path, size), before, atol=EQUAL, rtol=0)
    results: Counter[str] = Counter()
    silent = []
    changes = [(key, other) for key, value in base.items() if key not in APART for other in others(value)]
    changes += [(key, value) for key, value in FOREIGN.items() if base.get(key) != value]
    changes += [("rope_scaling", value) for value in renamed({"rope_type": "default"})]
    changes += under_other_names(base)
    names = transformers.AutoConfig.for_model(model_type).attribute_map
    for key, value in changes:
        keys = {**{name: x for name, x in base.items() if name != names.get(key)}, key: value}
        try:
            changed = read_size("config.json", keys, read_architecture("config.json", keys), LAYERS)
        except UserError:
            results["refused"] += 1
            continue
        try:
            expected = logits(keys, weights)
        except Exception:  # noqa: BLE001  transformers raises whatever its checks and PyTorch raise
            results["refused by transformers"] += 1
            continue
        kind = "the same model" if changed == size else "another model"
        try:
            found = before if changed == size else own_logits(tmp_path, changed)
        except UserError:  # the weights do not fit it
            results["refused"] += 1
            continue
        if np.abs(found - expected).max() < EQUAL:
            results[kind] += 1
            results["other logits"] += bool(np.abs(expected - before).max() > EQUAL)
        else:
            silent.append((key, value, kind))
    print(model_type, len(changes), dict(results))
    assert not silent
    assert results["the same model"] > 10 and results["another model"] > 2 and results["refused"] > 3


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
        "apertus": {"qk_norm": True, "post_norm": False, "mlp_bias": False, "hidden_dropout": 0.0, "rope_theta": 1.2e7},
        "gpt_oss": {"initial_context_length": 4096, "quantization_config": {"quant_method": "mxfp4"}},
    }
    for model_type, keys in published.items():
        check_keys("config.json", {"hidden_size": 8, "num_attention_heads": 2, **keys}, ARCHITECTURES[model_type], 2)


def test_null_in_place_of_a_number() -> None:
    """As of an epsilon: refused by its key, where transformers ends in an error of PyTorch."""
    for model_type, key in (
        ("llama", "rms_norm_eps"),
        ("gpt2", "layer_norm_epsilon"),
        ("mixtral", "num_experts_per_tok"),
    ):
        keys = {**small(model_type), key: None}
        with pytest.raises(UserError, match=f"config.json: {key} is null; expected a number"):
            read_size("config.json", keys, ARCHITECTURES[model_type], LAYERS)
