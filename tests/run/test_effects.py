"""Every gap between two effects of a step, killed: the resumed run is the one that was left alone."""

import signal
from pathlib import Path

import pytest

from tests.helpers import cli
from zero.run.features import FEATURES
from zero.run_directory import saved_steps
from zero.tracking.metrics_file import read_resumes

JOB = (*cli.TINY, "training.sample_tokens=4", "zero.emergency_steps=3")
KILL = """
import os, signal
import zero.run.train as training
from zero.run.feature import Feature

class Kill(Feature):
    name = "kill"

    def due(self, now):
        return now.step == {step} and not now.is_stop

    def do(self, run, now, line):
        if {is_committed}:
            run.directory.checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)

place = [kind.name for kind in training.FEATURES].index("{after}") + 1
training.FEATURES = (*training.FEATURES[:place], Kill, *training.FEATURES[place:])
"""


@pytest.fixture(scope="module")
def undisturbed(forks: cli.Forks) -> Path:
    return forks.train("undisturbed", *JOB, f"zero.emergency_directory={forks.workplace}/undisturbed-shm")


def gaps() -> list[object]:
    """The step, the feature after whose action the process is killed, and whether its checkpoint is durable then."""
    quick = {(6, "save", False), (12, "save", True), (12, "sample", True)}
    acting = ("validate", "track", "save", "protect", "sample", "report")
    every = [(step, name, name not in ("validate", "track")) for step in (6, 12) for name in acting]
    every += [(6, "save", False), (12, "save", False), (12, "protect", False)]
    return [pytest.param(*gap, marks=[] if gap in quick else pytest.mark.slow) for gap in every]


def test_gaps_are_those_of_the_table() -> None:
    """Each feature that writes has its gap."""
    measuring = {"profile", "statistics", "verify", "limits", "harness", "bar"}
    named = {gap.values[1] for gap in gaps()}  # type: ignore[attr-defined]
    assert named == {kind.name for kind in FEATURES} - measuring


@pytest.mark.parametrize(("step", "after", "is_committed"), gaps())
def test_kill_between_two_effects(
    step: int, after: str, is_committed: bool, forks: cli.Forks, undisturbed: Path
) -> None:
    name = f"killed-{step}-{after}-{is_committed}"
    again = (*JOB, f"zero.emergency_directory={forks.workplace}/{name}-shm", f"hydra.run.dir={name}", "--resume=auto")
    with cli.customized(KILL.format(step=step, after=after, is_committed=is_committed)):
        killed = forks.run(*again)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    forks.check(*again)
    run = forks.workplace / name
    assert len(read_resumes(run / "metrics.jsonl")) == 1
    assert cli.metrics(run) == cli.metrics(undisturbed)
    assert saved_steps(run) == saved_steps(undisturbed)
    assert (run / "samples.txt").read_text() == (undisturbed / "samples.txt").read_text()
    page = run / "report.html"
    assert page.stat().st_mtime_ns >= (run / "metrics.jsonl").stat().st_mtime_ns
    assert (run / "run.png").exists()


def test_finished_run_has_nothing_left_to_do(forks: cli.Forks, undisturbed: Path) -> None:
    """Nothing is written where an earlier process has done all, although its last checkpoint cannot know that."""
    before = cli.contents(undisturbed)
    done = forks.check("--resume", "hydra.run.dir=undisturbed")
    assert "nothing left to do: the run is at step 12 of 12" in done.stderr
    assert cli.contents(undisturbed) == before
