"""The folder of a finished run: what is told if the process that writes it is killed."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zero.base.errors import Unavailable
from zero.run.feature import Moment
from zero.run.features import export

pytestmark = pytest.mark.quick


def test_a_killed_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher may start the run again, which then writes the folder."""
    monkeypatch.setattr(export, "COMMAND", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    directory = SimpleNamespace(path=Path("runs/mine"), checkpoints=SimpleNamespace(wait=lambda: None))
    run: Any = SimpleNamespace(directory=directory)
    feature = export.Export(export.Export.Keys(None), run)
    feature._folder = "mine"
    with pytest.raises(
        Unavailable,
        match=r"folder=mine: its process was killed by signal 9, .*`zero-weights export runs/mine@12 mine` writes",
    ):
        feature.do(run, Moment(12, True, True, frozenset()), {})
