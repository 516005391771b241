"""Every kind of tokenizer files: a model that learned one-word answers stops after its word, in transformers.

The folder of each home of `tests/helpers/brought.py` is tuned on prompts with completions, by the command that
zero-prepare prints, exported, and asked by `transformers`' own `generate`, which stops at the ends of the exported
folder.
"""

import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers import cli, trl_losses
from tests.helpers.brought import HOMES, SHAPE, save_tokenizer
from tests.helpers.corpora import call
from zero.commands.cli import compose
from zero.exchange.export import export
from zero.record.run_files import CONFIG_FILE
from zero.run.train import train

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

CONTEXT = 32
QUESTIONS = {"a shard?": " gather", "layout": " stage", "zéro or 2048?": " scatter", "漢字": " shard"}
JOB = (
    *(key for key in cli.TINY if not key.startswith(("model.", "data.index", "data.max", "training."))),
    "training.sample_tokens=0",
    *("training.batch_size=8", "training.staged_warmup_steps=0", "training.warmup_steps=3"),
    *("training.total_steps=60", "training.evaluation_frequency=60", "training.max_epochs=100"),
    *("training.peak_learning_rate=1e-2", "training.gradient_accumulation_steps=1"),
)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question several times, as a hash of the text decides about validation; `words.jsonl` has them."""
    monkeypatch.chdir(tmp_path)
    lines = [
        {"prompt": f"{'stage ' * i}{question}", "completion": word}
        for question, word in QUESTIONS.items()
        for i in range(8)
    ]
    Path("words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}


def save_small(folder: Path, home: str, kind: str = "llama") -> None:
    """A small model of this type with random weights and the tokenizer's files of a home."""
    import transformers

    transformers.set_seed(0)
    keys = {**SHAPE, "initializer_range": 0.1, **(DELTA if kind == "qwen3_5_text" else {})}
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.CONFIG_MAPPING[kind](**keys))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_tokenizer(folder, home)


def assert_stops(folder: str) -> None:
    """transformers answers each question with its word, and ends there."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model = trl_losses.model_of(Path(folder))
    ends = model.generation_config.eos_token_id
    for prompt, word in QUESTIONS.items():
        encoded = tokenizer(prompt, return_tensors="pt")
        written = model.generate(**encoded, do_sample=False, max_new_tokens=24)[0, encoded.input_ids.shape[1] :]
        *text, end = written.tolist()
        assert end in (ends if isinstance(ends, list) else [ends]), (prompt, tokenizer.decode(written))
        assert tokenizer.decode(text) == word


@pytest.mark.slow
@pytest.mark.parametrize(("home", "kind"), [*((home, "llama") for home in HOMES), ("qwen2", "qwen3_5_text")])
@pytest.mark.usefixtures("lines")
def test_generation_stops_after_the_answer(home: str, kind: str, tmp_path: Path) -> None:
    save_small(tmp_path / "folder", home, kind)
    done = call(
        *("words.jsonl", "--completions", "--one-document-per-row", "--validation-fraction", "0.1"),
        *("--tokenizer", "folder/tokenizer.json", "--row-tokens", str(CONTEXT)),
    )
    assert done.returncode == 0, done.stderr
    printed = [word for word in shlex.split(done.stdout.splitlines()[-1]) if "=" in word]
    assert {"+tune=all", "model.model_path=folder"} <= {*printed}
    config, size = compose([*printed, *JOB])
    assert config.model.warm_start is True and config.training.loss_on == "completion"
    (tmp_path / "run").mkdir()
    OmegaConf.save(OmegaConf.create(dataclasses.asdict(config)), tmp_path / "run" / CONFIG_FILE)
    assert train(config, size, tmp_path / "run") == 0
    assert compose(["resume=run"])[1] == size  # no entry of a file is needed, then either
    export("run", tmp_path / "out")
    assert_stops("out")


@pytest.mark.wide
@pytest.mark.usefixtures("lines")
def test_one_command(tmp_path: Path) -> None:
    """From a folder and a file of lines to a tuned, scored and exported model, which stops after its answers."""
    save_small(tmp_path / "folder", "smollm3")  # its documents are divided by another token than its answers end with
    keys = ("+tune=all", "model.model_path=folder", "data.corpus=words.jsonl", "export.folder=tuned")
    job = cli.later_values(*JOB, *keys, f"data.max_context={CONTEXT}", "distributed.cpu_devices=2")
    forks = cli.Forks(tmp_path)
    run = forks.train("run", *job)
    assert cli.metrics(run)[-1]["validation/loss"] < 0.1
    assert_stops("tuned")
    written = Path("tuned/model.safetensors").stat().st_mtime_ns
    assert "nothing to do" in forks.check("--resume", "hydra.run.dir=run").stderr
    cli.check_refusal(forks.run(*job, "hydra.run.dir=again"), "export.folder=tuned already exists")
    # As if the run had been killed after its last checkpoint.
    Path("tuned").rename("earlier")
    forks.check("--resume", "hydra.run.dir=run")
    assert Path("tuned/model.safetensors").read_bytes() == Path("earlier/model.safetensors").read_bytes()
    assert Path("tuned/model.safetensors").stat().st_mtime_ns > written
