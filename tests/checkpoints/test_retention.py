"""Which checkpoints a run keeps, by its newest, its best, every so many steps, and every so many hours."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.config.composing import compose
from tests.helpers import cli
from zero.checkpoints.retention import Retention, Saved
from zero.commands.modes import check
from zero.job.sizes import load_sizes
from zero.record.metrics_file import read_metrics
from zero.record.run_files import saved_steps

HOUR = 3600


def kept(retention: Retention, *steps: int) -> list[int]:
    is_kept = retention.should_preserve([SimpleNamespace(step=step) for step in steps], context=None)
    return [step for step, kept in zip(steps, is_kept, strict=True) if kept]


def test_newest_best_and_every() -> None:
    """The newest, the best and every tenth step are kept; of two equally good the later one."""
    saved = {step: Saved(abs(step - 15) * 0.1, None) for step in range(0, 41, 5)}
    steps = range(5, 41, 5)
    assert kept(Retention(2, saved=lambda: saved), *steps) == [15, 35, 40]
    assert kept(Retention(1, every=10, saved=lambda: saved), *steps) == [10, 15, 20, 30, 40]
    assert kept(Retention(1), *steps) == [40]


def test_one_every_two_hours() -> None:
    """Hours count from the last checkpoint that was kept for them, so that pauses do not matter."""
    hours = (0, 1, 2, 3, 4.5, 5, 9)
    saved = {step: Saved(None, 1e9 + hour * HOUR) for step, hour in enumerate(hours)}
    retention = Retention(1, hours=2, saved=lambda: saved)
    assert kept(retention, *saved) == [0, 2, 4, 6]
    assert kept(retention, 0, 2, 4, 6) == [0, 2, 4, 6]  # decided again, with the same result
    without_a_time = Retention(1, hours=2, saved=lambda: {0: Saved(None, None)})
    assert kept(without_a_time, 0, 1) == [1]


@pytest.mark.parametrize("wrong", [240, -1e6])
def test_a_clock_that_was_wrong(wrong: float) -> None:
    """A clock that is wrong for one save, by days, costs no checkpoint before or after it."""
    retention, saved, existing = Retention(1, hours=2), dict[int, Saved](), list[int]()
    for step, hour in enumerate([0, 1, 2, 3, wrong, 5, 6, 7, 8, 9]):  # orbax asks after every save
        saved[step] = Saved(None, 1e9 + hour * HOUR)
        existing = kept(replace(retention, saved=lambda: saved), *existing, step)
    assert existing == [0, 2, 4, 5, 7, 9]


@pytest.mark.parametrize(
    ("value", "rules"),
    [
        ("null", {}),
        ("1000", {"every": 1000}),
        ("2h", {"hours": 2.0}),
        (".5h", {"hours": 0.5}),
        ("1e-9h", {"hours": 1e-9}),
    ],
)
def test_one_key_for_steps_and_hours(value: str, rules: dict[str, Any]) -> None:
    config = check(compose(f"data.keep_every={value}", "data.keep_checkpoints=5"), load_sizes())
    assert config.data.retention() == Retention(5, **rules)


@pytest.mark.wide  # the rules are tested above
def test_run_keeps_what_it_is_told(lasting: cli.Lasting) -> None:
    """A run saves every fifth step, evaluates every eighth, keeps every tenth and the last; a resume does too."""
    keys = ("data.save_every=5", "data.keep_every=10", "data.keep_checkpoints=1", "training.evaluation_frequency=8")
    run = lasting.train("kept", *cli.TINY, *keys)
    assert saved_steps(run) == [10, 12]
    evaluated = [line["step"] for line in read_metrics(run / "metrics.jsonl") if "validation/loss" in line]
    assert evaluated == [8, 12]
    shutil.rmtree(run / "checkpoints" / "12")
    lasting.check("--resume", "hydra.run.dir=kept")
    assert saved_steps(run) == [10, 12]


@pytest.mark.slow
def test_run_keeps_by_the_hour(lasting: cli.Lasting) -> None:
    """With an hour of no length every checkpoint is kept, with a long one the first."""
    for hours, steps in (("1e-9", [3, 6, 9, 12]), ("1000", [3, 12])):
        keys = ("data.save_every=3", f"data.keep_every={hours}h", "data.keep_checkpoints=1")
        run: Path = lasting.train(f"hours-{hours}", *cli.TINY, *keys, "training.maximum_evaluation_steps=0")
        assert saved_steps(run) == steps
