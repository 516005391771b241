"""Runs of each objective on pairs: killed after a checkpoint and resumed, they are as if nothing had been."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import cli
from tests.helpers.pair_runs import JOB, STEPS, make_pairs

# The overrides of each objective.
JOBS: dict[str, tuple[str, ...]] = {
    "ipo": ("objective.loss=ipo",),
    "orpo": ("objective=orpo",),
    "simpo": ("objective=simpo", "objective.beta=1"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of transformers and a corpus of pairs."""
    root = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        make_pairs(root)
        yield root


@pytest.mark.wide
@pytest.mark.parametrize("name", JOBS)
def test_killed_and_resumed(root: Path, name: str) -> None:
    runs = cli.Forks(root)
    job = (*JOB, *JOBS[name])
    whole = cli.metrics(runs.train(f"{name}-whole", *job))
    assert whole[-1]["train/loss"] < whole[0]["train/loss"] and "validation/loss" in whole[-1]
    assert {key for key in whole[-1] if key.startswith(("rewards/", "logps/"))}
    process = runs.start(*job, f"hydra.run.dir={name}")
    saved = root / name / "checkpoints" / str(STEPS // 2)
    while process.poll() is None and not saved.is_dir():
        pass
    process.kill()
    process.finish()
    runs.check("--resume", f"hydra.run.dir={name}")
    assert cli.metrics(root / name) == whole
