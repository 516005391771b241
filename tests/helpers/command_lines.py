"""Hands command lines to the parsers of the programs that they name.

- `accept`: raises unless the program that a command names accepts it; nothing is run.
"""

import argparse
import importlib
import importlib.util
import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.config.composing import compose
from zero.commands.arguments import take_text_literally
from zero.commands.help import help_text
from zero.commands.modes import check as check_configuration
from zero.job.sizes import load_sizes

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
TRAINERS = ("main_zero.py", "zero-train", "zero-plan", "trainLoop.sh")
# What is not ours, or was tested with a stub, by its first word.
OTHERS = {
    *("cd", "export", "gcloud", "grep", "head", "hf", "patch"),
    *("pip", "source", "sphinx-build", "srun", "tmux", "xprof", "zcat"),
}


class Parsed(Exception):
    """Raised in place of the rest of a program, once its own parser has accepted the command line."""


def _check_overrides(words: list[str]) -> None:
    """Raises for a key that the configuration does not have, or for a value of a wrong type."""
    overrides = [word for word in words if not word.startswith("--")]
    if "--help" in words:
        help_text(overrides)  # which raises for a name that it does not know
        return
    if "--multirun" in words:  # each key once, with the first of its values
        overrides = [word.split(",")[0] for word in overrides]
    overrides = take_text_literally(overrides)
    config = compose(*overrides)
    # A plan reads no files, so that rules between keys and keys without effect are seen too.
    if config.mode == "plan" and not config.model.size.startswith("hf:"):
        check_configuration(config, load_sizes(), [word.lstrip("+").partition("=")[0] for word in overrides])


def _check_shell_script(script: Path, words: list[str]) -> None:
    """Each word that is an option or a subcommand stands in the script."""
    for word in words:
        if word.startswith("--") or (script.name == "slice.sh" and word == words[0]):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", script.read_text()), f"{script.name}: {word}"


def accept(words: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path = REPOSITORY) -> None:
    """Raises unless the parser of the program that a command names accepts it.

    Args:
      folder: of the page with the command; a program may also be in a folder beside that page.
    """

    def parse(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        self.allow_abbrev = False
        original(self, args, namespace)
        raise Parsed

    def leave(self: argparse.ArgumentParser, status: int = 0, message: str | None = None) -> None:
        if "the following arguments are required" in (message or ""):
            raise Parsed  # a page may name a program with an option, without the rest
        raise ValueError(message)

    original = argparse.ArgumentParser.parse_args
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(argparse.ArgumentParser, "exit", leave)
        patch.syspath_prepend(str(REPOSITORY))
        _hand_over(words, patch, folder)


def _hand_over(words: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    while "=" in words[0] and not words[0].startswith("-"):  # VARIABLE=value before the program
        words = words[1:]
    if Path(words[0]).name == "python":
        words = words[1:]
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]), f"no module {words[1]}"
            return
    program, *arguments = words
    name = Path(program).name
    if name in OTHERS:
        return
    if name in TRAINERS:
        return _check_overrides(arguments)
    if program.endswith(".sh") or program.startswith(".ci/"):
        script = REPOSITORY / program
        _check_overrides([word for word in arguments if re.match(r"\+?[\w.]+=", word)])
        return _check_shell_script(script, arguments)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    if program in SCRIPTS:
        module, function = SCRIPTS[program].split(":")
        with pytest.raises(Parsed):
            getattr(importlib.import_module(module), function)()
        return None
    found = [path for path in (REPOSITORY / program, *folder.glob(f"*/{program}")) if path.exists()]
    assert found, f"no such program: {program}"
    if "parse_args" in found[0].read_text() or name == "prepare.py":
        with pytest.raises(Parsed):
            runpy.run_path(str(found[0]), run_name="__main__")
    else:
        assert not arguments, f"{program} takes no arguments"
    return None
