"""config.json of an export repeats that of the folder that the run started from, but for what was trained."""

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from tests.exchange.random_weights import LEARNED, save
from tests.exchange.small_models import small
from zero.exchange.architecture_table import ARCHITECTURES
from zero.exchange.export import export
from zero.exchange.hf_config import read_architecture, read_size, write_config, write_config_as
from zero.exchange.warm_start import described_folder
from zero.models.config import GPTConfig

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
OF_FOLDER = {"architectures", "model_type", "auto_map", "quantization_config"}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
# Keys of published folders that the classes of transformers drop or never had.
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": 64, "task_specific_params": {"text-generation": {"max_length": 50}}},
    "llama": {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen2": {"rope_parameters": YARN, "max_window_layers": 21},
    "deepseek_v3": {"rope_parameters": YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}},
}


def source_of(model_type: str) -> dict[str, Any]:
    keys = {**small(model_type), **MORE.get(model_type, {})}
    keys = {key: value for key, value in keys.items() if value is not None or not key.startswith("rope")}
    return {**keys, "transformers_version": "4.40.0", "torch_dtype": "bfloat16", "auto_map": {"AutoConfig": "a.py"}}


def size_of(source: dict[str, Any]) -> tuple[Any, GPTConfig]:
    architecture = read_architecture("here", source)
    return architecture, read_size("here", source, architecture, int(source[architecture.layers_key]))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_keys_are_those_of_the_source(model_type: str) -> None:
    """None is added or lost, at any depth, but those that concern the folder; the model is the same."""
    source = source_of(model_type)
    architecture, size = size_of(source)
    content = write_config_as(architecture, size, source)
    further_layers = set() if architecture.further is None else {architecture.further.key}
    gone = OF_FOLDER | further_layers | {"_name_or_path"}
    kept = {key: value for key, value in source.items() if key not in gone}
    assert {key: value for key, value in content.items() if key not in OF_FOLDER} == kept
    assert content["architectures"] == [architecture.class_name] and "auto_map" not in content
    assert write_config(architecture, size_of(content)[1]) == write_config(architecture, size)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "deepseek_v3"])
def test_keys_that_were_trained_are_the_runs(model_type: str) -> None:
    """A longer context, further tokens and another base of positions: those keys, and nothing else."""
    source = source_of(model_type)
    architecture, size = size_of(source)
    longer = dataclasses.replace(size, vocab_size=size.vocab_size + 3, block_size=96)
    content = write_config_as(architecture, longer, source)
    changed = {key for key in content if content[key] != source.get(key)} - OF_FOLDER
    assert changed == {"vocab_size", "max_position_embeddings"} and size_of(content)[1] == longer
    based = dataclasses.replace(size, rotary_base=5e5)
    assert size_of(write_config_as(architecture, based, source))[1] == based


def test_another_architecture_is_written_anew() -> None:
    architecture, size = size_of(source_of("llama"))
    assert write_config_as(architecture, size, source_of("mistral")) == write_config(architecture, size)


def test_scales_of_yarn() -> None:
    """Without a source: no attention_factor where it is the default; DeepSeek's scales by their own names."""
    architecture, size = size_of(source_of("qwen2"))
    assert "attention_factor" not in write_config(architecture, size)["rope_scaling"]
    architecture, size = size_of(source_of("deepseek_v3"))
    written = write_config(architecture, size)
    scaling = written["rope_scaling"]
    assert (scaling["mscale"], scaling["mscale_all_dim"]) == (1.0, 1.0) and "attention_factor" not in scaling
    assert size_of(written)[1] == size


def test_an_export_keeps_the_keys_of_its_folder(tmp_path: Path) -> None:
    source = {key: value for key, value in source_of("gpt2").items() if key not in ("auto_map", "dtype")}
    source |= {"n_embd": 42, "n_layer": 3, "n_head": 3, "n_positions": 128, "n_inner": None}
    source |= {"bos_token_id": 0, "eos_token_id": 0, "layer_norm_epsilon": LEARNED.norm_epsilon}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(source))
    save_file({}, tmp_path / "hf" / "model.safetensors")
    save(tmp_path / "run", LEARNED, 0, brought=described_folder(str(tmp_path / "hf")))
    export(str(tmp_path / "run"), tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["n_ctx"] == 64 and content["torch_dtype"] == "bfloat16" and "dtype" not in content
    assert content["architectures"] == ["GPT2LMHeadModel"]
    assert content.keys() - source.keys() <= {"architectures"}
