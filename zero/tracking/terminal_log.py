"""Log lines on a terminal, which are short; the file of the log keeps the date, the module and the level of each."""

from __future__ import annotations

import logging
import os
import sys

WHOLE = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"  # Hydra's


class TerminalFormatter(logging.Formatter):
    """On a terminal the time, the level of a warning and the text, with paths relative; elsewhere the whole line."""

    def __init__(self) -> None:
        self._is_short = sys.stderr.isatty()
        if self._is_short:
            super().__init__("%(asctime)s %(message)s", "%H:%M:%S")
        else:
            super().__init__(WHOLE)

    def formatMessage(self, record: logging.LogRecord) -> str:
        if not self._is_short:
            return super().formatMessage(record)
        text = record.message.replace(f"{os.getcwd()}{os.sep}", "")
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{record.asctime} {level}{text}"


class WarnOnce(logging.Filter):
    """Lets a warning pass once. The file of the log, which has no such filter, keeps every one."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        text = record.getMessage()
        is_new = text not in self._shown
        self._shown.add(text)
        return is_new
