"""A run whose optimizer's state of layers lies in the host's memory: saved, killed, resumed, and changed on the way."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.config.composing import compose
from tests.helpers import cli, kills
from tests.helpers.checkpoints import leaves
from zero.base.errors import UserError
from zero.commands.modes import check
from zero.job.job import make_job, place_model
from zero.job.sizes import load_sizes
from zero.record.metrics_file import read_resumes

JOB = (*cli.TINY, "training.gradient_accumulation_steps=1", "zero.fused_update=true", "zero.remat=full")
STREAMED = (*JOB, "zero.offload=optimizer")
PLACES = """
import sys
import jax
from zero.checkpoints.manager import Checkpoints

def restored(*arguments, **options):
    whole = restore(*arguments, **options)
    places = [x.sharding.memory_kind for x in jax.tree.leaves(whole)]
    print("restored to the host:", places.count("pinned_host"), file=sys.stderr)
    return whole

restore, Checkpoints.restore = Checkpoints.restore, restored
"""
AT_THE_LAST = kills.Rule("os.rename", "/checkpoints/12$", "kill before")


@pytest.fixture(scope="module")
def streamed(lasting: cli.Lasting) -> Path:
    return lasting.train("streamed", *STREAMED)


def from_step_6(lasting: cli.Lasting, run: Path, name: str, *keys: str) -> Path:
    """A copy of the run that has lost its last checkpoint, resumed."""
    copy = lasting.workplace / name
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints/12")
    lasting.train(name, "--resume", *keys)
    assert read_resumes(copy / "metrics.jsonl") == [6]
    return copy


@pytest.mark.wide  # training/test_streamed_update.py has what a checkpoint holds, and what is made of it
def test_lost_steps_are_repeated(lasting: cli.Lasting, streamed: Path) -> None:
    """A run that lost its last steps continues bit for bit, metrics and state."""
    run = from_step_6(lasting, streamed, "repeated")
    assert cli.metrics(run) == cli.metrics(streamed)
    expected = leaves(streamed, 12)
    for name, x in leaves(run, 12).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


@pytest.mark.wide
def test_killed_and_resumed(forks: cli.Forks, streamed: Path) -> None:
    """A killed run continues bit for bit, metrics and state, which a restore puts where it lies."""
    run = forks.workplace / "killed"
    with cli.customized(kills.at(AT_THE_LAST)):
        assert forks.run(*STREAMED, "hydra.run.dir=killed").returncode == -signal.SIGKILL
    with cli.customized(PLACES):
        resumed = forks.check("--resume", "hydra.run.dir=killed")
    assert read_resumes(run / "metrics.jsonl") == [6]
    assert cli.metrics(run) == cli.metrics(streamed)
    expected = leaves(streamed, 12)
    assert len(expected) > 40
    on_host = [name for name in expected if name.startswith("opt_state/") and "/blocks/" in name]
    assert f"restored to the host: {len(on_host)}\n" in resumed.stderr
    for name, x in leaves(run, 12).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


@pytest.mark.slow
def test_inputs_go_to_the_host_as_well(lasting: cli.Lasting, streamed: Path) -> None:
    run = from_step_6(lasting, streamed, "both", "zero.offload=both")
    assert cli.metrics(run) == cli.metrics(streamed)


@pytest.mark.parametrize(
    "first",
    [pytest.param("on the devices", marks=pytest.mark.slow), pytest.param("on the host", marks=pytest.mark.wide)],
)
def test_continued_in_the_other_place(first: str, lasting: cli.Lasting, streamed: Path) -> None:
    """A checkpoint is the same for both: the moments of step 6 are those of the other run, and training goes on."""
    if first == "on the host":
        whole = streamed
        run = from_step_6(lasting, streamed, "then-on-devices", "zero.offload=none")
    else:
        whole = lasting.train("on-devices", *JOB)
        run = from_step_6(lasting, whole, "then-on-host", "zero.offload=optimizer")
    np.testing.assert_allclose(cli.losses(run), cli.losses(whole), rtol=2e-6)
    expected = leaves(whole, 12, "opt_state/")
    for name, x in leaves(run, 12, "opt_state/").items():
        assert np.linalg.norm(x - expected[name]) <= 1e-3 * np.linalg.norm(expected[name]), name


def test_other_dtypes_are_refused() -> None:
    """They are converted on the devices, where the whole state need not fit."""
    sizes = load_sizes()
    held, other = (check(compose(*STREAMED, f"optimizer.state_dtype={dtype}"), sizes) for dtype in ("float32", "int8"))
    storages = [make_job(config, place_model(config, sizes.chosen(config.model))).storage for config in (held, other)]
    storages[0].check_conversion(storages[0].layout, "a checkpoint")
    with pytest.raises(
        UserError, match=r"^a checkpoint: the state has other dtypes, .*; resume once with zero.offload=none"
    ):
        storages[0].check_conversion(storages[1].layout, "a checkpoint")


@pytest.mark.slow
def test_statistics_and_averages(lasting: cli.Lasting) -> None:
    """Features that take the state take what lies on the devices."""
    run = lasting.train("statistics", *STREAMED, "statistics.every=6", "training.ema=0.9", "training.total_steps=6")
    (line,) = [line for line in cli.metrics(run) if line["step"] == 6 and "train/loss" in line]
    assert any(name.startswith("gradient_rms/blocks") or "blocks" in name for name in line)
