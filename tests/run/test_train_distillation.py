"""A teacher's tokens are stored, and another model learns from them: in staged lengths, and resumed."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import cli, hosts

JOB = cli.later_values(
    *cli.TINY,
    "objective=distillation",
    "objective.top_tokens=4",
    "objective.weight=0.5",
    "training.staged_warmup_steps=0",
    "training.total_steps=6",
    "training.evaluation_frequency=3",
    "model.override.N=1",
)
STAGED = (*JOB, "training.context_stages=[[3,16]]")
SPLITS = [Path(index) for index in cli.INDICES]


@pytest.fixture(scope="module")
def taught(workplace: Path) -> Path:
    """The workplace with the tokens of a teacher beside both index files."""
    runs = cli.Lasting(workplace)
    teacher = runs.train("teacher", *cli.TINY)
    found = runs.evaluate(
        *("stored", f"model.model_path={teacher}", "evaluate.top_tokens=5"),
        *("evaluate.validation=false", f"evaluate.index=[{','.join(cli.INDICES)}]"),
    )
    assert found["step"] == 12
    return workplace


@pytest.mark.wide  # tests/training/objectives/test_distillation.py has them without runs
def test_stored_tokens(taught: Path) -> None:
    """Of each position of each row the most likely first; together less likely than certain."""
    for index in SPLITS:
        stem = taught / index.with_suffix("")
        described = json.loads(Path(f"{stem}.teacher.json").read_text())
        tokens, logps = (np.load(f"{stem}.teacher-{name}.npy") for name in ("tokens", "log_probabilities"))
        assert tokens.shape == logps.shape == (described["rows"], cli.CONTEXT, 5) and tokens.dtype == np.uint16
        together = np.exp(logps).sum(-1)
        assert (np.diff(logps) <= 0).all() and (together < 1.0001).all() and together.max() > 0.05
        assert all(len(set(of_position)) == 5 for of_position in tokens.reshape(-1, 5).tolist())


@pytest.mark.wide
def test_two_hosts_store_the_same(taught: Path) -> None:
    """Each host computes a part of each batch, and host 0 writes: to rounding what one host has written."""
    index = taught / SPLITS[1]
    names = [f"{index.with_suffix('')}.teacher-{name}.npy" for name in ("tokens", "log_probabilities")]
    of_one_host = [np.load(name) for name in names]
    for name in names:
        Path(name).unlink()
    keys = ("model.model_path=teacher", "evaluate.top_tokens=5", "evaluate.validation=false")
    places = ("distributed.cpu_devices=2", f"evaluate.index={index}", "hydra.run.dir=of-two-hosts")
    done = hosts.finish(hosts.start_forked([taught] * 2, "mode=evaluate", *keys, *places))
    assert [host.returncode for host in done] == [0, 0], [host.stderr for host in done]
    tokens, log_probabilities = (np.load(name) for name in names)
    np.testing.assert_allclose(log_probabilities, of_one_host[1], rtol=1e-3, atol=1e-3)
    assert (tokens == of_one_host[0]).mean() > 0.99  # equally likely ones may change places


@pytest.fixture(scope="module")
def whole(taught: Path) -> Path:
    return cli.Lasting(taught).train("whole", *JOB)


@pytest.mark.wide  # the formula is compared by steps
def test_learned(whole: Path) -> None:
    """The loss is what the weight says of its two parts."""
    lines = cli.metrics(whole)
    assert lines[-1]["divergence"] < lines[0]["divergence"] and lines[-1]["validation/divergence"] > 0
    assert lines[-1]["train/loss"] == pytest.approx(
        (lines[-1]["divergence"] + lines[-1]["likelihood_loss"]) / 2, rel=1e-5
    )


@pytest.mark.wide
def test_resumed_bit_for_bit(taught: Path, whole: Path) -> None:
    assert cli.metrics(cli.Lasting(taught).fork("whole", 3)) == cli.metrics(whole)


@pytest.mark.wide  # the test above continues a run of one length, in a process that has its programs
def test_killed_and_resumed(taught: Path) -> None:
    """Rows of both lengths are learned from."""
    runs = cli.Forks(taught)
    whole = cli.metrics(runs.train("staged", *STAGED))
    assert [line["sequence_length"] for line in whole] == [16, 16, 16, 32, 32, 32]
    process = runs.start(*STAGED, "hydra.run.dir=killed")
    process.wait_for(taught / "killed" / "checkpoints" / "3")
    process.kill()
    process.finish()
    runs.check("--resume", "hydra.run.dir=killed")
    assert cli.metrics(taught / "killed") == whole


@pytest.mark.wide  # test_teacher.py has them without runs
def test_other_values_are_refused(taught: Path, whole: Path) -> None:
    runs = cli.Forks(taught)
    stored = taught / SPLITS[0].with_suffix(".teacher.json")
    before = stored.read_text()
    stored.write_text(json.dumps(json.loads(before) | {"sha256": "other"}))
    again = ("--resume", "hydra.run.dir=whole", "training.total_steps=8")
    cli.check_refusal(runs.run(*again), "the values of the teacher have changed")
    stored.write_text(before)
    more = cli.later_values(*JOB, "objective.top_tokens=6", "hydra.run.dir=more")
    cli.check_refusal(runs.run(*more), "objective.top_tokens=6: the teacher")
