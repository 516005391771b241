"""A run of a model with vector-quantized keys: resumed elsewhere, on two hosts, warm-started, evaluated, sampled from.

test_resume.py resumes such a run and scores longer rows, tests/training/test_step_codebook.py trains in groups.
"""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import cli, hosts
from tests.helpers.checkpoints import leaves
from zero.base.errors import UserError
from zero.exchange.export import export

pytestmark = pytest.mark.slow
LAST = 8
VQ = (
    *cli.TINY,
    "model.size=test_vq",
    "training.warmup_train_context=8",
    "training.staged_warmup_steps=2",
    "training.evaluation_frequency=4",
    f"training.total_steps={LAST}",
    "data.max_context=16",
)


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With a run that has ended."""
    cli.Forks(workplace).train("whole", *VQ)
    return workplace


def state(run: Path, step: int) -> dict[str, np.ndarray]:
    return leaves(run, step, "params/", "averages/codebook/")


def losses(run: Path) -> list[float]:
    return cli.losses(run, "validation/loss")


def test_continues_in_groups(forks: cli.Forks) -> None:
    """The run continues in tensor groups, with the codebook of none."""
    whole = forks.workplace / "whole"
    assert_same_up_to_rounding(forks.fork("whole", 4, "zero.tensor_shards=4"), whole)


def test_killed_and_resumed_in_groups(forks: cli.Forks) -> None:
    """A run in tensor groups that is killed resumes in groups of another size, with the codebook of none."""
    process = forks.start(*VQ, "zero.tensor_shards=4", "hydra.run.dir=groups")
    while process.poll() is None and not (forks.workplace / "groups/checkpoints/4").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.finish()
    run = forks.train("groups", "--resume", "zero.tensor_shards=2")
    assert_same_up_to_rounding(run, forks.workplace / "whole")


def assert_same_up_to_rounding(run: Path, whole: Path) -> None:
    np.testing.assert_allclose(cli.losses(run), cli.losses(whole), rtol=1e-6)
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-6)
    expected = state(whole, LAST)
    for name, x in state(run, LAST).items():
        if name.endswith("/counts"):
            np.testing.assert_array_equal(x, expected[name], err_msg=name)


def test_resumes_on_other_devices(forks: cli.Forks) -> None:
    """The run resumes, up to rounding, on other devices and at another stage."""
    whole = forks.workplace / "whole"
    expected, start = state(whole, LAST), state(whole, 4)
    elsewhere = state(forks.fork("whole", 4, "distributed.cpu_devices=4", "zero.stage=1"), LAST)
    for name in expected:
        if name.startswith("averages/codebook/"):
            assert np.abs(expected[name] - start[name]).max() > 1e-2, name
            np.testing.assert_allclose(elsewhere[name], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_codebook_of_two_hosts(forks: cli.Forks) -> None:
    """Two hosts have the codebook of one."""
    job = ("training.batch_size=8", "training.gradient_accumulation_steps=1", "distributed.cpu_devices=2")
    done = hosts.finish(hosts.start([forks.workplace] * 2, *VQ, *job, "hydra.run.dir=hosts"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    expected = state(forks.workplace / "whole", LAST)
    for name, x in state(forks.workplace / "hosts", LAST).items():
        if name.startswith("averages/codebook/"):
            np.testing.assert_allclose(x, expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_codebook_in_every_mode(forks: cli.Forks, tmp_path: Path) -> None:
    """The model is evaluated, sampled from and warm-started with its codebook."""
    use = ("model.model_path=whole",)
    loss = forks.evaluate("evaluated", *use)["loss"]
    assert abs(loss - losses(forks.workplace / "whole")[-1]) < 0.2  # of more rows
    forks.check("mode=sample", *use, "sample.tokens=100", "hydra.run.dir=sampled")
    assert json.loads((forks.workplace / "sampled" / "samples.jsonl").read_text())["text"]
    warm = (*VQ, "model.warm_start=true", *use, "training.peak_learning_rate=0", "training.total_steps=4")
    forks.check(*warm, "training.end_learning_rate=0", "hydra.run.dir=warm")
    source, got = state(forks.workplace / "whole", LAST), state(forks.workplace / "warm", 4)
    for name, x in source.items():
        if name.startswith("params/"):
            np.testing.assert_array_equal(got[name], x, err_msg=name)
    # Four steps move codes by few per cent; a new codebook would be anywhere.
    counts, other = (s["averages/codebook/blocks/unit_0/counts"] for s in (source, got))
    assert np.corrcoef(counts.ravel(), other.ravel())[0, 1] > 0.9
    with pytest.raises(UserError, match=r"no architecture of transformers equals this model.*layer=transformer"):
        export(str(forks.workplace / "whole"), tmp_path / "exported")
