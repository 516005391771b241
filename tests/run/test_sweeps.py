"""A sweep that was killed is repeated: each job continues in its own directory, and finished ones are not touched."""

import csv
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import cli
from zero.record.metrics_file import read_metrics, read_resumes
from zero.record.run_files import saved_steps

# What is swept is no part of a compiled program, as a seed or a learning rate would be: all jobs share one.
SWEPT = "data.train_samples"
SWEEP = (*cli.TINY, f"{SWEPT}=100,200,300", "hydra.sweep.dir=runs/multirun/mine")


@pytest.fixture(scope="module", params=["what is lost", pytest.param("killed", marks=pytest.mark.wide)])
def killed(request: pytest.FixtureRequest, forks: cli.Forks, lasting: cli.Lasting) -> Path:
    """The directory of a sweep of three jobs that was killed in its second one, or has lost what it would not have."""
    place = forks.workplace / "runs" / "multirun" / "mine"
    shutil.rmtree(place, ignore_errors=True)
    if request.param == "killed":
        process = forks.start("--multirun", *SWEEP)
        while process.poll() is None and not (place / "1" / "checkpoints" / "6").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.finish().returncode == -signal.SIGKILL
    else:
        lasting.check("--multirun", *SWEEP)
        for lost in ("1/checkpoints/12", "2"):
            shutil.rmtree(place / lost)
        (place / "sweep.csv").unlink()
    assert saved_steps(place / "0")[-1] == 12 and saved_steps(place / "1")[-1] < 12 and not (place / "2").exists()
    return place


def of_jobs(sweep: Path) -> dict[str, bytes]:
    """The contents of a sweep without the file that each start writes."""
    return {name: text for name, text in cli.contents(sweep).items() if name != "multirun.yaml"}


ORIGIN = ("--resume", "hydra.run.dir=runs/multirun/mine/0", "data.resume_step=6")
SWEEP_OF_FORKS = ("--multirun", *ORIGIN, "data.keep_checkpoints=3,4", "hydra.sweep.dir=forks")
SAME, NEWEST = ("--multirun", *SWEEP), ("--multirun", "--resume=auto", *SWEEP[:-1])


@pytest.mark.parametrize(
    ("arguments", "then"),
    [(NEWEST, SAME), pytest.param(SAME, NEWEST, marks=pytest.mark.slow)],
    ids=["newest sweep", "same command"],
)
def test_repeated_sweep(arguments: tuple[str, ...], then: tuple[str, ...], killed: Path, lasting: cli.Lasting) -> None:
    """A repeated sweep skips, resumes and starts its jobs; then nothing is left to do, by either command."""
    shutil.copytree(killed, backup := lasting.workplace / "backup")  # where no sweep is looked for
    try:
        finished = cli.contents(killed / "0")
        done = lasting.check(*arguments)
        assert "nothing to do: the run is at step 12 of 12" in done.stderr
        assert cli.contents(killed / "0") == finished
        for job in "12":
            assert [line["step"] for line in read_metrics(killed / job / "metrics.jsonl")] == list(range(1, 13))
        assert [len(read_resumes(killed / job / "metrics.jsonl")) for job in "012"] == [0, 1, 0]
        table = list(csv.DictReader((killed / "sweep.csv").read_text().splitlines()))
        assert [(row["job"], row[SWEPT], row["step"]) for row in table] == [
            (job, samples, "12") for job, samples in zip("012", ("100", "200", "300"), strict=True)
        ]
        assert len({row["train/loss"] for row in table}) == 3
        for row in table:
            assert float(row["validation/loss"]) == cli.losses(killed / row["job"], "validation/loss")[-1]
        everything = of_jobs(killed)
        assert lasting.check(*then).stderr.count("nothing to do") == 3
        assert of_jobs(killed) == everything
    finally:
        shutil.rmtree(killed)
        backup.rename(killed)


def test_other_sweep_is_refused(killed: Path, lasting: cli.Lasting) -> None:
    """Another sweep in the same directory is refused.

    Also by a key that a resume may change: the finished job would pass for one of the new values.
    """
    before = of_jobs(killed)
    swept = (f"{SWEPT}=5,6", "training.peak_learning_rate=1e-4,2e-4", "+preset=v3-8,v4-32")
    saved = (("expected 100", 1), ("expected 0.003", 1), ("expected", 3))  # and as many keys that differ
    for other, (expected, keys) in zip(swept, saved, strict=True):
        done = lasting.run("--multirun", *(one for one in SWEEP if not one.startswith(SWEPT)), other)
        cli.check_refusal(done, expected, f"{killed}/0", "another hydra.sweep.dir", lines=keys)
    assert of_jobs(killed) == before


def test_fork_into_used_directory(killed: Path, lasting: cli.Lasting) -> None:
    """A fork into a directory with checkpoints is refused before anything is written."""
    before = cli.contents(killed)
    for place in ("checkpoints", "elsewhere"):
        into = ("resume=runs/multirun/mine/1", "hydra.run.dir=runs/multirun/mine/0", f"{SWEPT}=200")
        done = lasting.run(*into, f"data.checkpoint_directory={place}")
        cli.check_refusal(done, f"{killed}/0", "has checkpoints", "another hydra.run.dir")
    done = lasting.run(*cli.TINY, "hydra.run.dir=runs/multirun/mine/0", "data.checkpoint_directory=elsewhere")
    cli.check_refusal(done, f"{killed}/0", "has checkpoints", "--resume continues")
    assert cli.contents(killed) == before


def forget_forks(workplace: Path) -> None:
    """Removes what a sweep of forks has left, of another test or for another parameter."""
    for name in ("forks", "all"):
        shutil.rmtree(workplace / name, ignore_errors=True)


def test_forks_that_share_checkpoints_are_refused(killed: Path, lasting: cli.Lasting) -> None:
    """Where the jobs of a sweep of forks share a directory of checkpoints it is refused before the first one."""
    place, shared = lasting.workplace / "all", f"data.checkpoint_directory={lasting.workplace}/all"
    forget_forks(lasting.workplace)
    cli.check_refusal(lasting.run(*SWEEP_OF_FORKS, shared), f"{place} for all", "${hydra:job.num}")
    assert not place.exists() and not (lasting.workplace / "forks" / "0" / "config.yaml").exists()


@pytest.mark.wide
def test_repeated_sweep_of_forks(killed: Path, lasting: cli.Lasting) -> None:
    """A sweep of forks is repeated as well, where each has a directory of checkpoints."""
    place, shared = lasting.workplace / "all", f"data.checkpoint_directory={lasting.workplace}/all"
    forget_forks(lasting.workplace)
    before = cli.contents(killed)
    for resumes in (1, 1):
        lasting.check(*SWEEP_OF_FORKS, f"{shared}/${{hydra:job.num}}")
        for job in "01":
            assert len(read_resumes(lasting.workplace / "forks" / job / "metrics.jsonl")) == resumes
            assert saved_steps(lasting.workplace / "forks" / job)[-1] == 12
    assert {path.name for path in place.iterdir()} == {"0", "0-run", "1", "1-run"}
    assert cli.contents(killed) == before


def test_resume_without_a_sweep_is_refused(lasting: cli.Lasting) -> None:
    cli.check_refusal(
        lasting.run("--multirun", "--resume", *SWEEP[:-1], "hydra.sweep.dir=none"), "none has no checkpoint"
    )
