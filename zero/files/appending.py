"""Files that grow during a run: each append is written whole or not at all, even if the disk is full."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from pathlib import Path
from typing import Self

_log = logging.getLogger(__name__)


def append(path: Path, data: bytes) -> None:
    """Appends all of `data`, or nothing; makes the file if there is none.

    Raises:
      OSError: nothing was written; it names the file.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(file).st_size
        try:
            while data:  # a disk that fills up takes a part first
                data = data[os.write(file, data) :]
        except OSError as error:
            os.ftruncate(file, size)
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(file)


class LogFile(logging.FileHandler):
    """A file of log lines. A full disk is told once, on standard error, where logging prints a traceback per line."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            line = (
                f"{self.baseFilename}: the log could not be written ({error.strerror}); its lines are only shown here"
            )
            print(line, file=sys.stderr)


class HoldingLog:
    """Appends entries to a file. While the disk refuses them, they are held in memory; training never waits for a log.

    Held entries are written, in their order, with the first entry after the disk has room again. A context manager:
    those that are still held at its end are lost, and an error says how many.

    Args:
      purpose: what is not written; begins the error message.
    """

    def __init__(self, path: Path, purpose: str) -> None:
        self._path = path
        self._purpose = purpose
        self._held: deque[bytes] = deque()

    def append(self, entry: bytes) -> None:
        was_failing = bool(self._held)
        self._held.append(entry)
        failure = self._write_held()
        if failure is None and was_failing:
            _log.info("%s: has space again; everything held in memory is written", self._path)
        if failure is not None and not was_failing:
            _log.warning(
                "%s: %s could not be written (%s); holding it in memory until it can be. Training continues, "
                "and saved checkpoints are intact",
                self._path,
                self._purpose,
                failure.strerror,
            )

    def _write_held(self) -> OSError | None:
        """Writes the buffered data; returns the error that left some of it unwritten."""
        try:
            while self._held:
                append(self._path, self._held[0])
                self._held.popleft()
        except OSError as error:
            return error
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        failure = self._write_held()
        if failure is not None:
            _log.error("%s: the last %d entries are lost: %s", self._path, len(self._held), failure.strerror)
