"""The API reference is built from docstrings, by the command that docs/pmap-programs.md names."""

import re
import subprocess
import sys
from pathlib import Path

import zero

REPOSITORY = Path(__file__).parents[1]


def test_reference_has_every_public_name(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "pmap-programs.md").read_text()
    command = re.search(r"^python (-m pdoc .*)$", page, re.MULTILINE)
    assert command
    arguments = command[1].replace("'", "").replace("build/reference", str(tmp_path)).split()
    subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, check=True)
    html = (tmp_path / "zero.html").read_text()
    assert [name for name in zero.__all__ if f'id="{name}"' not in html] == []
