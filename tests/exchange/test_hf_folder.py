"""Hugging Face folders that are read: those that transformers wrote, and those that are refused."""

import dataclasses
import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.exchange.random_weights import ALIBI, LEARNED, SIZES, contents, model_of, save, variables, whole
from zero.base.errors import UserError
from zero.exchange.architecture_table import ARCHITECTURES
from zero.exchange.export import export
from zero.exchange.hf_config import read_choices, write_config
from zero.exchange.hf_folder import HuggingFaceFolder
from zero.exchange.warm_start import warm_start
from zero.models.families import FAMILIES
from zero.models.gpt import GPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("exported")
    save(place / "run", LEARNED, 0)
    export(str(place / "run"), place / "hf")
    return place / "hf"


def test_model_that_transformers_made_is_read(tmp_path: Path) -> None:
    import torch
    import transformers

    config = transformers.BloomConfig(vocab_size=101, hidden_size=42, n_layer=2, n_head=3, layer_norm_epsilon=1e-4)
    theirs: Any = transformers.BloomForCausalLM(config)
    theirs.to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    size = dataclasses.replace(ALIBI, N=2)
    model = model_of(size)
    read = whole(warm_start(str(tmp_path), model), model)
    fused = theirs.transformer.h[1].self_attention.query_key_value.weight.detach().float().numpy()  # (3 D, D)
    np.testing.assert_array_equal(read["blocks"]["key"]["kernel"][1].T[14:28], fused[42 + 14 : 42 + 28])  # head 1


_LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 42,
    "intermediate_size": 61,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-4,
}
_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
THEIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # The name of the configuration, its keys, and what of the same size in SIZES differs.
    "gpt_neo": (
        "GPTNeoConfig",
        {"hidden_size": 42, "num_layers": 4, "num_heads": 3, "attention_types": [[["global", "local"], 2]]}
        | {"window_size": 7, "layer_norm_epsilon": 1e-4},
        {},
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 192}
        | {"layer_norm_eps": 1e-4},
        {},
    ),
    "llama": (
        "LlamaConfig",
        _LLAMA_SIZES
        | {"rope_parameters": _ROPE | {"original_max_position_embeddings": 64}, "attention_bias": True}
        | {"mlp_bias": True},
        {"num_head": 6, "kv_heads": 2, "N": 4, "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralConfig", _LLAMA_SIZES | {"sliding_window": 9}, {"N": 4}),
    "qwen3": ("Qwen3Config", _LLAMA_SIZES, {"kv_heads": 2, "N": 4, "rotary_base": 1e4}),
    "mixtral": (
        "MixtralConfig",
        _LLAMA_SIZES | {"hidden_size": 44, "num_local_experts": 5, "intermediate_size": 20},
        {"N": 4, "expert_capacity": None},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _LLAMA_SIZES
        | {"hidden_size": 44, "moe_intermediate_size": 12}
        | {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
        {"N": 4, "normalize_router": True, "rotary_base": 1e4},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        _LLAMA_SIZES
        | {"hidden_size": 44, "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True}
        | {"attention_bias": True, "head_dim": 12},
        {"N": 4},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {key: x for key, x in _LLAMA_SIZES.items() if key not in ("head_dim", "num_key_value_heads")}
        | {"hidden_size": 44, "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "num_key_value_heads": 6, "q_lora_rank": 20}
        | {"kv_lora_rank": 12, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 14}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 4.0, "mscale": 1.0}
            | {"mscale_all_dim": 0.7, "original_max_position_embeddings": 64}
        },
        {"rotary_scaling": ("yarn", 8.0, 64.0, 4.0, 1.0, (0.1 * math.log(8) + 1) / (0.07 * math.log(8) + 1))},
    ),
    "deepseek_v3 without latent queries": (
        "DeepseekV3Config",
        {key: x for key, x in _LLAMA_SIZES.items() if key not in ("head_dim", "num_key_value_heads")}
        | {"hidden_size": 52, "moe_intermediate_size": 20, "n_routed_experts": 6, "num_experts_per_tok": 2}
        | {"num_attention_heads": 3, "num_key_value_heads": 3, "n_group": 1, "topk_group": 1, "q_lora_rank": None}
        | {"first_k_dense_replace": 1, "kv_lora_rank": 9, "qk_rope_head_dim": 10, "qk_nope_head_dim": 3}
        | {"v_head_dim": 13, "rope_interleave": False, "norm_topk_prob": False, "routed_scaling_factor": 1.3},
        {},
    ),
    "ministral": (
        "MinistralConfig",
        _LLAMA_SIZES | {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"N": 4, "windows": (9, 0)},
    ),
    "seed_oss": (
        "SeedOssConfig",
        _LLAMA_SIZES
        | {"attention_out_bias": True, "mlp_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0},
        {"N": 4, "rotary_base": 1e4, "out_bias": True, "mlp_bias": True},
    ),
    "arcee": (
        "ArceeConfig",
        _LLAMA_SIZES | {"attention_bias": True, "mlp_bias": True},
        {"N": 4, "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    ),
    "apertus": (
        "ApertusConfig",
        _LLAMA_SIZES | {"rope_parameters": _ROPE | {"original_max_position_embeddings": 64}, "attention_bias": True},
        {"N": 4, "qkv_bias": True, "out_bias": True},
    ),
    "ernie4_5": (
        "Ernie4_5Config",
        _LLAMA_SIZES | {"use_bias": True},
        {"N": 4, "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    ),
    "glm4": ("Glm4Config", _LLAMA_SIZES | {"head_dim": 12, "pad_token_id": None}, {"N": 4}),
    "olmoe": (
        "OlmoeConfig",
        {key: x for key, x in _LLAMA_SIZES.items() if key != "head_dim"}
        | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 20}
        | {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
        {"N": 4, "normalize_router": True},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {key: x for key, x in _LLAMA_SIZES.items() if key != "head_dim"}
        | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 20}
        | {"num_local_experts": 5, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
        | {"attention_multiplier": 0.3, "logits_scaling": 2.0},
        {"N": 4, "tied": False},
    ),
    "gpt_oss": (
        "GptOssConfig",
        _LLAMA_SIZES
        | {"hidden_size": 44, "num_local_experts": 5, "intermediate_size": 20, "num_experts_per_tok": 2}
        | {"sliding_window": 9},
        {"N": 4, "rotary_base": 150000.0, "rotary_scaling": FAMILIES["gpt_oss"]["rotary_scaling"]},
    ),
    "qwen2": (
        "Qwen2Config",
        _LLAMA_SIZES
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}
        | {"max_window_layers": 2},
        {"N": 4, "rotary_scaling": ("yarn", 4.0, 128.0, 32.0, 1.0, 0.1 * math.log(4.0) + 1.0)},
    ),
    "smollm3": (
        "SmolLM3Config",
        _LLAMA_SIZES | {"no_rope_layer_interval": 2, "pad_token_id": 0},
        {"rotary_base": 2e6, "tied": True},
    ),
    "olmo3": ("Olmo3Config", _LLAMA_SIZES | {"sliding_window": 9}, {"rotary_scaling": None, "kv_heads": 2}),
    "stablelm": (
        "StableLmConfig",
        {key: x for key, x in _LLAMA_SIZES.items() if key not in ("rms_norm_eps", "head_dim")}
        | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "layer_norm_eps": 1e-4},
        {"N": 4, "rotary_fraction": 0.25, "qkv_bias": False},
    ),
    "starcoder2": (
        "Starcoder2Config",
        {key: x for key, x in _LLAMA_SIZES.items() if key not in ("rms_norm_eps", "head_dim")}
        | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "norm_epsilon": 1e-4}
        | {"sliding_window": 9, "tie_word_embeddings": True},
        {"N": 4, "windows": (9,)},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        _LLAMA_SIZES
        | {"query_pre_attn_scalar": 20, "sliding_window": 9, "final_logit_softcapping": 5.0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        {"N": 4, "windows": (9, 0), "rotary_scaling": None},
    ),
    "gemma2": (
        "Gemma2Config",
        _LLAMA_SIZES
        | {"query_pre_attn_scalar": 10, "sliding_window": 9}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        {},
    ),
}


# By default one of each kind; the others are rows of a table. test_hf_config_every_key.py reads each key of Mistral,
# test_export.py writes Qwen3 and OLMo 2.
WIDE = (
    *("mistral", "qwen3", "olmo3", "ministral", "seed_oss", "arcee", "olmoe", "smollm3", "starcoder2", "granitemoe"),
    *(
        "deepseek_v3 without latent queries",
        "mixtral",
        "gemma3",
        "stablelm",
        "ernie4_5",
        "glm4",
        "qwen3_moe",
        "apertus",
    ),
)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.wide if name in WIDE else ()) for name in THEIRS]
)
def test_models_of_transformers(family: str, tmp_path: Path) -> None:
    """Models made by transformers compute the same here, and there once they are exported."""
    import torch
    import transformers

    name, keys, changes = THEIRS[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{"vocab_size": 101, "max_position_embeddings": 128, **keys})
    theirs: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        biases = [x for name, x in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
        for weight in (*theirs.parameters(), *biases):
            weight.add_(0.2 * torch.randn_like(weight))  # far from how it starts
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    size = dataclasses.replace(SIZES[family], **changes)
    model = model_of(size)
    params = whole(warm_start(str(tmp_path), model), model)
    tokens = np.random.default_rng(0).integers(0, 101, (2, 40))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    apply: Any = jax.jit(partial(GPT(size).apply, variables(size, params), method="logits"))
    logits = [apply(tokens, last=last) for last in (0, 20, 39)]
    for (got, _), last in zip(logits, (0, 20, 39), strict=True):
        np.testing.assert_allclose(got, expected[:, last], atol=1e-4, rtol=0)

    save(tmp_path / "run", size, 0, values=params)
    export(str(tmp_path / "run"), tmp_path / "hf")
    auto: Any = transformers.AutoModelForCausalLM
    again, loaded = auto.from_pretrained(tmp_path / "hf", output_loading_info=True, attn_implementation="eager")
    assert not any(loaded.values())
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.tensor(tokens)).logits.numpy(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"vocab_size": 64}, r"tensor wte.weight: holds \(101, 42\), leaf vocabulary/table expects \(64, 42\)"),
        ({"block_size": 256}, r"tensor wpe.weight: holds \(128, 42\), leaf positions/table expects \(256, 42\)"),
        ({"embedding_dim": 45}, r"tensor h.0.attn.c_proj.bias: holds \(42,\), leaf \S+ expects \(45,\)"),
        ({"num_head": 6}, "num_head is 3, this run expects 6"),
        ({"alibi_attn": True}, "tensor wpe.weight: this model has no such leaf"),
        ({"embedding_norm": True}, "gpt2 has no tensor for leaf embedding_norm/"),
    ],
    ids=str,
)
def test_misfit_is_refused(change: dict[str, Any], line: str, tmp_path: Path, hf: Path) -> None:
    """A folder that does not fit the model is refused in one line."""
    with pytest.raises(UserError, match=line) as caught:
        warm_start(str(hf), model_of(dataclasses.replace(LEARNED, **change)))
    assert str(hf) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("model_type", "mamba", "model_type 'mamba': expected one of 'gpt2', 'bloom'"),
        ("model_type", "llama4_text", "'llama4_text' has shared experts, gates before experts"),
        ("model_type", "gemma3", "'text_config' is missing"),
        ("model_type", "deepseek_v2", "'deepseek_v2' has routing by groups of softmax scores"),
        ("activation_function", "relu", "activation_function is 'relu'; zero supports only 'gelu_new'"),
        ("tie_word_embeddings", False, "tie_word_embeddings is False"),
    ],
)
def test_other_architecture_is_refused(key: str, value: Any, line: str, hf: Path, tmp_path: Path) -> None:
    """Another architecture is refused in one line."""
    for name, data in contents(hf).items():
        (tmp_path / name).write_bytes(data)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {key: value}))
    with pytest.raises(UserError, match=line):
        warm_start(str(tmp_path), model_of(LEARNED))


