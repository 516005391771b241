"""Runs of each objective on pairs: killed after a checkpoint and resumed, they are as if nothing had been."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import cli
from tests.helpers.pair_runs import JOB, LABELLED, STEPS, make_labels, make_pairs

# The overrides of each objective; the others than the first are as good as it is, and wide.
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


@pytest.mark.parametrize(
    "name", [name if name == "kto" else pytest.param(name, marks=pytest.mark.wide) for name in JOBS]
)
def test_killed_and_resumed(root: Path, name: str) -> None:
    runs = cli.Forks(root)
    job = cli.later_values(*JOB, *JOBS[name])
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
