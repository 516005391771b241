"""Folders of models with gated DeltaNet, and with a gate of the MLP beside experts, at odd sizes.

Keys of config.json, bytes of a round trip and absent keys of these families are in the tests of all families.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.exchange.random_weights import model_of, save, variables, whole
from zero.exchange.export import export
from zero.exchange.hf_folder import HuggingFaceFolder
from zero.models.gpt import GPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 12,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
DELTA: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "rope_parameters": ROPE,
}
# Torch multiplies groups of tokens only where rows are whole 16 bytes long.
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2}
EXPERTS |= {"shared_expert_intermediate_size": 28}
OTHERS = {"num_hidden_layers": 3, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 4}
OTHERS |= {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", {**DELTA, "intermediate_size": 20}),
    "qwen3_5, one head of values for each of keys": ("Qwen3_5TextConfig", {**DELTA, **OTHERS, "intermediate_size": 7}),
    "qwen3_next": ("Qwen3NextConfig", {**DELTA, **EXPERTS}),
    "qwen3_next without attention": (
        "Qwen3NextConfig",
        {**DELTA, **EXPERTS, **OTHERS, "layer_types": ["linear_attention"] * 3, "norm_topk_prob": False},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "num_hidden_layers": 2}),
    "qwen2_moe without biases": (
        "Qwen2MoeConfig",
        {**EXPERTS, "hidden_size": 36, "qkv_bias": False, "norm_topk_prob": True, "num_experts": 3},
    ),
}
SOME = ("qwen3_5", "qwen3_next")


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in SOME else pytest.mark.wide) for x in MODELS])
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    """Logits over a row that is longer than a chunk of the delta rule; the folder that is written is the same."""
    import torch
    import transformers
    from safetensors.numpy import load_file

    kind, keys = MODELS[name]
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    theirs = auto.from_config(getattr(transformers, kind)(**{**SMALL, **keys}), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # far from how it starts
    theirs.save_pretrained(tmp_path / "theirs")
    row = np.random.default_rng(1).integers(0, 31, (2, 70))
    with torch.no_grad():
        expected = theirs(torch.as_tensor(row), use_cache=False).logits.numpy()

    with HuggingFaceFolder(tmp_path / "theirs") as folder:
        size = folder.whole_size()
        params = whole(folder.params(model_of(size)), model_of(size))
    apply: Any = partial(GPT(size, drops=False).apply, variables(size, params), row, method="logits")
    logits = jax.jit(lambda last: apply(last=last)[0])
    for last in (0, 1, 5, 63, 64, 69):
        np.testing.assert_allclose(logits(last), expected[:, last], atol=1e-5)

    save(tmp_path / "run", size, 0, values=params)
    export(str(tmp_path / "run"), tmp_path / "ours")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for tensor, x in before.items():
        np.testing.assert_array_equal(after[tensor], x, err_msg=tensor)
    again = auto.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.as_tensor(row), use_cache=False).logits, expected, atol=1e-6)
