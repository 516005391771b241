"""A vocabulary that grows: new rows at the mean of the others, tuned, and exported with the resized config."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zero
from tests.helpers import cli
from tests.helpers.brought import SHAPE, save_folder
from tests.helpers.corpora import make
from zero.base.errors import UserError
from zero.commands.cli import compose
from zero.corpus.text.tokenizers import load_tokenizer
from zero.exchange.export import export
from zero.exchange.warm_start import warm_start
from zero.run.train import train
from zero.training.sharded_gpt import ShardedGPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

# PEFT reads a deprecated property of transformers.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
GROWN = SHAPE["vocab_size"] + 14
TOKENS = np.arange(24)[None] * 7 % 300
JOB = (
    *(key for key in cli.TINY if not key.startswith(("model.", "data.index", "data.max", "training.total"))),
    *("model.warm_start=true", "model.model_path=folder", "data.max_context=16"),
    *("data.index_path_train=index/c_train.index", "data.index_path_validation=null"),
    *("training.total_steps=4", "training.peak_learning_rate=1e-2", "training.max_epochs=9", "zero.stage=3"),
)


def logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(TOKENS)).logits[0].numpy()


def of_transformers(folder: Path, is_resized: bool) -> Any:
    """The model of a folder in float32; resized, with new rows at the mean of the others."""
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    if is_resized:
        model.resize_token_embeddings(GROWN, mean_resizing=False)
        old = SHAPE["vocab_size"]
        with torch.no_grad():
            for table in {model.get_input_embeddings(), model.get_output_embeddings()}:
                table.weight[old:] = table.weight[:old].mean(0)
    return model


def trained(tmp_path: Path, name: str, *keys: str) -> None:
    config, size = compose([*JOB, *keys])
    assert size.vocab_size == GROWN
    (tmp_path / name).mkdir()
    assert train(config, size, tmp_path / name) == 0


def prepare(family: str, tmp_path: Path) -> None:
    """A folder of this family, and a corpus of its tokens."""
    save_folder(tmp_path / "folder", family)
    tokenizer = load_tokenizer("folder/tokenizer.json")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"shard {i} gather"}) + "\n" for i in range(40)))
    make(tmp_path / "a.jsonl", tmp_path, tokenizer=tokenizer, row_tokens=16)


OVERRIDE = f"model.override.vocab_size={GROWN}"


def test_new_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start has the table of the folder, and new rows at the mean of its rows."""
    monkeypatch.chdir(tmp_path)
    save_folder(tmp_path / "folder", "qwen2")
    _, size = compose([*JOB, OVERRIDE])
    model = ShardedGPT(size, zero.Axis("zero", (1, 8)), 3)
    whole = zero.to_host(warm_start("folder", model), model.layout, model.axis)
    table = whole["vocabulary"]["table"].reshape(-1, size.embedding_dim)[:GROWN]
    weights = of_transformers(tmp_path / "folder", is_resized=True).get_input_embeddings().weight
    np.testing.assert_allclose(table, weights.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "family", [pytest.param("qwen2", marks=pytest.mark.wide), pytest.param("llama", marks=pytest.mark.slow)]
)
def test_new_rows_are_the_mean(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights, at rate 0, are the model of transformers, resized."""
    monkeypatch.chdir(tmp_path)
    prepare(family, tmp_path)
    trained(tmp_path, "still", OVERRIDE, "training.peak_learning_rate=0", "training.end_learning_rate=0")
    export("still", tmp_path / "out", dtype="float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == GROWN
    expected = logits(of_transformers(tmp_path / "folder", is_resized=True))
    np.testing.assert_allclose(logits(of_transformers(tmp_path / "out", is_resized=False)), expected, atol=1e-4)


@pytest.mark.parametrize(  # tied and untied
    "family", [pytest.param("qwen2", marks=pytest.mark.wide), pytest.param("llama", marks=pytest.mark.slow)]
)
def test_a_vocabulary_grows(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters need the tables trained; PEFT has the merged logits on the resized base."""
    import peft

    monkeypatch.chdir(tmp_path)
    prepare(family, tmp_path)
    with pytest.raises(UserError, match=r"tuning\.modules_to_save: expected \[vocabulary.* as the model has 14 tokens"):
        trained(tmp_path, "refused", OVERRIDE, "tuning=lora")
    tables = "[vocabulary]" if family == "qwen2" else "[vocabulary,head]"
    trained(tmp_path, "tuned", OVERRIDE, "tuning=lora", f"tuning.modules_to_save={tables}")
    export("tuned", tmp_path / "merged", merges=True, dtype="float32")
    export("tuned", tmp_path / "adapters")
    merged = logits(of_transformers(tmp_path / "merged", is_resized=False))
    base = of_transformers(tmp_path / "folder", is_resized=True)
    assert np.abs(merged - logits(base)).max() > 1e-3
    model = peft.PeftModel.from_pretrained(base, "adapters")
    np.testing.assert_allclose(logits(model), merged, atol=1e-3)


def test_a_tokenizer_with_more_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the folder grows to the tokens of data.tokenizer."""
    monkeypatch.chdir(tmp_path)
    save_folder(tmp_path / "folder", "qwen2", vocab_size=300)
    tokenizer = load_tokenizer("folder/tokenizer.json")
    assert tokenizer.vocab_size > 300
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.json").write_bytes((tmp_path / "folder" / "tokenizer.json").read_bytes())
    assert compose([*JOB, "data.tokenizer=own/tokenizer.json"])[1].vocab_size == tokenizer.vocab_size
    assert compose([*JOB, "data.tokenizer=bytes"])[1].vocab_size == 300
