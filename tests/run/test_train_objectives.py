"""Runs of each objective on pairs: continued from a checkpoint, they are as if nothing had been."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.config.composing import Only, compose
from tests.helpers import cli
from tests.helpers.lasting import KEYS
from tests.helpers.pair_runs import JOB, LABELLED, SIZE, STEPS, make_labels, make_pairs
from tests.helpers.shared_jobs import SharedJobs
from zero.commands.modes import check, merge_resumed
from zero.record.run_files import saved_config
from zero.run.train import train

# The overrides of each objective.
JOBS: dict[str, tuple[str, ...]] = {
    "kto": ("objective=kto", *LABELLED),
    "ipo": ("objective.loss=ipo",),
    "orpo": ("objective=orpo",),
    "simpo": ("objective=simpo", "objective.beta=1"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of transformers, a corpus of pairs and one of labelled answers."""
    root = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        make_pairs(root)
        make_labels(root)
        yield root


@pytest.mark.wide  # test_train_dpo.py has a run
def test_resumed_bit_for_bit(root: Path) -> None:
    """A run on labelled answers, whose batches have the most columns, continues from the middle, in this process."""
    whole, again = root / "here-whole", root / "here-again"
    job = cli.later_values(*JOB, *JOBS["kto"])
    jobs = SharedJobs(KEYS)
    for run, resume in ((whole, ()), (again, ("resume=here-whole", f"data.resume_step={STEPS // 2}"))):
        composed = compose(*job, *resume)
        if resume:
            composed = merge_resumed(saved_config(whole), composed, list(resume))
        run.mkdir()
        with jobs.shared([]):
            assert train(check(composed, Only(SIZE)), SIZE, run) == 0
    assert_learned(cli.metrics(whole))
    assert cli.metrics(again) == cli.metrics(whole)


def assert_learned(lines: list[dict[str, Any]]) -> None:
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] and "validation/loss" in lines[-1]
    assert {key for key in lines[-1] if key.startswith(("rewards/", "logps/"))}


@pytest.mark.wide
@pytest.mark.parametrize("name", JOBS)
def test_killed_and_resumed(root: Path, name: str) -> None:
    runs = cli.Forks(root)
    job = cli.later_values(*JOB, *JOBS[name])
    whole = cli.metrics(runs.train(f"{name}-whole", *job))
    assert_learned(whole)
    process = runs.start(*job, f"hydra.run.dir={name}")
    process.wait_for(root / name / "checkpoints" / str(STEPS // 2))
    process.kill()
    process.finish()
    runs.check("--resume", f"hydra.run.dir={name}")
    assert cli.metrics(root / name) == whole
