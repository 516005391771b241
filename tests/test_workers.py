"""What a worker of pytest-xdist keeps for the programs that its tests start."""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.rooms import REPOSITORY


def test_started_programs_keep_bytecode(tmp_path: Path) -> None:
    """Also where the environment forbids it, but then not beside the sources."""
    (tmp_path / "imported.py").write_text("")
    program = (
        "import tests.helpers.bytecode, sys, subprocess; subprocess.run([sys.executable, '-c', 'import imported'])"
    )
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    environment.pop("PYTHONPYCACHEPREFIX", None)
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    prefix = REPOSITORY / ".pytest_cache" / "bytecode"
    (kept,) = prefix.joinpath(*tmp_path.parts[1:]).glob("imported.*.pyc")
    assert kept.stat().st_size > 0
    kept.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["imported.py"]
