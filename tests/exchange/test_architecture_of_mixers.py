"""Folders of models with gated DeltaNet, and with a gate of the MLP beside experts, at odd sizes.

Keys of config.json, bytes of a round trip and absent keys of these families are in the tests of all families.
"""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zero
from tests.exchange.random_weights import model_of, params, save, variables, whole
from tests.exchange.small_models import logits_of_peft
from zero.base.errors import UserError
from zero.exchange.architecture_table import ARCHITECTURES, architecture_of
from zero.exchange.export import export
from zero.exchange.hf_config import read_architecture, read_size
from zero.exchange.hf_folder import HuggingFaceFolder
from zero.exchange.peft_folder import peft_adapters, read_peft, tensor_name, write_peft
from zero.models.adapters import Adapters
from zero.models.gpt import GPT, parameter_axes
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning

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
OTHERS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_conv_kernel_dim": 4,
}
OTHERS |= {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", {**DELTA, "intermediate_size": 20}),
    "qwen3_5, one head of values for each of keys": ("Qwen3_5TextConfig", {**DELTA, **OTHERS, "intermediate_size": 7}),
    "qwen3_next": ("Qwen3NextConfig", {**DELTA, **EXPERTS}),
    "qwen3_next without attention": (
        "Qwen3NextConfig",
        {**DELTA, **EXPERTS, **OTHERS, "layer_types": ["linear_attention"] * 3, "norm_topk_prob": False},
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**DELTA, **EXPERTS}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "num_hidden_layers": 2}),
    "qwen2_moe without biases": (
        "Qwen2MoeConfig",
        {**EXPERTS, "hidden_size": 36, "qkv_bias": False, "norm_topk_prob": True, "num_experts": 3},
    ),
}
SOME = ("qwen3_next",)


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in SOME else pytest.mark.wide) for x in MODELS])
def test_equals_transformers(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Logits over a row that is longer than a chunk of the delta rule; the folder that is written is the same."""
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    kind, keys = MODELS[name]
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    theirs = auto.from_config(getattr(transformers, kind)(**{**SMALL, **keys}), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # far from how it starts
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    before = load_file(file)
    if "linear_num_key_heads" in keys:  # published folders have layers that predict further tokens
        save_file({**before, "mtp.norm.weight": np.ones(12, np.float32)}, file)
    row = np.random.default_rng(1).integers(0, 31, (2, 70))
    with torch.no_grad():
        expected = theirs(torch.as_tensor(row), use_cache=False).logits.numpy()

    with caplog.at_level("INFO"), HuggingFaceFolder(tmp_path / "theirs") as folder:
        assert ("mtp.*, which predicts further tokens, is not read" in caplog.text) == ("linear_num_key_heads" in keys)
        size = folder.whole_size()
        weights = whole(folder.params(model_of(size)), model_of(size))
    apply: Any = partial(GPT(size, drops=False).apply, variables(size, weights), row, method="logits")
    logits = jax.jit(lambda last: apply(last=last)[0])
    for last in (0, 1, 5, 63, 64, 69):
        np.testing.assert_allclose(logits(last), expected[:, last], atol=1e-5)

    save(tmp_path / "run", size, 0, values=weights)
    export(str(tmp_path / "run"), tmp_path / "ours")
    if name != "qwen3_5_moe":  # of architectures that are equal the first is written, here Qwen3-Next
        after = load_file(tmp_path / "ours" / "model.safetensors")
        assert before.keys() == after.keys()
        for tensor, x in before.items():
            np.testing.assert_array_equal(after[tensor], x, err_msg=tensor)
    again = auto.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.as_tensor(row), use_cache=False).logits, expected, atol=1e-6)


def test_adapters_of_gates_have_names_where_transformers_has_modules() -> None:
    """Qwen3-Next makes the gates and rates of gated DeltaNet in products that it shares; Qwen 3.5 does not."""
    qwen3_5, qwen3_next = (
        ARCHITECTURES[name].of_mixers(("delta", "attention")) for name in ("qwen3_5_text", "qwen3_next")
    )
    modules = {"output_gate": "in_proj_z", "rate": "in_proj_b", "decay_input": "in_proj_a"}
    for product, module in modules.items():
        leaf = f"blocks/layer_0/{product}/lora_b"
        name = tensor_name(leaf, qwen3_5)
        assert name == f"base_model.model.model.layers.{{}}.linear_attn.{module}.lora_B.weight"
        shared = "in_proj_qkvz" if product == "output_gate" else "in_proj_ba"
        match = f"tuning.targets: {product} shares the tensor layers.{{}}.linear_attn.{shared} with other products"
        with pytest.raises(UserError, match=re.escape(match)):
            tensor_name(leaf, qwen3_next)
    assert "mlp.shared_expert_gate." in tensor_name("blocks/layer_1/shared_gate/lora_a", qwen3_next)


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT reads a deprecated property of transformers
def test_adapters_of_both_mixers(tmp_path: Path) -> None:
    """PEFT computes with them what zero computes with the weights merged; zero reads them again."""
    import transformers

    kind, keys = MODELS["qwen3_5"]
    config = getattr(transformers, kind)(**{**SMALL, **keys, "vocab_size": 101}).to_dict()
    size = read_size("config.json", config, read_architecture("config.json", config), 6)
    save(tmp_path / "run", size, 0)
    export(str(tmp_path / "run"), tmp_path / "base")
    weights = params(size)
    adapters = Adapters(3, 6.0, targets=("attention_out", "mlp_in", "output_gate", "rate", "decay_input"))
    rng = np.random.default_rng(0)
    shapes = adapters.shapes(weights, parameter_axes(size))
    own = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    named = jax.tree_util.tree_leaves_with_path(own)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in named}
    architecture = architecture_of(size)
    for product in ("query", "attention_gate"):
        match = re.escape(f"{product} shares the tensor layers.{{}}.self_attn.q_proj with other")
        with pytest.raises(UserError, match=match):
            tensor_name(f"blocks/layer_2/{product}/lora_a", architecture)
    (tmp_path / "adapters").mkdir()
    write_peft(tmp_path / "adapters", leaves.__getitem__, list(leaves), adapters, architecture, "base", size)
    assert peft_adapters(tmp_path / "adapters", size) == adapters

    tokens = np.random.default_rng(1).integers(0, 101, (2, 24))
    expected = logits_of_peft(tmp_path / "base", tmp_path / "adapters", tokens)
    blocks = dict(weights["blocks"])
    for layer, products in own["blocks"].items():
        blocks[layer] = dict(blocks[layer])
        for product, x in products.items():
            kernel = blocks[layer][product]["kernel"] + 2.0 * (x["lora_a"] @ x["lora_b"])
            blocks[layer][product] = {"kernel": kernel}
    apply: Any = jax.jit(partial(GPT(size).apply, method="logits"))
    logits, _ = apply(variables(size, {**weights, "blocks": blocks}), tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-3, rtol=1e-4)
    tuned = ShardedGPT(size, zero.Axis("zero", (1, 8)), 3, tuning=Tuning(adapters))
    again = zero.to_host(read_peft(tmp_path / "adapters", tuned), tuned.layout, tuned.axis)
    jax.tree.map(np.testing.assert_array_equal, again, own)
