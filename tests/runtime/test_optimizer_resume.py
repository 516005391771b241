"""A run with each optimizer, continued from the middle: the same state at the end, to the bit."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import cli
from zero.runtime.checkpoints.manager import Checkpoints
from zero.training.optimizer import NAMES

LAST = 8
RUN = (*cli.TINY, "training.evaluation_frequency=4", f"training.total_steps={LAST}", "data.max_context=16")
CASES = {
    **{name: (f"optimizer.name={name}",) for name in NAMES},
    "adafactor": ("optimizer.name=adafactor", "optimizer.factored_from=8"),
    "mup": ("model.size=bytes_mup",),
}


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> cli.Forks:
    return cli.Forks(cli.make_workplace(tmp_path_factory.mktemp("optimizers")))


def state(run: Path) -> dict[str, np.ndarray]:
    """Weights and optimizer state after the last step."""
    with Checkpoints(run / "checkpoints", None) as checkpoints:
        return {name: checkpoints.read(LAST, name) for name in checkpoints.meta(LAST)["shapes"]}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_resumed_run_ends_as_one_that_was_not_interrupted(forks: cli.Forks, case: str) -> None:
    whole, done = forks.workplace / case, forks.run(*RUN, *CASES[case], f"hydra.run.dir={case}")
    assert done.returncode == 0, done.stderr
    before = set(forks.workplace.glob("runs/*/*"))
    done = forks.run("--resume", f"hydra.run.dir={case}", "data.resume_step=4")
    assert done.returncode == 0, done.stderr
    (resumed,) = set(forks.workplace.glob("runs/*/*")) - before
    expected, got = state(whole), state(resumed)
    assert any(name.startswith("opt_state") for name in expected) and got.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)
