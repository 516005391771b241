"""The text of models that also read images: read, and written alone or back into the folder, as transformers has it."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zero
from tests.exchange.random_weights import model_of, whole
from tests.helpers.brought import save_tokenizer
from zero.base.errors import UserError
from zero.checkpoints.manager import Checkpoints
from zero.exchange.export import export
from zero.exchange.hf_folder import HuggingFaceFolder
from zero.exchange.hub_model import open_hf_config, open_hf_model
from zero.exchange.peft_folder import peft_adapters, read_peft
from zero.exchange.warm_start import described_folder, warm_start
from zero.models.adapters import Adapters
from zero.models.gpt import GPT
from zero.partition.layout import derive_layout
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Lora, Tuning

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

TEXT: dict[str, Any] = {
    "vocab_size": 337,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
# The class of the configuration, the tokenizer, the keys of the text, and those of the whole.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", "gemma3", {"sliding_window": 7}, {"mm_tokens_per_image": 4, "image_token_index": 336}),
    "mistral3": ("Mistral3Config", "mistral", {"model_type": "mistral"}, {"tie_word_embeddings": False}),
    "ministral3": (
        "Mistral3Config",
        "mistral",
        {"model_type": "ministral3", "rope_parameters": YARN},
        {"tie_word_embeddings": True},
    ),
}
QWEN: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
QWEN |= {"layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.1, "head_dim": 16}
MODELS["qwen3_5"] = ("Qwen3_5Config", "qwen2", QWEN, {"image_token_id": 335, "video_token_id": 336})
QWEN_MOE = {"moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2}
QWEN_MOE |= {"shared_expert_intermediate_size": 28}
MODELS["qwen3_5_moe"] = ("Qwen3_5MoeConfig", "qwen2", QWEN | QWEN_MOE, MODELS["qwen3_5"][3])
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 14}
QWEN_VISION |= {"out_hidden_size": 40, "num_position_embeddings": 16}
TOKENS = np.arange(40)[None] * 7 % 320


def save_with_images(folder: Path, name: str) -> None:
    """A small model with images, with random weights in bfloat16, as transformers writes it."""
    import torch
    import transformers

    kind, home, text, others = MODELS[name]
    vision: dict[str, Any] = {**VISION, "model_type": "siglip_vision_model" if name == "gemma3" else "pixtral"}
    if name.startswith("qwen3_5"):
        vision = QWEN_VISION
    transformers.set_seed(0)
    config = getattr(transformers, kind)(text_config={**TEXT, **text}, vision_config=vision, **others)
    auto: Any = transformers.AutoModelForImageTextToText
    auto.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    written = json.loads((folder / "config.json").read_text())
    save_tokenizer(folder, home)
    (folder / "config.json").write_text(json.dumps(written))


def logits_of(folder: Path, auto: str) -> np.ndarray:
    """After the last token."""
    import torch
    import transformers

    model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(TOKENS)).logits[:, -1].numpy()


def logits_of_zero(folder: Path) -> np.ndarray:
    found = open_hf_model(str(folder))
    assert found is not None
    assert found == open_hf_config(str(folder))
    model = model_of(found.size)
    with HuggingFaceFolder(folder) as opened:
        params = whole(opened.params(model), model)
    apply: Any = jax.jit(lambda tokens: GPT(found.size).apply({"params": params}, tokens, method="logits"))
    return np.asarray(apply(TOKENS)[0])


def tensors_of(folder: Path) -> dict[str, bytes]:
    from safetensors.torch import load_file

    found: dict[str, bytes] = {}
    for path in folder.glob("*.safetensors"):
        found |= {name: x.view(-1).float().numpy().tobytes() for name, x in load_file(path).items()}
    return found


@pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "gemma3")]
)
def test_text_of_a_model_with_images(name: str, tmp_path: Path) -> None:
    """Its logits are those of transformers, read from the folder, tuned and alone, and tuned within the folder."""
    folder = tmp_path / "folder"
    save_with_images(folder, name)
    expected = logits_of(folder, "AutoModelForImageTextToText")
    np.testing.assert_allclose(logits_of_zero(folder), expected, atol=2e-4, rtol=1e-4)
    found = open_hf_model(str(folder))
    assert found is not None
    assert found.size.block_size == (48 if name == "ministral3" else 64)  # from where queries are scaled

    # A run that has moved its weights a little.
    model = ShardedGPT(found.size, zero.Axis("zero", (1, jax.device_count())), 3)
    params = zero.to_host(warm_start(str(folder), model), model.layout, model.axis)
    params = jax.tree.map(lambda x: x * np.float32(1.25), params)
    alone = ShardedGPT(found.size, zero.Axis("zero", (1, 1)), 0)
    config = {"data": {"tokenizer": found.tokenizer()}, "tuning": {"name": "none"}}
    meta = {"config": config, "size": dataclasses.asdict(found.size), "brought": described_folder(str(folder))}
    with Checkpoints(tmp_path / "run", keep=1) as checkpoints:
        checkpoints.save(1, {"params": params}, derive_layout(lambda p: {"params": p}, alone.layout), meta)
    export(str(tmp_path / "run"), tmp_path / "text")
    tuned = logits_of(tmp_path / "text", "AutoModelForCausalLM")
    assert np.abs(tuned - expected).max() > 0.01
    np.testing.assert_allclose(logits_of_zero(tmp_path / "text"), tuned, atol=2e-4, rtol=1e-4)
    export(str(tmp_path / "run"), tmp_path / "again", into=str(folder))
    np.testing.assert_array_equal(logits_of(tmp_path / "again", "AutoModelForImageTextToText"), tuned)

    # What is not of the text is the same, byte for byte.
    before, after = tensors_of(folder), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    of_text = {tensor for tensor in before if "language_model" in tensor or "lm_head" in tensor}
    changed = {tensor for tensor in before if before[tensor] != after[tensor]}
    assert changed <= of_text < set(before) and len(changed) > 10
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in (tmp_path / "again").iterdir()}
    for file in names - {"model.safetensors"}:
        assert (folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    with pytest.raises(UserError, match="has no image part to keep beside its text"):
        export(str(tmp_path / "run"), tmp_path / "third", into=str(tmp_path / "text"))
    with pytest.raises(UserError, match="--into keeps the architecture and the dtypes of its folder"):
        export(str(tmp_path / "run"), tmp_path / "third", into=str(folder), dtype="float32")


@pytest.mark.parametrize("name", ["mistral3", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT reads a deprecated property of transformers
def test_adapters_of_a_text_with_images(name: str, tmp_path: Path) -> None:
    """PEFT loads them beside the whole model, whose modules of images have none; zero reads them again."""
    import peft
    import torch
    import transformers

    folder = tmp_path / "folder"
    save_with_images(folder, name)
    found = open_hf_model(str(folder))
    assert found is not None
    adapters = Adapters(3, 6.0, targets=("query", "mlp_in"), ranks=(("mlp_in", 2),))
    axis = zero.Axis("zero", (1, jax.device_count()))
    model = ShardedGPT(found.size, axis, 3, tuning=Tuning(adapters))
    rng = np.random.default_rng(0)
    params = model.layout.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32))
    by_name = {leaf.name: x for leaf, x in zip(model.layout.leaves, model.layout.leaves_of(params), strict=True)}
    config = {"data": {"tokenizer": found.tokenizer()}, "tuning": dataclasses.asdict(Lora(rank=3, alpha=6.0))}
    config["tuning"] |= {"targets": ["query", "mlp_in"], "rank_pattern": {"mlp_in": 2}}
    base = {"named": str(folder), "place": str(folder), "ema": False, "checksum": 0}
    meta = {"config": config, "size": dataclasses.asdict(found.size), "brought": described_folder(str(folder))}
    with Checkpoints(tmp_path / "run", keep=1) as checkpoints:
        alone = ShardedGPT(found.size, zero.Axis("zero", (1, 1)), 0, tuning=Tuning(adapters))
        layout = derive_layout(lambda p: {"params": p}, alone.layout)
        checkpoints.save(1, {"params": params}, layout, {**meta, "base": base})
    export(str(tmp_path / "run"), tmp_path / "adapters")

    weights = whole(warm_start(str(folder), model_of(found.size)), model_of(found.size))
    for product in adapters.targets or ():
        a, b = (by_name[f"blocks/{product}/{part}"] for part in ("lora_a", "lora_b"))
        kernels = weights["blocks"][product]
        kernels["kernel"] = kernels["kernel"] + 6.0 / adapters.rank_of(product) * (a @ b)
    apply: Any = jax.jit(lambda tokens: GPT(found.size).apply({"params": weights}, tokens, method="logits"))
    auto: Any = transformers.AutoModelForImageTextToText
    theirs: Any = peft.PeftModel.from_pretrained(
        auto.from_pretrained(folder, dtype=torch.float32), tmp_path / "adapters"
    )
    with torch.no_grad():
        expected = theirs.eval()(input_ids=torch.tensor(TOKENS)).logits[:, -1].numpy()
    np.testing.assert_allclose(np.asarray(apply(TOKENS)[0]), expected, atol=2e-4, rtol=1e-4)
    assert not [key for key in theirs.state_dict() if "lora" in key and "vision" in key]
    assert peft_adapters(tmp_path / "adapters", found.size) == adapters
    again = zero.to_host(read_peft(tmp_path / "adapters", model), model.layout, model.axis)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_text_that_no_model_computes(tmp_path: Path) -> None:
    """Llama 4 is refused by what it has; a published Gemma 3 says only what its class does not."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": {}}))
    with pytest.raises(UserError, match="model_type 'llama4' has images; llama4_text has what is missing for text"):
        open_hf_config(str(tmp_path))
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    found = open_hf_config(str(tmp_path))
    assert found is not None
    size = found.size
    assert (size.vocab_size, size.block_size, size.num_head, size.head_width) == (262_208, 131_072, 8, 256)
    assert (size.kv_heads, size.windows, size.rotary_scaling) == (4, (1024,) * 5 + (0,), ("linear", 8.0)) or size.N % 6
