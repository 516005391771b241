"""A run with moments of a byte and bfloat16 weights: resumed, moved, converted, evaluated."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import cli
from tests.helpers.checkpoints import leaves
from zero.checkpoints.manager import Checkpoints
from zero.exchange.average import average
from zero.run_directory import saved_steps

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


def stored(run: Path, step: int, name: str) -> int:
    with Checkpoints(run / "checkpoints", None) as checkpoints:
        meta = checkpoints.meta(step)
    sizes = {
        key: int(np.prod(shape)) * jnp.dtype(meta["dtypes"][key]).itemsize for key, shape in meta["shapes"].items()
    }
    return sum(size for key, size in sizes.items() if key.startswith(name))


def test_it_goes_on_bit_for_bit(forks: cli.Forks) -> None:
    whole = forks.workplace / "whole"
    run, log = fork(forks, "whole")
    assert losses(run) == losses(whole) and "other dtypes" not in log
    for (name, x), y in zip(leaves(run, LAST).items(), leaves(whole, LAST).values(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.slow
def test_continues_on_other_devices(forks: cli.Forks) -> None:
    """The run continues on other devices and at another stage."""
    run, log = fork(forks, "whole", "distributed.cpu_devices=4", "zero.stage=1")
    np.testing.assert_allclose(losses(run), losses(forks.workplace / "whole"), rtol=1e-3)
    assert "other dtypes" not in log


def test_continues_in_float32(forks: cli.Forks) -> None:
    """The run continues in float32, with larger checkpoints."""
    whole = forks.workplace / "whole"
    wide, log = fork(forks, "whole", *FLOAT32)
    (line,) = [line for line in log.splitlines() if "other dtypes" in line]
    assert "opt_state from int8 to float32" in line and "params from" in line
    np.testing.assert_allclose(losses(wide), losses(whole), rtol=2e-2)
    kept = {name: x.dtype for name, x in leaves(wide, LAST).items()}
    assert {kept[name] for name in kept if name.startswith(("opt_state/0/mu/", "params/"))} == {np.dtype(np.float32)}
    assert stored(whole, LAST, "opt_state/") < 0.3 * stored(wide, LAST, "opt_state/")
    assert stored(whole, LAST, "params/") < 0.55 * stored(wide, LAST, "params/")


@pytest.mark.slow
def test_float32_run_continues_in_bytes(forks: cli.Forks) -> None:
    """A float32 run continues in bytes."""
    whole, wide = forks.workplace / "whole", forks.train("float32", *RUN, *FLOAT32)
    small, log = fork(forks, "float32", *SMALL)
    (line,) = [line for line in log.splitlines() if "other dtypes" in line]
    assert "opt_state from float32 to int8" in line and "params from" in line
    np.testing.assert_allclose(losses(small), losses(wide), rtol=2e-2)
    got, expected = (leaves(path, LAST) for path in (small, whole))
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in expected.items()}


@pytest.mark.slow
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
