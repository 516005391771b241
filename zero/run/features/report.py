"""The picture and the page of a run, drawn after evaluations."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from zero.base.errors import UserError
from zero.hosts import agreement
from zero.record.metrics_file import Line
from zero.record.run_files import METRICS_FILE
from zero.run.feature import Feature, Moment
from zero.run.run import Run

log = logging.getLogger(__name__)

REPORT_SECONDS = 10  # between two reports; each takes up to a second


class Report(Feature):
    """Draws run.png and report.html on host 0, at most every `REPORT_SECONDS`, and after the last step.

    Training continues if they cannot be drawn.
    """

    name = "report"
    phase = "evaluation"
    may_wait = True

    def __init__(self, defaults: Mapping[str, str]) -> None:
        """Takes the default values of all keys, as text, to compare the run's values with."""
        self._defaults = defaults
        self._drawn_at = time.monotonic()

    @classmethod
    def is_done(cls, run_directory: Path, now: Moment) -> bool:
        """Whether the page is newer than the metrics; before the last step a later page will replace it anyway."""
        from zero.report.html_report import REPORT_FILE

        page = run_directory / REPORT_FILE
        metrics = run_directory / METRICS_FILE
        if not now.is_last:
            return True
        return page.exists() and metrics.exists() and page.stat().st_mtime_ns >= metrics.stat().st_mtime_ns

    def due(self, now: Moment) -> bool:
        return now.is_evaluation

    def do(self, run: Run, now: Moment, line: Line) -> None:
        if not agreement.is_host_0() or not (now.is_last or time.monotonic() > self._drawn_at + REPORT_SECONDS):
            return
        try:
            draw(run.directory.path, self._defaults)
        except (OSError, ValueError, RuntimeError, UserError) as error:  # matplotlib raises RuntimeError for fonts
            log.warning("step %d: the report of the run could not be written: %s", now.step, error)
        self._drawn_at = time.monotonic()


def draw(run_directory: Path, defaults: Mapping[str, str]) -> None:
    """Writes run.png, then report.html; its imports take a second, so they are not made at the start."""
    from zero.report.html_report import REPORT_FILE, write_report
    from zero.report.plot import draw_run

    draw_run(run_directory)
    write_report([run_directory], run_directory / REPORT_FILE, defaults)
