"""Sampling from the outside: prompts that span lines, log-probabilities, and a prompt per line from the terminal."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import cli
from zero.base.errors import UserError
from zero.commands.help import COMMANDS
from zero.inference.config import Sample
from zero.inference.interactive import _changed


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With a run that has ended."""
    cli.Lasting(workplace).train("trained", *cli.TINY)
    return workplace


def test_prompts_and_log_probabilities(lasting: cli.Lasting) -> None:
    """Prompts of a .jsonl file span lines, and greedy tokens have the log-probabilities of an evaluation."""
    prompts = ["one\ntwo", "shard"]
    (lasting.workplace / "prompts.jsonl").write_text(
        f"{json.dumps(prompts[0])}\n{json.dumps({'prompt': prompts[1]})}\n"
    )
    keys = (
        "sample.prompt_file=prompts.jsonl",
        "sample.tokens=6",
        "sample.temperature=0",
        "sample.log_probabilities=true",
    )
    run = lasting.train("sampled", "mode=sample", "model.model_path=trained", *keys, "sample.log_probabilities=true")
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    for line in lines:
        assert len(line["log_probabilities"]) >= len(line["text"].encode("utf-8", "ignore")) // 4
        assert all(-10 < x < 0 for x in line["log_probabilities"])


def test_the_example_of_help(lasting: cli.Lasting) -> None:
    """The command that --help prints runs as it is written; keys after it make it short."""
    (words,) = [shlex.split(words) for words in COMMANDS if "sample.prompt" in words]
    done = lasting.run(*words, "model.model_path=trained", "sample.tokens=4", "hydra.run.dir=example")
    assert done.returncode == 0, done.stderr
    assert json.loads((lasting.workplace / "example" / "samples.jsonl").read_text())["prompt"] == "def main("


def test_settings_of_a_conversation() -> None:
    """A setting is checked as in the configuration."""
    blank: dict[str, Any] = dict.fromkeys(("prompt", "prompt_file", "top_k", "top_p", "typical_p", "eta"))
    options = Sample(**blank, temperature=1.0)
    assert _changed(options, "temperature 0.7").temperature == 0.7
    assert (
        _changed(options, "top_k 5").top_k == 5 and _changed(_changed(options, "top_k 5"), "top_k null").top_k is None
    )
    for command, named in (
        ("temperature -1", "/temperature -1: expected zero or more"),
        ("temperature hot", "/temperature hot: "),
        ("prompt x", "/prompt: expected one of tokens, seed, repetition_penalty"),
    ):
        with pytest.raises(UserError, match=named):
            _changed(options, command)


@pytest.mark.slow
def test_conversation(forks: cli.Forks) -> None:
    """Each line of the input is continued; settings and mistakes are no prompts."""
    keys = ("sample.interactive=true", "sample.tokens=5", "sample.temperature=0", "hydra.run.dir=talk")
    done = subprocess.run(
        [sys.executable, str(cli.MAIN), "mode=sample", "model.model_path=trained", *keys],
        cwd=forks.workplace,
        env=cli.environment(),
        input="shard\n/tokens 2\n/temperature hot\nshard\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.rstrip("\n").split("\n")[:2]
    assert first.startswith(second) and "error: /temperature hot" in done.stderr
