"""A run is finished when a durable checkpoint of its last step is committed; until then memory is only a copy."""

import signal
from pathlib import Path

import pytest

from tests.helpers import cli, kills
from zero.record.metrics_file import read_resumes
from zero.record.run_files import saved_steps
from zero.run.find_run import command, is_finished, saved_command

# Emergency checkpoints at 3, 6, 9 and 12, durable ones at 3, 6 and 12.
JOB = (
    *cli.TINY,
    "training.sample_tokens=4",
    "zero.emergency_steps=3",
    "zero.emergency_directory=memory",
)
SLOW_COMMIT = kills.Rule("os.rename", "/checkpoints/12$", "block")
IN_MEMORY = kills.Rule("os.rename", r"-12-0\.shards$", "kill after")


@pytest.fixture(scope="module")
def undisturbed(lasting: cli.Lasting) -> Path:
    return lasting.train("runs/undisturbed", *JOB)


def files_in_memory(forks: cli.Forks) -> list[str]:
    return [path.name.partition("-")[2] for path in sorted(forks.workplace.glob("memory/*/*"))]


def test_finished_only_in_memory(forks: cli.Forks, lasting: cli.Lasting, undisturbed: Path) -> None:
    """Killed after the last emergency checkpoint and before the last durable one, a run is not finished."""
    again, run = ("--resume=auto", *JOB, "hydra.run.dir=killed"), forks.workplace / "killed"
    with cli.customized(kills.at(SLOW_COMMIT, IN_MEMORY)):
        assert forks.run(*again).returncode == -signal.SIGKILL
    assert saved_steps(run) == [3, 6] and files_in_memory(forks)[0] == "12-0.shards"
    done = lasting.check(*again)
    assert "resumed from the emergency checkpoint of step 12" in done.stderr and "finished at step 12" in done.stderr
    assert saved_steps(run) == [3, 6, 12] and files_in_memory(forks) == []
    assert is_finished(run, 12) and saved_command(run) == command(JOB)
    assert read_resumes(run / "metrics.jsonl") == [12]
    assert cli.metrics(run) == cli.metrics(undisturbed)
    assert (run / "samples.txt").read_text() == (undisturbed / "samples.txt").read_text()
    assert (run / "report.html").stat().st_mtime_ns >= (run / "metrics.jsonl").stat().st_mtime_ns


def test_finished_run_has_nothing_left_to_do(lasting: cli.Lasting, undisturbed: Path) -> None:
    """Nothing is written where an earlier process has done all, although its last checkpoint cannot know that."""
    before = cli.contents(undisturbed)
    done = lasting.check("--resume", "hydra.run.dir=runs/undisturbed")
    assert "nothing to do: the run is at step 12 of 12" in done.stderr
    assert cli.contents(undisturbed) == before


@pytest.mark.slow
def test_lineage_of_an_attempt_before(forks: cli.Forks) -> None:
    """A, with emergency checkpoints, is killed; B resumes without; C, with them again, does not continue A's."""
    place = forks.workplace / "shared"
    command = (*JOB, "hydra.run.dir=three", f"data.checkpoint_directory={place}")
    memory = "zero.emergency_steps=2"
    none = ("zero.emergency_steps=null", "zero.emergency_directory=/dev/shm/zero")
    with cli.customized(kills.at(kills.Rule("os.rename", r"-10-0\.shards$", "kill after"))):
        assert forks.run(*command, memory).returncode == -signal.SIGKILL
    with cli.customized(kills.at(kills.Rule("os.mkdir", r"/shared/12\.", "kill before"))):
        done = forks.run("--resume", *command, *none, "training.peak_learning_rate=1e-3")
    assert done.returncode == -signal.SIGKILL and "resumed from step" in done.stderr
    done = forks.check("--resume", *command, memory)
    assert "resumed from step" in done.stderr and "emergency" not in done.stderr
    assert saved_steps(forks.workplace / "three")[-1] == 12 and files_in_memory(forks) == []


@pytest.mark.slow
def test_fewer_steps_than_were_trained(forks: cli.Forks) -> None:
    """A run that is told to end before its step does what is pending there, and is finished."""
    run = forks.workplace / "fewer"
    with cli.customized(kills.at(kills.Rule("open", r"/validation-\d+\.tar$", "stop", nth=2))):
        stopped = forks.run(*JOB, "hydra.run.dir=fewer")
    assert stopped.returncode == 75 and "step 6 is saved" in stopped.stderr
    assert "validation/loss" not in cli.metrics(run)[-1]
    done = forks.check("--resume", "hydra.run.dir=fewer", "training.total_steps=5")
    assert "finished at step 6" in done.stderr and cli.metrics(run)[-1]["validation/loss"]
    assert (run / "report.html").exists()


@pytest.mark.slow
def test_job_beside_a_finished_one(forks: cli.Forks, undisturbed: Path) -> None:
    """A job that was killed before its first checkpoint starts again, and leaves the finished run of another alone."""
    job = ("--resume=auto", *JOB, "training.peak_learning_rate=1e-3")
    before = cli.contents(undisturbed)
    with cli.customized(kills.at(kills.Rule("os.mkdir", r"/checkpoints/3\.", "kill before"))):
        first = forks.run(*job)
    assert first.returncode == -signal.SIGKILL and "runs/undisturbed, is finished" in first.stderr
    second = forks.check(*job)
    assert "has the same command but no checkpoint" in second.stderr and "finished at step 12" in second.stderr
    assert "nothing to do" in forks.check(*job).stderr
    assert cli.contents(undisturbed) == before
