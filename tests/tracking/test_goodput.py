"""The shares of the wall clock: exact for a clock that the test moves."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zero.record import starts
from zero.record.starts import last_start, note_start, number_of, start_now, time_of
from zero.report.html_report import summary
from zero.tracking.goodput import PHASES, Goodput, counts_as, describe

pytestmark = pytest.mark.quick


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves both of Python's clocks."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


class Run:
    def __init__(self, goodput: Goodput, wait: Callable[[float], None]) -> None:
        self.goodput, self._wait = goodput, wait

    @counts_as("checkpoint")
    def save(self, seconds: float) -> float:
        self._wait(seconds)
        return seconds


def test_innermost_phase_counts(wait: Callable[[float], None]) -> None:
    """Each second counts for the innermost phase."""
    clock = Goodput(age=7)
    wait(3)
    with clock.phase("steps"):
        wait(60)
        with clock.phase("data_wait"):
            wait(5)
        assert Run(clock, wait).save(4) == 4
        with pytest.raises(KeyError), clock.phase("evaluation"):
            wait(1)
            raise KeyError
        wait(20)
        line = clock.line()
    assert line["wall_time"] == pytest.approx(100)
    expected = dict.fromkeys(PHASES, 0.0)
    expected |= {"startup": 0.1, "steps": 0.8, "data_wait": 0.05, "checkpoint": 0.04, "evaluation": 0.01}
    assert {phase: line[f"goodput/{phase}"] for phase in PHASES} == pytest.approx(expected)
    assert describe(line) == (
        "80.0% of 0:01:40 in steps; startup 10.0%, waiting for data 5.0%, checkpoints 4.0%, evaluation and reports 1.0%"
    )


def test_lost_time(wait: Callable[[float], None]) -> None:
    """Work after the resumed step, and the time until the new start, are lost."""
    clock = Goodput()
    with clock.phase("steps"):
        wait(50)
        resumed_line = clock.line()
        wait(30)  # to be repeated
    wait(15)  # nobody has noticed
    wait(5)  # the new process starts
    again = Goodput(age=5, resumed_line=resumed_line)
    with again.phase("steps"):
        wait(100)
    assert again.seconds_so_far() == pytest.approx(
        dict.fromkeys(PHASES, 0.0) | {"steps": 150, "startup": 5, "restarts": 45}
    )


def test_summary_of_newest_line(wait: Callable[[float], None], tmp_path: Path) -> None:
    """The summary of a run is that of its newest line."""
    clock = Goodput(age=50)
    with clock.phase("steps"):
        wait(50)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 8, **clock.line()}) + "\n")
    assert summary([tmp_path]) == [f"{tmp_path}: step 8; 50.0% of 0:01:40 in steps; startup 50.0%"]


def test_clock_that_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine a clock that jumps by a day between two starts, or during one, is no lost time."""
    clock = Goodput()
    note_start(tmp_path, start_now(0), [])
    with clock.phase("steps"):
        line = {"step": 1, **clock.line()}
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86400)
    assert clock.line()["time"] - line["time"] < 60
    for boot, lost in (("same", 0), ("other", 86400)):
        if boot == "other":
            monkeypatch.setattr(starts, "BOOT_ID", tmp_path / "absent")
        resumed = Goodput(0.0, line, time_of(last_start(tmp_path, 1)))
        assert resumed.seconds_so_far()["restarts"] == pytest.approx(lost, abs=60)


def test_start_of_a_step(tmp_path: Path) -> None:
    """A line is of the last start before its step; what later ones made after it was repeated, and is forgotten."""
    for step in (0, 6, 12, 6):
        note_start(tmp_path, start_now(step)._replace(uptime=step), [])
    found = [last_start(tmp_path, step) for step in (0, 6, 7, 12, 13)]
    assert [start and start.step for start in found] == [None, 0, 6, 6, 6]
    assert number_of(tmp_path) == 4
