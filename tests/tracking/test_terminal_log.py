"""Log lines on a terminal and elsewhere, and warnings that come again."""

import logging
import os
import re
import sys
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from tests.config.composing import CONF
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


def test_only_zero_logs_below_warnings() -> None:
    """A run with a bucket has no lines of fsspec's caches, and a first run none about fonts."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose("config", return_hydra_config=True)
    settings: Any = OmegaConf.to_container(config.hydra.job_logging)
    assert settings["root"]["level"] == "WARNING" and settings["loggers"] == {"zero": {"level": "INFO"}}
    assert settings["root"]["handlers"] == ["console", "file"] and not settings["disable_existing_loggers"]
