"""Every command and link of the README and the pages: programs accept the commands, and links lead somewhere."""

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import hydra
import pytest

from tests.config.composing import compose
from zero.base.errors import UserError
from zero.commands.arguments import take_text_literally
from zero.commands.help import help_text
from zero.commands.modes import check as check_configuration
from zero.job.sizes import load_sizes

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *REPOSITORY.glob("*.md"),
    *(
        path
        for folder in ("docs", "data", "examples", "benchmarks/measured")
        for path in REPOSITORY.glob(f"{folder}/**/*.md")
    ),
]
SCRIPTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
TRAINERS = ("main_zero.py", "zero-train", "zero-plan", "trainLoop.sh")
SOURCE_SUFFIXES = {".py", ".yaml", ".yml", ".sh", ".toml", ".jinja", ".sbatch"}
# What is not ours, or was tested with a stub, by its first word.
OTHERS = {
    *("cd", "export", "gcloud", "grep", "head", "hf", "patch"),
    *("pip", "source", "sphinx-build", "srun", "tmux", "xprof", "zcat"),
}


def commands(page: Path) -> list[list[str]]:
    """The words of each command in the shell blocks of a page, and of each one in backticks that names a program."""
    text = page.read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += re.findall(r"`((?:python [\w./-]+\.py|python -m \w|zero-\w+ |\./\w+\.sh|\.ci/\w)[^`]*)`", prose)
    parts = [part for line in lines for part in re.split(r"&&|(?<=\s)\|(?=\s)", line.replace("\n", " "))]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


class Parsed(Exception):
    """Raised in place of the rest of a program, once its own parser has accepted the command line."""


def check_overrides(words: list[str]) -> None:
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


def check_shell_script(script: Path, words: list[str]) -> None:
    """Each word that is an option or a subcommand stands in the script."""
    for word in words:
        if word.startswith("--") or (script.name == "slice.sh" and word == words[0]):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", script.read_text()), f"{script.name}: {word}"


def check(words: list[str], page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hands a command to the parser of the program that it names."""
    while "=" in words[0] and not words[0].startswith("-"):  # VARIABLE=value before the program
        words = words[1:]
    if Path(words[0]).name == "python":
        words = words[1:]
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]), f"{page.name}: no module {words[1]}"
            return
    program, *arguments = words
    name = Path(program).name
    if name in OTHERS:
        return
    if name in TRAINERS:
        return check_overrides(arguments)
    if program.endswith(".sh") or program.startswith(".ci/"):
        script = REPOSITORY / program
        check_overrides([word for word in arguments if re.match(r"\+?[\w.]+=", word)])
        return check_shell_script(script, arguments)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    if program in SCRIPTS:
        module, function = SCRIPTS[program].split(":")
        with pytest.raises(Parsed):
            getattr(importlib.import_module(module), function)()
        return None
    found = [path for path in (REPOSITORY / program, *page.parent.glob(f"*/{program}")) if path.exists()]
    assert found, f"{page.name} names a program that does not exist: {program}"
    if "parse_args" in found[0].read_text() or name == "prepare.py":
        with pytest.raises(Parsed):
            runpy.run_path(str(found[0]), run_name="__main__")
    else:
        assert not arguments, f"{program} takes no arguments"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_programs_accept_the_commands(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        self.allow_abbrev = False
        original(self, args, namespace)
        raise Parsed

    def leave(self: argparse.ArgumentParser, status: int = 0, message: str | None = None) -> None:
        if "the following arguments are required" in (message or ""):
            raise Parsed  # a page may name a program with an option, without the rest
        raise ValueError(message)

    original = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(argparse.ArgumentParser, "exit", leave)
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.syspath_prepend(str(REPOSITORY))
    for words in commands(page):
        check(words, page, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "python main_zero.py zero.stge=1",
        "python main_zero.py mode=plan plan.grid.remat=[full]",
        "python main_zero.py --help optimiser",
        "zero-weights export run folder --stepp 3",
        "python benchmarks/step.py --shap default",
        "python benchmarks/no_such_program.py",
        "./slice.sh creat name zone v3-8",
        "./prepareTPUVM.sh --tests",
        "no-such-program",
    ],
)
def test_a_wrong_command_is_seen(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```bash\n{line}\n```\n")
    with pytest.raises((AssertionError, ValueError, UserError, hydra.errors.HydraException)):
        test_programs_accept_the_commands(page, monkeypatch)


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as forges make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.is_file(), f"{page.name}: {link}"  # the site has no page for a folder
        assert not anchor or anchor in anchors(file), f"{page.name}: {link}"


def sources() -> list[Path]:
    """The files that people write, other than pages: code, settings, scripts."""
    folders = ("zero", "conf", "tests", "benchmarks", "launch", "data", "docs", "examples", ".github", ".ci")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.suffix in SOURCE_SUFFIXES]
    scripts = [path for path in REPOSITORY.iterdir() if path.suffix in SOURCE_SUFFIXES]
    return [path for path in (*files, *scripts) if "corpus" not in path.relative_to(REPOSITORY).parts[:2]]


def absent_pages(text: str) -> set[str]:
    """The pages and pictures below docs/ that a text names and that do not exist."""
    named = re.findall(r"(?<![\w/.:-])docs/(?:README|[a-z][\w./-]*)\.(?:md|ipynb|png|svg|yaml)\b", text)
    return {name for name in named if not (REPOSITORY / name).exists()}


def test_pages_that_sources_name_exist() -> None:
    """Comments, messages and scripts name pages by their path."""
    absent = {str(path.relative_to(REPOSITORY)): absent_pages(path.read_text()) for path in sources()}
    assert {path: names for path, names in absent.items() if names} == {}
    assert absent_pages("see docs/no-such-" + "page.md, and docs/README.md") == {"docs/no-such-" + "page.md"}


def test_pages_install_from_the_clone() -> None:
    """zero is on no package index: commands install `.`, with extras that it has."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found: set[str] = set()
    for path in (*PAGES, *sources(), *REPOSITORY.glob("notebooks/*.ipynb")):
        for line in re.findall(r"pip install ([^`\n]*)", path.read_text()):
            assert "zero-pmap" not in line, f"{path.name}: pip install {line}"
            found.update(name for names in re.findall(r"['\"]\.\[([\w,-]+)\]", line) for name in names.split(","))
    assert {"train", "docs", "hub"} <= found <= {*extras}, found


def test_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 230
