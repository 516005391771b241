"""The notebooks run from top to bottom, and are committed without outputs."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import cli

REPOSITORY = Path(__file__).parents[1]
# After the cell that is tagged `parameters`: of two values of a key the later one holds.
SHORTER = f"""
SETTINGS += {[*cli.TINY, "training.sample_tokens=4"]!r}
SAMPLE += ["sample.tokens=5"]
PAUSE = 2
"""


def run_cells(path: Path) -> dict[str, Any]:
    """The variables after all cells as they are written, except those that install packages."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        tags = cell["metadata"].get("tags", [])
        source = "".join(cell["source"])
        if "install" not in tags:
            source += SHORTER if "parameters" in tags else ""
            exec(compile(source, f"{path.name}, code cell {number}", "exec"), names)
    return names


def test_notebook_cells(capsys: pytest.CaptureFixture[str]) -> None:
    """For the author of a pmap program."""
    names = run_cells(REPOSITORY / "docs" / "how-to" / "pmap-programs.ipynb")
    assert len(names["losses"]) == 20 and "one device's slice" in capsys.readouterr().out


@pytest.mark.quick
def test_the_notebook_installs_this_clone() -> None:
    """The cell that installs names a folder with a project, and extras that it has."""
    path = REPOSITORY / "notebooks" / "train.ipynb"
    sources = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    (place,) = re.findall(r'^ZERO = "(.*?)"', "\n".join(sources), re.M)
    project = tomllib.loads((path.parent / place / "pyproject.toml").read_text())["project"]
    extras = re.findall(r'%pip install .*"\{ZERO\}\[(\w+)\]"', "\n".join(sources))
    assert extras == ["train", "plan"] and {*extras} <= {*project["optional-dependencies"]}


@pytest.mark.wide
def test_training_notebook(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trains, stops, resumes, draws, samples and plans; a stand-in for IPython's display keeps the pictures."""
    pictures: list[Path] = []
    display = SimpleNamespace(Image=Path, display=pictures.append, clear_output=lambda wait: None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    programs = workplace / "programs"
    programs.mkdir()
    script = programs / "zero-train"  # of this repository
    script.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} {cli.MAIN} "$@"\n')
    script.chmod(0o755)
    for name, value in (cli.environment() | {"PATH": f"{programs}:{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(workplace)
    names = run_cells(REPOSITORY / "notebooks" / "train.ipynb")
    assert names["stopped"] in (75, 130) and names["finished"] == 0
    assert names["sampled"].stdout.strip() and names["sampled"].returncode == 0
    planned = " ".join(names["planned"].stdout.split())  # its lines are wrapped
    assert "gpu:h100x8: 8 devices" in planned and "nothing was compiled" in planned
    assert pictures and all(picture == names["RUN"] / "run.png" for picture in pictures)
    output = capsys.readouterr().out
    assert "no faults" in output and "finished at step 12" in output
