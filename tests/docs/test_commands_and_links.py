"""Every command and link of the README and the pages: programs accept the commands, and links lead somewhere."""

import re
import shlex
import tomllib
from pathlib import Path

import hydra
import pytest

from tests.helpers.command_lines import accept
from zero.base.errors import UserError

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *REPOSITORY.glob("*.md"),
    *(
        path
        for folder in ("docs", "data", "examples", "benchmarks/measured")
        for path in REPOSITORY.glob(f"{folder}/**/*.md")
    ),
]
SOURCE_SUFFIXES = {".py", ".yaml", ".yml", ".sh", ".toml", ".jinja", ".sbatch"}


def commands(page: Path) -> list[list[str]]:
    """The words of each command in the shell blocks of a page, and of each one in backticks that names a program."""
    text = page.read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += re.findall(r"`((?:python [\w./-]+\.py|python -m \w|zero-\w+ |\./\w+\.sh|\.ci/\w)[^`]*)`", prose)
    parts = [part for line in lines for part in re.split(r"&&|(?<=\s)\|(?=\s)", line.replace("\n", " "))]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_programs_accept_the_commands(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    for words in commands(page):
        accept(words, monkeypatch, page.parent)


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
    assert len((REPOSITORY / "README.md").read_text()) <= 10_000
