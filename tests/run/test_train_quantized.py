"""A run with moments of a byte and bfloat16 weights: moved, converted, evaluated; test_resume.py resumes it."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers import cli
from tests.helpers.checkpoints import leaves
from zero.exchange.average import average
from zero.record.run_files import saved_steps

pytestmark = pytest.mark.slow
LAST = 8
SMALL = ("optimizer.state_dtype=int8", "zero.master_dtype=bfloat16")
FLOAT32 = ("optimizer.state_dtype=float32", "zero.master_dtype=float32")
RUN = (
    *cli.TINY,
    "training.ema=0.6",
    "training.staged_warmup_steps=0",
    "training.evaluation_frequency=4",
    f"training.total_steps={LAST}",
    "data.max_context=16",
)


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With a run that has ended."""
    cli.Forks(workplace).train("whole", *RUN, *SMALL)
    return workplace


def fork(forks: cli.Forks, run: str, *arguments: str) -> tuple[Path, str]:
    """A run that continues from step 4 of another, and its log."""
    new = forks.fork(run, 4, *arguments)
    assert saved_steps(new) == [LAST]
    return new, (new / "main_zero.log").read_text()


def losses(run: Path) -> list[float]:
    return cli.losses(run, "validation/loss")


def test_continues_on_other_devices(forks: cli.Forks) -> None:
    """The run continues on other devices and at another stage."""
    run, log = fork(forks, "whole", "distributed.cpu_devices=4", "zero.stage=1")
    np.testing.assert_allclose(losses(run), losses(forks.workplace / "whole"), rtol=1e-3)
    assert "other dtypes" not in log


def test_float32_run_continues_in_bytes(forks: cli.Forks) -> None:
    """A float32 run continues in bytes."""
    whole, wide = forks.workplace / "whole", forks.train("float32", *RUN, *FLOAT32)
    small, log = fork(forks, "float32", *SMALL)
    (line,) = [line for line in log.splitlines() if "other dtypes" in line]
    assert "opt_state from float32 to int8" in line and "params from" in line
    np.testing.assert_allclose(losses(small), losses(wide), rtol=2e-2)
    got, expected = (leaves(path, LAST) for path in (small, whole))
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in expected.items()}


def test_weights_in_every_mode(forks: cli.Forks, tmp_path: Path) -> None:
    """Its weights are used by evaluate, sample, average and warm start."""
    whole = forks.workplace / "whole"
    found = {}
    for name, keys in (("held", ()), ("float32", FLOAT32), ("ema", ("evaluate.ema=true",))):
        found[name] = forks.evaluate(f"evaluated-{name}", "model.model_path=whole", *keys)["loss"]
    assert found["held"] == found["float32"] != found["ema"]
    forks.check("mode=sample", "model.model_path=whole", "sample.tokens=4", "hydra.run.dir=sampled")

    forks.check(*RUN, "model.warm_start=true", "model.model_path=whole", "hydra.run.dir=warm", "training.total_steps=4")
    average(str(whole), tmp_path / "mean")
    mean, expected = leaves(tmp_path / "mean", LAST), [leaves(whole, step) for step in (4, LAST)]
    table = "params/vocabulary/table"
    assert mean[table].dtype == np.float32
    np.testing.assert_array_equal(mean[table], sum(x[table].astype(np.float32) for x in expected) / np.float32(2))
