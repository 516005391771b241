"""The notebook in docs/ runs from top to bottom."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "pmap-programs.ipynb"


def test_notebook_cells(capsys: pytest.CaptureFixture[str]) -> None:
    """Cells run in order and are committed without outputs."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        assert cell["outputs"] == []
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, code cell {number}", "exec"), names)
    assert len(names["losses"]) == 20 and "one device's slice" in capsys.readouterr().out
