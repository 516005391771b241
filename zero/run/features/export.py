"""The finished model as a Hugging Face folder."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from zero.base.child_process import environment_without_devices
from zero.base.errors import Unavailable, UserError
from zero.base.keys import key, not_empty
from zero.exchange.export import check_exportable
from zero.hosts import agreement
from zero.record.metrics_file import Line
from zero.record.run_files import saved_config
from zero.run.feature import Feature, Moment
from zero.run.run import Run

log = logging.getLogger(__name__)
COMMAND = (sys.executable, "-m", "zero.exchange.zero_weights", "export")


class Export(Feature):
    """Writes `export.folder` after the last step, as `zero-weights export` does: on host 0, from the last checkpoint.

    That command runs in a separate process, which does not touch the accelerators. The folder appears only when it is
    complete, so a resume knows whether to write it.
    """

    @dataclass(frozen=True)
    class Keys:
        folder: str | None = key(
            None,
            not_empty(),
            "A new Hugging Face folder for the model after the last step, or one of PEFT for its adapters; null: none "
            "is written, and zero-weights export writes one later.",
        )

    name = "export"
    changes_nothing = True
    is_deferrable = True

    def __init__(self, keys: Keys, run: Run) -> None:
        self._folder = keys.folder
        if self._folder is None:
            return
        model = run.job.model
        try:
            check_exportable(model.config, [leaf.name for leaf in model.layout.leaves], model.tuning)
        except UserError as error:
            raise UserError(f"export.folder={self._folder}: {error}") from error
        if os.path.lexists(self._folder) and run.position.step < run.last_step:
            taken = f"export.folder={self._folder} already exists"
            raise UserError(f"{taken} and is never overwritten; choose another name")

    @classmethod
    def is_done(cls, run_directory: Path, now: Moment) -> bool:
        return Path(saved_config(run_directory).export.folder).exists()

    def due(self, now: Moment) -> bool:
        return self._folder is not None and now.is_last

    def do(self, run: Run, now: Moment, line: Line) -> None:
        assert self._folder is not None
        run.directory.checkpoints.wait()
        if not agreement.is_host_0():
            return
        arguments = (f"{run.directory.path}@{now.step}", self._folder)
        done = subprocess.run(
            (*COMMAND, *arguments),
            env=environment_without_devices(),
            capture_output=True,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run
        )
        if done.returncode < 0:
            cause = ", probably out of memory" if -done.returncode == signal.SIGKILL else ""
            raise Unavailable(
                f"export.folder={self._folder}: its process was killed by signal {-done.returncode}{cause}; the "
                f"run is saved, and `zero-weights export {arguments[0]} {self._folder}` writes the folder"
            )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
            raise UserError(f"export.folder={self._folder}: {reason}")
        log.info("exported step %d to %s", now.step, self._folder)
