"""The commands that zero-prepare prints: the composer takes each, and one of each kind is run."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.composing import CONF
from tests.helpers import cli
from tests.helpers.brought import save_folder
from tests.helpers.corpora import call
from zero.commands.cli import compose
from zero.corpus.preparing.zero_prepare import MODEL
from zero.run.fresh import TUNING_RATES

PAIR = {"prompt": "What?", "chosen": " A shard.", "rejected": " A shed."}
ANSWER = {"prompt": "What?", "completion": " A shard."}
LABELED = {**ANSWER, "label": True}
TEXT = {"text": "Each device holds one shard of each leaf."}
# The objects of a source, the options of zero-prepare, and the keys that the printed command must have.
PREPARED: dict[str, tuple[dict[str, Any], str, str]] = {
    "text": (TEXT, "", "model.override.block_size=48 training.staged_warmup_steps=0"),
    "text with a target": (TEXT, "--row-tokens 65", "model.override.block_size=64"),
    "text that begins rows": (TEXT, "--row-tokens 65 --begin-rows", "model.override.block_size=64"),
    "text, trained tokenizer": (TEXT, "--train-tokenizer 270", "model.override.vocab_size=270"),
    "text of a model": (TEXT, "--tokenizer base/tokenizer.json", "+tune=all training.loss_on=all"),
    "rows of a model": (TEXT, "--tokenizer base/tokenizer.json --one-document-per-row", "+tune=all"),
    "completions": (ANSWER, "--completions", "training.loss_on=completion"),
    "completions of a model": (ANSWER, "--completions --tokenizer base/tokenizer.json", "+tune=all"),
    "pairs": (PAIR, "--preferences", "+tune=preferences objective=dpo model.model_path=MODEL"),
    "pairs of a model": (PAIR, "--preferences --tokenizer base/tokenizer.json", "+tune=preferences objective=dpo"),
    "labels": (LABELED, "--labels", "+tune=preferences objective=kto model.model_path=MODEL"),
    "labels of a model": (LABELED, "--labels --tokenizer base/tokenizer.json", "+tune=preferences objective=kto"),
}
RUN = ("text with a target", "completions of a model", "pairs of a model", "labels of a model")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as from the hub."""
    folder = tmp_path_factory.mktemp("base") / "base"
    save_folder(folder, "qwen2")
    return folder


def printed(kind: str, place: Path, base: Path) -> list[str]:
    """The command that zero-prepare prints last, without the program."""
    entry, options, _ = PREPARED[kind]
    first = next(iter(entry))
    lines = [json.dumps({**entry, first: f"{entry[first]} {number}"}) for number in range(40)]
    place.joinpath("lines.jsonl").write_text("\n".join(lines))
    place.joinpath("base").symlink_to(base)
    done = call("lines.jsonl", "--row-tokens", "48", *options.split())
    assert done.returncode == 0, done.stderr
    *_, introduction, command = done.stdout.splitlines()
    program, *overrides = shlex.split(command)
    assert (introduction, program) == ("Train on it:", "zero-train")
    return [override.replace(f"={MODEL}", "=base") for override in overrides]


@pytest.mark.parametrize("kind", PREPARED)
def test_command_of_a_new_corpus(kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is checked whole, and a model that has weights starts at a rate that tunes it."""
    monkeypatch.chdir(tmp_path)
    overrides = printed(kind, tmp_path, base)
    assert {word.replace(f"={MODEL}", "=base") for word in PREPARED[kind][2].split()} <= set(overrides)
    config, size = compose(overrides)
    assert config.data.max_context <= size.block_size
    is_tuned = "base" in PREPARED[kind][1] or MODEL in PREPARED[kind][2]
    assert config.model.warm_start is is_tuned
    assert (config.training.peak_learning_rate <= TUNING_RATES[False]) is is_tuned


@pytest.mark.wide
@pytest.mark.parametrize("kind", RUN)
def test_command_of_a_new_corpus_runs(kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("training.total_steps=2", "training.warmup_steps=1", "data.wandb_project=null", "training.sample_tokens=0")
    small = ("distributed.cpu_devices=2", "training.batch_size=2")
    done = cli.Forks(tmp_path).check(*printed(kind, tmp_path, base), *short, *small)
    assert "finished at step 2" in done.stderr and "forgets" not in done.stderr


def test_rates_are_those_of_the_presets() -> None:
    """The warning about a high rate compares with conf/tune."""
    for adapts, name in ((False, "all"), (True, "lora")):
        preset = yaml.safe_load((CONF / "tune" / f"{name}.yaml").read_text())
        assert preset["training"]["peak_learning_rate"] == TUNING_RATES[adapts]


@pytest.mark.wide
def test_warm_start_at_the_rate_of_pre_training(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line says that the model forgets; the run goes on."""
    monkeypatch.chdir(tmp_path)
    overrides = [word for word in printed("completions of a model", tmp_path, base) if word != "+tune=all"]
    overrides += ["model.warm_start=true", "training.loss_on=completion", "training.staged_warmup_steps=0"]
    overrides += ["training.total_steps=1", "training.warmup_steps=0", "data.wandb_project=null"]
    done = cli.Forks(tmp_path).check(*overrides, "training.sample_tokens=0", "training.batch_size=2")
    assert "training.peak_learning_rate=0.003 is 100 times the 3e-05 of +tune=all" in done.stderr
