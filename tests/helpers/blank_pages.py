"""Pages of runs that are not drawn, which takes longer than a short run; what is drawn has tests of its own."""

from collections.abc import Mapping
from pathlib import Path

from zero.files import storage
from zero.report.html_report import REPORT_FILE


def leave_blank(run_directory: Path, defaults: Mapping[str, str]) -> None:
    """Writes the picture and the page of a run without drawing them, for which matplotlib would be imported.

    tests/test_main_zero.py and tests/report read what is drawn.
    """
    for name in ("run.png", REPORT_FILE):
        storage.write(run_directory / name, b"")
