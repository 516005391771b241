"""A run whose steps take parts of rows: it pauses between rows only, so that it resumes bit for bit."""

import dataclasses
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import cli, hosts
from tests.helpers.checkpoints import leaves
from zero.commands.cli import compose
from zero.job.job import steps_per_row

LAST = 12
PARTS = (
    *cli.TINY,
    "model.size=test_vq",
    "model.override={update_tokens: 8, distance_dropout: 0.2, layer_dropout: 0.2}",
    "training.evaluation_frequency=8",
    "training.log_frequency=4",
    f"training.total_steps={LAST}",
)  # rows of 32: four steps each
STEPS_PER_ROW = 4


@pytest.fixture(scope="module")
def workplace(workplace: Path) -> Path:
    """With a run that has ended."""
    cli.Lasting(workplace).train("whole", *PARTS)
    return workplace


@pytest.mark.slow  # test_resume.py resumes such a run
def test_it_resumes_bit_for_bit(lasting: cli.Lasting) -> None:
    """The state, the data and the metrics of each step; lines come after whole rows."""
    whole = lasting.workplace / "whole"
    run = lasting.fork("whole", 8)
    assert cli.losses(run) == cli.losses(whole) and len(cli.losses(whole)) == LAST // STEPS_PER_ROW
    expected = leaves(whole, LAST, "")
    got = leaves(run, LAST, "")
    assert got.keys() == expected.keys()
    for name, x in got.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
    lines = [line for line in cli.metrics(whole) if "train/loss" in line]
    assert [line["step"] for line in lines] == [4, 8, 12]
    tokens_per_row_batch = 16 * cli.CONTEXT
    assert [line["tokens_seen"] for line in lines] == [tokens_per_row_batch * n for n in (1, 2, 3)]


@pytest.mark.slow
def test_stopped_within_a_row(forks: cli.Forks) -> None:
    """A signal stops the run at the end of a row, from which it continues as if nothing had been."""
    process = forks.start(*PARTS, "hydra.run.dir=stopped", "training.total_steps=400", "training.log_frequency=4")
    run = forks.workplace / "stopped"
    process.wait_for(run / "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    assert process.finish().returncode == 75
    steps = [int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()]
    assert steps and all(step % STEPS_PER_ROW == 0 for step in steps)


@pytest.mark.slow
def test_two_hosts(forks: cli.Forks) -> None:
    """Two hosts, each with its rows and their memories, train as one."""
    job = ("training.batch_size=8", "training.gradient_accumulation_steps=1", "distributed.cpu_devices=4")
    done = hosts.finish(hosts.start([forks.workplace] * 2, *PARTS, *job, "hydra.run.dir=hosts"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    np.testing.assert_allclose(cli.losses(forks.workplace / "hosts"), cli.losses(forks.workplace / "whole"), rtol=1e-5)


def test_steps_that_share_a_row() -> None:
    config, size = compose(list(PARTS))
    assert steps_per_row(config.data, size) == STEPS_PER_ROW
    other = dataclasses.replace(size, update_tokens=None)
    assert steps_per_row(config.data, other) == 1
