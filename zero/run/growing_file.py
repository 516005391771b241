"""A file that a feature appends to during a run: cut at a resume, and mirrored with the files of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from zero.files import storage
from zero.files.appending import append
from zero.hosts import agreement
from zero.record.run_files import growing_file
from zero.run.run import Run

log = logging.getLogger(__name__)


def until(content: bytes, step: int, step_of: Callable[[bytes], int | None]) -> bytes:
    r"""The content at this step of the run: without entries of later steps.

    >>> until(b"5: one\n10: two\n", 5, lambda line: int(line.partition(b":")[0]))
    b'5: one\n'
    """
    start = 0
    for line in content.splitlines(keepends=True):
        line_step = step_of(line.rstrip(b"\r\n"))
        if line_step is not None and line_step > step:
            return content[:start]
        start += len(line)
    return content


class GrowingFile:
    """A file of a run to which host 0 appends an entry per step; the other hosts do nothing.

    A start drops the entries of steps after the one that it continues from, because these steps are trained again. A
    checkpoint outside the run directory has a copy of the file beside it. Training continues if the disk refuses it.
    A feature before `Save` in the table has its entry in the file when the checkpoint of its step begins.

    Args:
      name: a file of `zero.record.run_files.GROWING`, or one below `records/` in the run directory.
      step_of: the step of the entry that begins with this line; None for a line within an entry.
    """

    def __init__(self, run: Run, name: str, step_of: Callable[[bytes], int | None]) -> None:
        self._path = growing_file(run.directory.path, name)
        if agreement.is_host_0():
            self._drop_later(run.position.step, step_of)

    @property
    def path(self) -> Path:
        return self._path

    def append(self, step: int, entry: bytes) -> None:
        """Appends the entry of a step, whole or not at all; a warning if it could not be written."""
        if not agreement.is_host_0():
            return
        try:
            self._path.parent.mkdir(exist_ok=True)
            append(self._path, entry)
        except OSError as error:
            log.warning("step %d: %s could not be written: %s", step, self._path, error)

    def _drop_later(self, step: int, step_of: Callable[[bytes], int | None]) -> None:
        written = self._path.read_bytes() if self._path.exists() else b""
        kept = until(written, step, step_of)
        if kept == written:
            return
        try:
            storage.write(self._path, kept)
        except OSError as error:
            log.warning("%s: entries of steps after %d could not be removed: %s", self._path, step, error)
