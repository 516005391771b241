"""The picture of a run: what its four panels show, also of a run that failed, resumed or has hardly begun."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from zero.record.history import read_history
from zero.tracking.tracker import open_tracker

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def metrics_at(step: int) -> dict[str, float | int]:
    """Steps 5 and 6 are skipped, every tenth is evaluated, the context grows at step 8."""
    return {
        "step": step,
        "train/loss": math.nan if step in (5, 6) else 6 / step,
        "learning_rate": 1e-3 / step,
        "sequence_length": 32 if step < 8 else 64,
        "tokens_per_second": 1000.0 + step,
        "skipped_steps": min(max(step - 4, 0), 2),
        **({"validation/loss": 7 / step, "validation/ema_loss": 6.8 / step} if step % 10 == 0 else {}),
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with open_tracker(tmp_path, project=None, config={}, resumed_from=None) as tracker:
        for step in range(1, 26):
            tracker(metrics_at(step))
    with open_tracker(tmp_path, project=None, config={}, resumed_from=20) as tracker:
        for step in range(21, 41):
            tracker(metrics_at(step))
    return tmp_path


def draw_run(run: Path) -> Path:
    from zero.report import plot  # here, as every worker imports every module of tests

    return plot.draw_run(run, read_history(run / "metrics.jsonl"))


def axes_of(run: Path) -> "list[Axes]":
    from zero.report.plot import _plot

    return _plot(read_history(run / "metrics.jsonl"), "a run").axes


def test_panels_show_what_was_logged(run: Path) -> None:
    losses, rate, length, speed = axes_of(run)
    train, validation, averaged, skipped, resumed = losses.lines
    steps = np.arange(1, 41)
    np.testing.assert_array_equal(train.get_xdata(), steps)
    np.testing.assert_array_equal(train.get_ydata(), np.where((steps == 5) | (steps == 6), np.nan, 6 / steps))
    np.testing.assert_array_equal(validation.get_xdata(), [10, 20, 30, 40])
    np.testing.assert_array_equal(averaged.get_ydata(), 6.8 / np.array([10, 20, 30, 40]))
    assert (validation.get_linestyle(), averaged.get_linestyle()) == ("-", ":")
    np.testing.assert_array_equal(skipped.get_xdata(), [5, 6])
    np.testing.assert_array_equal(resumed.get_xdata(), [20, 20])
    np.testing.assert_array_equal(rate.lines[0].get_ydata(), 1e-3 / steps)
    np.testing.assert_array_equal(length.lines[0].get_ydata(), np.where(steps < 8, 32, 64))
    assert length.lines[0].get_drawstyle() == "steps-pre"  # the step of the first line of 64 tokens is drawn at 64
    np.testing.assert_array_equal(speed.lines[0].get_ydata(), 1000.0 + steps)
    labels = ["train 0.150", "validation 0.175", "averaged weights 0.170", "skipped steps: 2", "resumed"]
    assert losses.get_legend_handles_labels()[1] == labels


def test_only_the_picture_is_left(run: Path) -> None:
    """The picture is complete, and no other file is left."""
    before = {path.name for path in run.iterdir()}
    assert draw_run(run) == run / "run.png"
    picture = (run / "run.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and picture.endswith(b"IEND\xaeB`\x82")
    assert {path.name for path in run.iterdir()} == before | {"run.png"}


def test_empty_run_is_drawn(tmp_path: Path) -> None:
    """A run that has logged nothing is drawn."""
    (tmp_path / "metrics.jsonl").touch()
    assert draw_run(tmp_path).exists()


def test_drawing_time(tmp_path: Path) -> None:
    """A picture of two thousand steps takes less than a second."""
    with open_tracker(tmp_path, project=None, config={}, resumed_from=None) as tracker:
        for step in range(1, 2001):
            tracker(metrics_at(step))
    started = time.process_time()
    draw_run(tmp_path)
    assert time.process_time() - started < 1
