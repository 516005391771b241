"""The progress of a run: one live line at the foot of a terminal, log lines above it, plain lines elsewhere."""

import logging
import re
import subprocess
import sys
import time

import pytest

from tests.helpers.terminal import Screen, in_terminals
from zero.tracking import progress
from zero.tracking.goodput import Goodput
from zero.tracking.progress import Progress, Stage

WIDTHS = (40, 60, 80, 100, 200)
IMPORTS = "import zero.tracking.progress"
RUN = """
import logging, sys, time, warnings
from zero.tracking.goodput import Goodput
from zero.tracking.progress import Progress

logging.basicConfig(format="[%(levelname)s] %(message)s", level="INFO")
log = logging.getLogger("test")
figures = {"train/loss": 2.5, "tokens_per_second": 123456, "mfu": 0.414, "validation/loss": 2.6, "peak_memory": 2**33}
log.info("before")
clock = Goodput()
progress = Progress(0, 1200, clock)
progress.open()
with clock.phase("steps"):
    progress.compiling("the step for sequences of 64 tokens")
    log.info("a line that is logged during the compilation")
    time.sleep(1.1)
    for step in range(1, 1201):
        progress.done(step)
        if step % 400 == 0:
            progress.show({"step": step, **figures})
            log.info("step %d: " + "many words " * 30 + "end", step)
    with clock.phase("evaluation"):
        warnings.warn("a warning")
        time.sleep(1.6)
    print("a line that is printed")
progress.close()
log.info("after")
"""


STAGE = """
import logging, sys, time
from zero.tracking.progress import Stage

logging.basicConfig(format="%(message)s", level="INFO")
with Stage("plans compiled", 4) as stage:
    time.sleep(1.1)
    logging.info("a line that is logged meanwhile")
    for _ in stage.counted(range(4)):
        time.sleep(0.6)
"""


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Screen]:
    """What the run leaves in terminals of several widths, and in two others."""
    results = tmp_path_factory.mktemp("results") / "results.txt"
    cases = {str(columns): (RUN, columns) for columns in WIDTHS}
    cases["stage"] = STAGE, 80
    cases["dumb"] = f"import os; os.environ['TERM'] = 'dumb'\n{RUN}", 80
    cases["redirected"] = f"import sys; sys.stdout = open({str(results)!r}, 'w')\n{RUN}", 80
    screens = {}
    for name, (status, screen) in zip(cases, in_terminals([*cases.values()], IMPORTS), strict=True):
        assert status == 0, screen.lines
        screens[name] = screen
    assert results.read_text() == "a line that is printed\n"
    return screens


@pytest.mark.parametrize("columns", WIDTHS)
def test_log_lines_are_above_the_live_line(screens: dict[str, Screen], columns: int) -> None:
    screen = screens[str(columns)]
    lines = [line.rstrip() for line in screen.lines]
    text = "".join(screen.lines)  # wrapped lines as they were written
    long = [f"[INFO] step {step}: {'many words ' * 30}end" for step in (400, 800, 1200)]
    assert all(line in text for line in long)
    # Every line of the log begins a line of the screen, and nothing is glued to it.
    starts = [line for line in lines if line.startswith("[INFO]")]
    assert len(starts) == 6 and text.count("[INFO]") == 6
    assert "a line that is printed" in lines and "UserWarning: a warning" in text
    # One live line is left, above what came after it.
    (live,) = [line for line in lines if line.startswith("1,200/1,200")]
    assert lines[lines.index(live) + 1 :] == ["[INFO] after", ""]
    assert re.search("took 0:0[2-9]", live) and ("loss 2.500" in live or columns < 60)
    assert ("MFU 41.4%" in live) == (columns >= 80) and ("peak 8.00 GiB" in live) == (columns == 200)
    # While it compiled, the line said so, with the seconds.
    frames = [line.rstrip() for line in screen.erased]
    assert max(map(len, frames)) <= columns
    compiling = [line for line in frames if "compiling" in line]
    assert compiling and all(line.startswith("0/1,200") for line in compiling)
    if columns >= 80:
        assert any(re.search(r"compiling the step for sequences of 64 tokens, 0:01$", line) for line in compiling)
        assert all("━" in line for line in frames if line)
    assert any(re.search(r"evaluating, 0:0[12]$", line) for line in frames)


def test_a_stage_has_a_clock_and_an_estimate(screens: dict[str, Screen]) -> None:
    """From its first second on, before any of its things is done; one line is left."""
    screen = screens["stage"]
    lines = [line.rstrip() for line in screen.lines]
    (last,) = [line for line in lines if "plans compiled" in line]
    assert re.fullmatch(r"plans compiled 4/4 ━+ took 0:0[3-9]", last) and "a line that is logged meanwhile" in lines
    frames = [line.rstrip() for line in screen.erased]
    assert any(re.fullmatch(r"plans compiled 0/4 ━+ 0:01, ETA -", line) for line in frames)
    assert any(re.fullmatch(r"plans compiled [123]/4 .*, ETA 0:0\d", line) for line in frames)


def test_without_a_terminal() -> None:
    """Plain lines of the log, without control characters."""
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "a line that is printed\n"
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    assert "[INFO] compiling the step for sequences of 64 tokens\n" in done.stderr


def test_results_do_not_go_to_the_terminal(screens: dict[str, Screen]) -> None:
    """Where standard output is a file, what is printed goes to it, and only to it."""
    lines = screens["redirected"].lines
    assert "[INFO] after" in lines and "a line that is printed" not in lines


def test_a_dumb_terminal_gets_plain_lines(screens: dict[str, Screen]) -> None:
    screen = screens["dumb"]
    assert screen.erased == [] and "[INFO] compiling the step for sequences of 64 tokens" in screen.lines


def test_plain_lines_come_once_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    shown = Progress(0, 400, Goodput())
    shown.open()
    for step in range(1, 401):
        now += 1
        shown.done(step)
        shown.show({"step": step, "train/loss": 400 / step})
    shown.close()
    assert [record.message for record in caplog.records] == [
        f"step {step}/400: loss {400 / step:.3f}, ETA {progress.clock(400 - step)}" for step in range(61, 400, 61)
    ]


def test_an_evaluation_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged at once, and not again by the line that comes once a minute."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    shown = Progress(0, 100, Goodput())
    shown.open()
    for step in (50, 100):
        now += 100
        shown.done(step)
        shown.show({"step": step, "train/loss": 2.0, "validation/loss": 3.0}, is_evaluation=True)
    shown.close()
    assert [record.message for record in caplog.records] == [
        "step 50/100: loss 2.000, validation 3.000, ETA 1:40",
        "step 100/100: loss 2.000, validation 3.000, took 3:20",
    ]


def test_the_pace_leaves_compilation_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shown = Progress(100, 200, Goodput(), is_shown=False)
    shown.open()
    assert shown.rest() == "ETA -"
    for step in range(101, 111):
        if step in (101, 106):
            shown.compiling("the step")
            now += 300
        else:
            now += 2
        shown.done(step)
    assert shown.rest() == "ETA 3:00"
    now += 8  # an evaluation, which will come again
    assert shown.rest() == "ETA 4:30"
    shown.done(200)
    assert shown.rest() == "took 10:24"


def test_the_estimate_of_a_stage_while_a_program_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace counts finished work only: it does not fall while no work can finish."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Stage("rows scored", 10, is_shown=False) as stage:
        now = 3.0
        stage.advance(2)
        now = 60.0
        assert stage.text() == "rows scored: 2/10, 1:00, ETA 0:12"
