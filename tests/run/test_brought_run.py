"""A folder as it is on the hub through all of zero: used at once, fine-tuned on chats, merged, exported, used again.

At each step its ids, stops, texts and files are those of transformers and PEFT.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers import cli
from tests.helpers.brought import MODELS, save_folder, texts
from tests.helpers.corpora import call
from zero.cli import compose
from zero.exchange.brought import brought
from zero.exchange.export import export
from zero.inference.evaluate import evaluate
from zero.inference.sample import TEXTS_FILE, sample
from zero.run.train import train

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

# peft asks transformers for a property that is deprecated there.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]
STEPS = 8
QUESTION = "What is a shard?"
DEVICES = "distributed.cpu_devices=8"
SAMPLE = (DEVICES, "sample.temperature=0", "sample.tokens=12", f"sample.prompt={QUESTION}")
JOB = (
    *(key for key in cli.TINY if not key.startswith(("model.", "data.index", "data.max", "training.total"))),
    "model.size=brought",
    "model.sizes=sizes.yaml",
    "model.warm_start=true",
    "model.model_path=folder",
    "data.max_context=64",
    "data.tokenizer=data/corpus/chats/tokenizer.json",
    "data.index_path_train=data/index/chats_train.index",
    "data.index_path_validation=data/index/chats_validation.index",
    "training.loss_on=completion",
    "training.sample_tokens=8",
    "tuning=lora",
    "tuning.rank=3",
    "tuning.targets=[query,value]",
    "training.peak_learning_rate=1e-2",
    f"training.total_steps={STEPS}",
    f"training.evaluation_frequency={STEPS}",
)


def sampled(place: Path, *keys: str) -> str:
    """The text of mode=sample."""
    config, size = compose(["mode=sample", *SAMPLE, *keys])
    place.mkdir()
    assert sample(config, size, place) == 0
    return json.loads((place / TEXTS_FILE).read_text())["text"]


def of_transformers(folder: Path, is_chat: bool, adapters: Path | None = None) -> str:
    """The greedy text of transformers, up to its own stop; in float32, with the adapters of a folder in PEFT."""
    import peft
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(adapters or folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, adapters)
    encoded = tokenizer(QUESTION, return_tensors="pt")
    if is_chat:
        chat = [{"role": "user", "content": QUESTION}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**encoded, do_sample=False, max_new_tokens=12)[0, encoded["input_ids"].shape[1] :].tolist()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    stops = [i for i, token in enumerate(written) if token in ends]
    return tokenizer.decode(written[: stops[0]] if stops else written)


@pytest.mark.parametrize("family", [name for name in MODELS if name not in ("phi3", "gpt_oss")])
def test_a_folder_of_the_hub(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    save_folder(folder, family)
    # Used at once.
    for is_chat in (False, True):
        mine = sampled(tmp_path / f"sample_{is_chat}", "model.model_path=folder", f"sample.chat={is_chat}")
        assert mine == of_transformers(folder, is_chat)
    # Its chats as a corpus, with the files of its tokenizer.
    chats = [
        [{"role": "user", "content": f"What is {text}?"}, {"role": "assistant", "content": "A shard, I think."}]
        for text in texts(90)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    options = ("--completions", "--one-document-per-row", "--tokenizer", "folder/tokenizer.json", "--row-tokens", "64")
    done = call("chats.jsonl", *options, "--validation-fraction", "0.2")
    assert done.returncode == 0, done.stderr
    found = brought("folder")
    assert found is not None
    entry = {name: value for name, value in dataclasses.asdict(found.size).items() if value is not None}
    OmegaConf.save(OmegaConf.create({"brought": entry}), tmp_path / "sizes.yaml")
    # Evaluated, fine-tuned, evaluated again.
    read = ("data.index_path_validation", "data.tokenizer", "training.loss_on")
    of_corpus = [key for key in JOB if key.startswith(read)]
    config, size = compose(["mode=evaluate", DEVICES, "model.model_path=folder", "evaluate.context=64", *of_corpus])
    (tmp_path / "before").mkdir()
    assert evaluate(config, size, tmp_path / "before") == 0
    config, size = compose([*JOB])
    run = tmp_path / "run"
    run.mkdir()
    assert train(config, size, run) == 0
    config, size = compose(["mode=evaluate", DEVICES, "model.model_path=run", "evaluate.context=64"])
    (tmp_path / "after").mkdir()
    assert evaluate(config, size, tmp_path / "after") == 0
    before, after = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("before", "after"))
    assert before["tokens"] == after["tokens"] and after["loss"] < before["loss"]
    # Adapters of PEFT on the folder, where they are at once.
    export(str(run), tmp_path / "adapters")
    keys = ["evaluate.adapters=[adapters]", "evaluate.context=64", *of_corpus]
    config, size = compose(["mode=evaluate", DEVICES, "model.model_path=folder", *keys])
    (tmp_path / "adapted").mkdir()
    assert evaluate(config, size, tmp_path / "adapted") == 0
    adapted = json.loads((tmp_path / "adapted" / "evaluation.json").read_text())["adapters"]["adapters"]
    assert adapted["loss"] == pytest.approx(after["loss"], rel=1e-4)
    # Merged and exported: transformers and PEFT write the same text, up to the same stop.
    export(str(run), tmp_path / "merged", merges=True, dtype="float32")
    text = sampled(tmp_path / "tuned", "model.model_path=run", "sample.chat=true")
    assert text == of_transformers(tmp_path / "merged", is_chat=True)
    assert text == of_transformers(folder, is_chat=True, adapters=tmp_path / "adapters")
    assert text == sampled(tmp_path / "again", "model.model_path=merged", "sample.chat=true")
    # The same folder but for its weights: bfloat16 as it came.
    export(str(run), tmp_path / "out", merges=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        for copy in ("out", "adapters"):
            assert (tmp_path / copy / name).read_bytes() == (folder / name).read_bytes()
    theirs, ours = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("folder", "out"))
    for key in ("dtype", "vocab_size", "tie_word_embeddings", "max_position_embeddings", "model_type", "architectures"):
        assert ours.get(key) == theirs.get(key)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == pytest.approx(
        (folder / "model.safetensors").stat().st_size, rel=0.05
    )
