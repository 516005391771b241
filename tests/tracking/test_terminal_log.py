"""Log lines on a terminal and elsewhere, and warnings that come again."""

import logging
import os
import re
import sys

import pytest

from zero.tracking.terminal_log import TerminalFormatter, WarnOnce

pytestmark = pytest.mark.quick


def line_of(level: int, text: str) -> str:
    return TerminalFormatter().format(logging.LogRecord("zero.run.train", level, "train.py", 1, text, (), None))


def test_lines_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin with the time, and paths below the current directory are relative."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    here = os.getcwd()
    text = line_of(logging.INFO, f"finished; run directory: {here}/runs/a")
    assert re.fullmatch(r"\d\d:\d\d:\d\d finished; run directory: runs/a", text)
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: slow", line_of(logging.WARNING, "slow"))


def test_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    text = line_of(logging.INFO, f"run directory: {os.getcwd()}/runs/a")
    assert re.fullmatch(r"\[[\d: ,-]+\]\[zero\.run\.train\]\[INFO\] - run directory: /.*/runs/a", text)


def test_a_warning_is_shown_once() -> None:
    once = WarnOnce()
    records = [
        logging.LogRecord("a", level, "a.py", 1, text, (), None)
        for level, text in ((30, "slow"), (30, "slow"), (30, "other"), (20, "step"), (20, "step"))
    ]
    assert [once.filter(record) for record in records] == [True, False, True, True, True]
