"""The picture and the page of a run, drawn after evaluations."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from zero.base.child_process import environment_without_devices
from zero.base.errors import UserError, first_line
from zero.hosts import agreement
from zero.record.metrics_file import Line
from zero.record.run_files import METRICS_FILE
from zero.run.feature import Feature, Moment
from zero.run.run import Run

log = logging.getLogger(__name__)

REPORT_SECONDS = 10  # between two reports
COMMAND = (sys.executable, "-m", "zero.commands.zero_report", "--picture", "--beside-a-run")
_NICE = 10  # of the process that draws: training goes first


class Report(Feature):
    """Draws run.png and report.html on host 0, at most every `REPORT_SECONDS`, and after the last step.

    While the run trains, a separate process does so, which does not touch the accelerators; one at a time. After the
    last step nothing waits for this process, which then draws. Training continues if they cannot be drawn.
    """

    name = "report"
    phase = "evaluation"
    is_deferrable = True

    def __init__(self, defaults: Mapping[str, str]) -> None:
        """Takes the default values of all keys, as text, to compare the run's values with."""
        self._defaults = defaults
        self._drawn_at = time.monotonic()
        self._drawing: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None  # of the process that draws
        self._step = 0  # after which it was started

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
        if not agreement.is_host_0():
            return
        if now.is_last:
            self.close()
            try:
                draw(run.directory.path, self._defaults)
            except (OSError, ValueError, RuntimeError, MemoryError, UserError) as error:  # RuntimeError: fonts
                _warn(now.step, first_line(error))
        elif time.monotonic() > self._drawn_at + REPORT_SECONDS and self._is_idle():
            try:
                self._start(run.directory.path, now.step)
            except OSError as error:
                _warn(now.step, first_line(error))
            self._drawn_at = time.monotonic()

    def _start(self, run_directory: Path, step: int) -> None:
        # Not a pipe, which nobody reads, so that many warnings would stop the process.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._drawing = subprocess.Popen(
            (*COMMAND, str(run_directory)),
            env=environment_without_devices(),
            stdin=subprocess.PIPE,  # held open: the process ends with this one
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the run
        )
        self._step = step
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._drawing.pid, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))

    def _is_idle(self) -> bool:
        """Whether no process is drawing; tells what the last one could not do."""
        if self._drawing is None:
            return True
        if self._drawing.poll() is None:
            return False
        status = self._drawing.returncode
        errors = self._end()
        if status:
            lines = errors.strip().splitlines() or [f"its process ended with status {status}"]
            _warn(self._step, lines[-1].removeprefix("error: "))
        return True

    def _end(self) -> str:
        """Forgets a process that has ended or is killed; returns what it has written as errors."""
        assert self._drawing is not None and self._drawing.stdin is not None and self._errors is not None
        self._drawing.wait()
        self._drawing.stdin.close()
        with self._errors:
            self._errors.seek(0)
            errors = self._errors.read()
        self._drawing = self._errors = None
        return errors.decode(errors="replace")

    def close(self) -> None:
        if not self._is_idle():
            assert self._drawing is not None
            self._drawing.kill()
            self._end()


def _warn(step: int, reason: str) -> None:
    log.warning("step %d: the report of the run could not be written: %s", step, reason)


def draw(run_directory: Path, defaults: Mapping[str, str]) -> None:
    """Writes run.png, then report.html; its imports take a second, so they are not made at the start."""
    from zero.report.html_report import REPORT_FILE, write_report

    write_report([run_directory], run_directory / REPORT_FILE, defaults, with_pictures=True)
