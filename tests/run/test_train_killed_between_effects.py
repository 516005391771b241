"""Every gap between two effects of a step, killed: the resumed run is the one that was left alone.

A short form is in test_train_until_durable.py.
"""

import signal
from pathlib import Path

import pytest

from tests.helpers import cli, effects, kills
from zero.checkpoints.manager import Checkpoints
from zero.record.metrics_file import read_resumes
from zero.record.run_files import saved_steps
from zero.run.feature_table import FEATURES

JOB = (
    *cli.TINY,
    "distributed.cpu_devices=2",
    "training.gradient_accumulation_steps=1",
    "training.sample_tokens=4",
    "zero.emergency_steps=3",
)
KILL = """
import os, signal
import zero.run.feature_table as table
from zero.run.feature import Feature

class Kill(Feature):
    name = "kill"

    def due(self, now):
        return now.step == {step} and not now.is_stop

    def do(self, run, now, line):
        if {is_committed}:
            run.directory.checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)

rows = list(table.FEATURES.items())
place = [kind.name for kind, make in rows].index("{after}") + 1
table.FEATURES = dict([*rows[:place], (Kill, lambda config, run: Kill()), *rows[place:]])
"""
STOP = """
import signal
import zero.run.feature_table as table
from zero.run.feature import Feature

class Stop(Feature):
    name = "stop_at"

    def due(self, now):
        return now.step == 6

    def do(self, run, now, line):
        run.requests.signals.append(signal.SIGTERM)

table.FEATURES = {Stop: lambda config, run: Stop(), **table.FEATURES}
"""


@pytest.fixture(scope="module")
def undisturbed(forks: cli.Forks) -> Path:
    return forks.train("undisturbed", *JOB, f"zero.emergency_directory={forks.workplace}/undisturbed-shm")


def gaps() -> list[object]:
    """The step, the feature after whose action the process is killed, and whether its checkpoint is durable then."""
    acting = ("validate", "track", "save", "protect", "sample", "report")
    every = [(step, name, name not in ("validate", "track")) for step in (6, 12) for name in acting]
    every += [(6, "save", False), (12, "save", False), (12, "protect", False)]
    return [pytest.param(*gap, marks=pytest.mark.slow) for gap in every]


def test_gaps_are_those_of_the_table() -> None:
    """Each feature that writes has its gap."""
    named = {gap.values[1] for gap in gaps()}  # type: ignore[attr-defined]
    assert named == {kind.name for kind in FEATURES if not kind.changes_nothing}


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
    is_complete = (step, after) == (12, "report")  # so that nothing was left to resume
    assert len(read_resumes(run / "metrics.jsonl")) == (not is_complete)
    assert cli.metrics(run) == cli.metrics(undisturbed)
    steps = saved_steps(run)  # 9 is saved where it was restored from memory, and the oldest may go for it
    assert steps[-1] == 12 and set(steps) <= {9, *saved_steps(undisturbed)}
    assert (run / "samples.txt").read_text() == (undisturbed / "samples.txt").read_text()
    page = run / "report.html"
    assert page.stat().st_mtime_ns >= (run / "metrics.jsonl").stat().st_mtime_ns
    assert (run / "run.png").exists()


@pytest.mark.slow
def test_sample_of_a_step_that_is_trained_again(forks: cli.Forks, undisturbed: Path) -> None:
    """Killed after the sample of step 6, before any checkpoint of it: the text is there once."""
    again = (*JOB, f"zero.emergency_directory={forks.workplace}/again-shm", "hydra.run.dir=again", "--resume=auto")
    uncommitted = [kills.Rule("os.rename", path, "block") for path in (r"/checkpoints/6$", r"-6-0\.shards$")]
    with cli.customized(kills.at(*uncommitted, kills.Rule("append", r"/samples\.txt$", "kill after"))):
        assert forks.run(*again).returncode == -signal.SIGKILL
    run = forks.workplace / "again"
    assert saved_steps(run) == [3] and "--- step 6" in (run / "samples.txt").read_text()
    forks.check(*again)
    assert (run / "samples.txt").read_text() == (undisturbed / "samples.txt").read_text()


@pytest.mark.slow
def test_report_of_a_state_that_only_memory_holds(forks: cli.Forks, undisturbed: Path) -> None:
    """Killed after the report of the last step, before its durable checkpoint: the resume, a line, is in the report."""
    again = (*JOB, f"zero.emergency_directory={forks.workplace}/shown-shm", "hydra.run.dir=shown", "--resume=auto")
    rules = kills.Rule("os.rename", "/checkpoints/12$", "block"), kills.Rule("os.rename", "/report.html$", "kill after")
    with cli.customized(kills.at(*rules)):
        assert forks.run(*again).returncode == -signal.SIGKILL
    run = forks.workplace / "shown"
    done = forks.check(*again)
    assert "resumed from the emergency checkpoint of step 12" in done.stderr and saved_steps(run)[-1] == 12
    assert cli.metrics(run) == cli.metrics(undisturbed)
    assert (run / "report.html").stat().st_mtime_ns >= (run / "metrics.jsonl").stat().st_mtime_ns


@pytest.mark.slow
def test_kills_around_a_loss_that_is_learned_after_the_save(forks: cli.Forks, undisturbed: Path) -> None:
    """Killed before, within and after the metadata of a checkpoint are replaced, a run evaluates and notes it again."""
    run = forks.workplace / "learning"
    again = (*JOB, f"zero.emergency_directory={forks.workplace}/learning-shm", "hydra.run.dir=learning")
    with cli.customized(STOP):
        assert forks.run(*again).returncode == 75
    unfinished = r"/checkpoints/6/meta/\.metadata\.[0-9a-f]{8}$"
    complete = "/checkpoints/6/meta/metadata$"
    moments = (
        (kills.Rule("open", unfinished, "kill before"), False, 0),
        (kills.Rule("open", unfinished, "kill after"), False, 1),
        (kills.Rule("os.rename", complete, "kill before"), False, 1),
        (kills.Rule("os.rename", complete, "kill after"), True, 0),
    )
    for rule, is_known, unfinished_files in moments:
        with cli.customized(kills.at(rule)):
            assert forks.run("--resume=auto", *again).returncode == -signal.SIGKILL
        assert (validation_losses(run)[6] is not None) == is_known
        assert len(effects.unfinished_files(run)) == unfinished_files
        assert "validation/loss" not in cli.metrics(run)[-1]
    forks.check("--resume=auto", *again)
    assert cli.metrics(run) == cli.metrics(undisturbed)
    losses = validation_losses(undisturbed)
    assert losses[6] is not None and validation_losses(run) == losses
    assert (run / "samples.txt").read_text() == (undisturbed / "samples.txt").read_text()
    assert effects.unfinished_files(forks.workplace) == []


def validation_losses(run: Path) -> dict[int, float | None]:
    """The validation loss in the metadata of each checkpoint."""
    with Checkpoints(run / "checkpoints", None) as checkpoints:
        return {step: checkpoints.meta(step)["validation_loss"] for step in checkpoints.steps()}


@pytest.mark.slow
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