def edited(folder: Path, place: Path, remove: tuple[str, ...] = (), **keys: Any) -> Path:
    """A copy of a folder with keys of its config.json changed or removed."""
    place.mkdir()
    for name, data in contents(folder).items():
        (place / name).write_bytes(data)
    config = json.loads((place / "config.json").read_text()) | keys
    (place / "config.json").write_text(json.dumps({key: x for key, x in config.items() if key not in remove}))
    return place


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mistral")
    save(place / "run", SIZES["mistral"], 0)
    export(str(place / "run"), place / "hf")
    return place / "hf"


def test_rope_scaling_replaces_rope_parameters(mistral: Path, tmp_path: Path) -> None:
    """As users extend a context: transformers obeys the key that was added."""
    place = edited(mistral, tmp_path / "yarn", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(UserError, match=r"rotary_scaling is \('yarn', 4.0, 128.0, 32.0, 1.0, 1.138\d+\)"):
        warm_start(str(place), model_of(SIZES["mistral"]))
    place = edited(mistral, tmp_path / "mrope", rope_scaling={"rope_type": "mrope", "factor": 4.0})
    with pytest.raises(UserError, match="rope_scaling has rope_type 'mrope'"):
        warm_start(str(place), model_of(SIZES["mistral"]))
    place = edited(mistral, tmp_path / "theta", rope_scaling={"rope_theta": 500.0}, rope_parameters={"rope_theta": 7.0})
    warm_start(str(place), model_of(dataclasses.replace(SIZES["mistral"], rotary_base=500.0)))


@pytest.mark.parametrize("stated", [1, None])
def test_number_of_layers_is_read(stated: int | None, mistral: Path, tmp_path: Path) -> None:
    keys = {"num_hidden_layers": stated} if stated else {}
    place = edited(mistral, tmp_path / "hf", () if stated else ("num_hidden_layers",), **keys)
    with pytest.raises(UserError, match=f"num_hidden_layers is {stated or 'missing'}, the files hold"):
        warm_start(str(place), model_of(SIZES["mistral"]))


@pytest.mark.parametrize("family", [family for family in ARCHITECTURES if family not in ("gpt2", "bloom", "qwen3")])
def test_absent_keys(family: str) -> None:
    """Absent keys have the defaults of transformers."""
    import transformers

    theirs = transformers.AutoConfig.for_model(family).to_dict()
    for key, value in ARCHITECTURES[family].absent.items():
        old = {"rope_theta": "rope_theta", "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
        rope = theirs.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope) | {"partial_rotary_factor": rope.get("partial_rotary_factor")}
        is_rope = key in old or key == "partial_rotary_factor"
        found = rope[old.get(key, key)] if is_rope else theirs[key]
        assert found == value, key
    if ARCHITECTURES[family].windows:
        assert theirs.get("sliding_window") == ARCHITECTURES[family].absent.get("sliding_window")
    if local := ARCHITECTURES[family].local_rotary:
        assert theirs["rope_parameters"]["sliding_attention"]["rope_theta"] == local[1]


def test_broken_folders_are_refused(hf: Path, tmp_path: Path) -> None:
    """Broken folders are refused in one line."""

    def refusal() -> str:
        with pytest.raises(UserError) as caught:
            warm_start(str(tmp_path), model_of(LEARNED))
        return str(caught.value)

    assert "expected a run directory, a directory of checkpoints, or a Hugging Face folder" in refusal()
    (tmp_path / "config.json").write_text("{")
    assert "config.json: expected a JSON object" in refusal()
    (tmp_path / "config.json").write_bytes((hf / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    assert "model.safetensors is missing; weights are read from safetensors only" in refusal()
    (tmp_path / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:-7])
    assert "model.safetensors: not a safetensors file" in refusal()


def test_weights_that_are_not_read(hf: Path, tmp_path: Path) -> None:
    """A head of its own beside tied embeddings, which transformers keeps, and weights that are not finite."""
    (tmp_path / "config.json").write_bytes((hf / "config.json").read_bytes())
    tensors = load_file(hf / "model.safetensors")
    embedding = tensors["transformer.wte.weight"]
    save_file({**tensors, "lm_head.weight": embedding.copy()}, tmp_path / "model.safetensors")
    model = model_of(LEARNED)
    assert whole(warm_start(str(tmp_path), model), model)  # a copy of the embedding
    save_file({**tensors, "lm_head.weight": embedding * 2}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight is not the embedding, and the model's are tied"):
        warm_start(str(tmp_path), model)
    for value in (np.nan, np.inf):
        bad = {name: x.copy() for name, x in tensors.items()}
        bad["transformer.h.1.mlp.c_fc.weight"][3, 5] = value
        save_file(bad, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=r"tensor h\.1\.mlp\.c_fc\.weight: holds values that are not finite"):
            warm_start(str(tmp_path), model)


@pytest.mark.parametrize("dtype", ["int8", "bool", "uint8", "int32"])
def test_tensor_of_integers_is_no_weight(dtype: str, hf: Path, tmp_path: Path) -> None:
    """As quantized folders hold them: cast to floats they would be another model, with finite losses."""
    for name, data in contents(hf).items():
        (tmp_path / name).write_bytes(data)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("mlp.c_fc.weight"))
    save_file(tensors | {name: tensors[name].astype(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"c_fc.weight: holds (I|U|BOOL)\S*, expected F64, F32, F16 or BF16"):
        warm_start(str(tmp_path), model_of(LEARNED))


def test_constants_of_an_activation_are_checked(tmp_path: Path) -> None:
    """Apertus stores constants of its activation, in bfloat16; other values would be another model."""
    size = SIZES["apertus"]
    save(tmp_path / "run", size, 0)
    export(str(tmp_path / "run"), tmp_path / "hf", dtype="bfloat16")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    names = [name for name in tensors if name.endswith(("act_fn.beta", "act_fn.eps"))]
    assert {tensors[name].shape for name in names} == {()} and len(names) == 2 * size.N
    assert HuggingFaceFolder(tmp_path / "hf").whole_size().activation == "xielu"
    name = "model.layers.1.mlp.act_fn.beta"
    save_file(tensors | {name: np.asarray(0.6, np.float32)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(UserError, match=r"layers.1.mlp.act_fn.beta: holds 0.6\d*; zero supports only 0.5"):
        HuggingFaceFolder(tmp_path / "hf")


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "sub/../../elsewhere.safetensors", "{parent}/elsewhere.safetensors"]
)
def test_weight_map_outside_the_folder(name: str, hf: Path, tmp_path: Path) -> None:
    """A weight map that leads out of the folder is refused."""
    (tmp_path / "elsewhere.safetensors").write_bytes((hf / "model.safetensors").read_bytes())
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_bytes((hf / "config.json").read_bytes())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": name.format(parent=tmp_path)}}))
    with pytest.raises(UserError, match=r"weight_map names '.*elsewhere\.safetensors'; expected a file in this folder"):
        warm_start(str(folder), model_of(LEARNED))


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"wte.weight": 3}}], ids=str)
def test_unusable_weight_map(index: dict[str, Any], hf: Path, tmp_path: Path) -> None:
    """An index without a usable weight map is refused."""
    (tmp_path / "config.json").write_bytes((hf / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json: expected a weight_map from the names of tensors"):
        warm_start(str(tmp_path), model_of(LEARNED))


def test_no_scaling_is_stated() -> None:
    """A gpt-oss without scaling says so, because its class scales where the file says nothing."""
    import transformers

    architecture, size = ARCHITECTURES["gpt_oss"], dataclasses.replace(SIZES["gpt_oss"], rotary_scaling=None)
    config = write_config(architecture, size)
    made: Any = transformers.GptOssConfig
    assert made(**config).rope_parameters["rope_type"] == "default"
    assert read_choices("config.json", config, architecture, size.N)["rotary_scaling"] is None
    del config["rope_parameters"]
    assert made(**config).rope_parameters["rope_type"] == "yarn"
    scaling = read_choices("config.json", config, architecture, size.N)["rotary_scaling"]
    assert scaling == FAMILIES["gpt_oss"]["rotary_scaling"]


def test_mxfp4_is_read(tmp_path: Path) -> None:
    """Experts in 4-bit floats, as gpt-oss is published, are the weights that transformers makes of them."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    size = dataclasses.replace(SIZES["gpt_oss"], embedding_dim=64, mlp_dim=32)
    save(tmp_path / "run", size, 0)
    export(str(tmp_path / "run"), tmp_path / "hf")
    tensors, rng = load_file(tmp_path / "hf" / "model.safetensors"), np.random.default_rng(0)
    expected = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(118, 131, blocks.shape[:-1], np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        made = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
        expected[name] = made.float().numpy()  # of bfloat16, which holds each value exactly
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}})
    )
    model = model_of(size)
    experts = whole(warm_start(str(tmp_path / "hf"), model), model)["blocks"]["experts"]
    for layer in range(size.N):
        both = expected[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        np.testing.assert_array_equal(experts["mlp_gate"]["kernel"][layer], both[..., ::2])
        np.testing.assert_array_equal(experts["mlp_in"]["kernel"][layer], both[..., 1::2])
        down = expected[f"model.layers.{layer}.mlp.experts.down_proj"]
        np.testing.assert_array_equal(experts["mlp_out"]["kernel"][layer], down)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(UserError, match=r"down_proj: holds nothing"):
        warm_start(str(tmp_path / "hf"), model)
