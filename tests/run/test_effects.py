"""Every gap between two effects of a step, killed: the resumed run is the one that was left alone."""

import signal
from pathlib import Path

import pytest

from tests.helpers import cli
from zero.checkpoints.manager import Checkpoints
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
STOP = """
import signal
import zero.run.train as training
from zero.run.feature import Feature

class Stop(Feature):
    name = "stop_at"

    def due(self, now):
        return now.step == 6

    def do(self, run, now, line):
        run.requests.signals.append(signal.SIGTERM)

training.FEATURES = (Stop, *training.FEATURES)
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


def validation_losses(run: Path) -> dict[int, float | None]:
    """The validation loss in the metadata of each checkpoint."""
    with Checkpoints(run / "checkpoints", None) as checkpoints:
        return {step: checkpoints.meta(step)["validation_loss"] for step in checkpoints.steps()}


def test_stop_within_an_evaluation(forks: cli.Forks, undisturbed: Path) -> None:
    """The resume evaluates the step, and its checkpoint learns the loss, by which it is kept as the best."""
    run = forks.workplace / "stopped"
    rising = ("training.peak_learning_rate=2", "training.warmup_steps=11")  # so that the loss of step 6 is the lowest
    with cli.customized(STOP):
        stopped = forks.run(*JOB, "hydra.run.dir=stopped", "data.keep_checkpoints=1", *rising)
    assert stopped.returncode == 75 and "step 6 is saved" in stopped.stderr, stopped.stderr
    assert validation_losses(run)[6] is None and not (run / "samples.txt").exists()
    forks.check("--resume", "hydra.run.dir=stopped")
    losses = {line["step"]: line["validation/loss"] for line in cli.metrics(run) if "validation/loss" in line}
    assert sorted(losses) == [6, 12] and losses[6] < losses[12]
    assert validation_losses(run) == losses
    assert (run / "samples.txt").read_text().count("--- step") == 2
