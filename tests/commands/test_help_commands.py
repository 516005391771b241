"""The commands that the help screen and messages name are commands that the programs have."""

import ast
import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command_lines import REPOSITORY, accept
from tests.helpers.corpora import call
from zero.commands.help import COMMANDS
from zero.commands.zero_report import main as report
from zero.exchange.zero_weights import main as weights


@pytest.mark.parametrize("arguments", COMMANDS)
def test_command_of_the_help_screen(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    accept(["python", "main_zero.py", *shlex.split(arguments)], monkeypatch)


def texts(source: Path) -> Iterator[str]:
    """The literal texts of a source, with a number in place of each value of an f-string."""
    tree = ast.parse(source.read_text())
    parts = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def options_of(program: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The options that the help of a program lists."""
    commands = [("export",), ("merge",), ("average",)] if program == "zero-weights" else [()]
    output = io.StringIO()
    for words in commands:
        monkeypatch.setattr(sys, "argv", [program, *words, "--help"])
        with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
            {"zero-weights": weights, "zero-report": report}[program]()
    return set(re.findall(r"--[\w-]+", output.getvalue()))


def test_options_that_messages_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remedy such as `zero-prepare SOURCE --row-tokens 7` names options that the program has."""
    known = {program: options_of(program, monkeypatch) for program in ("zero-weights", "zero-report")}
    known["zero-prepare"] = set(re.findall(r"--[\w-]+", call("--help").stdout))
    named = set[tuple[str, str]]()
    for source in (REPOSITORY / "zero").rglob("*.py"):
        for text in texts(source):
            for program, words in re.findall(r"(zero-(?:prepare|weights|report))( [^;,:()\n]*)", text):
                named |= {(program, option) for option in re.findall(r"--[\w-]+", words)}
    assert {(program, option) for program, option in named if option not in known[program]} == set()
    assert ("zero-prepare", "--row-tokens") in named and ("zero-weights", "--into") in named
