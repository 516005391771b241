"""Groups of devices that lie on several hosts: rows, losses and checkpoints are those of one process without groups."""

import signal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.helpers import cli, hosts
from zero.record.metrics_file import read_metrics
from zero.record.run_files import saved_steps


class Placement(NamedTuple):
    """Processes, devices of each, and the groups across them."""

    hosts: int
    devices: int
    groups: str


# Rows of 24 tokens divide over context groups of 2, 3, 4 and 6; the model has 3 heads.
JOB = (
    "data.max_context=24",
    "training.gradient_accumulation_steps=1",
    "training.total_steps=6",
    "training.evaluation_frequency=3",
    "training.log_frequency=1",
    "training.sample_tokens=4",
    f"data.index_path_validation={{a: {cli.INDICES[1]}}}",  # of sets with names the bytes are counted too
    "zero.stage=3",
)
GLOBAL_ROWS = 12
PLACEMENTS = {
    "a context group on both hosts": Placement(2, 2, "zero.context_shards=4"),
}
SLOW = {
    "tensor groups that end within a host": Placement(3, 2, "zero.tensor_shards=3"),
    "a tensor group on three hosts": Placement(3, 1, "zero.tensor_shards=3"),
    "context groups of two hosts": Placement(4, 1, "zero.context_shards=2"),
    "context groups that end within a host": Placement(3, 4, "zero.context_shards=6"),
    "a copy of the state on each two of four hosts": Placement(4, 1, "zero.replicas=2"),
}


def job(count: int) -> tuple[str, ...]:
    return (*cli.TINY, *JOB, f"training.batch_size={GLOBAL_ROWS // count}")


def start(workplace: Path, placement: Placement, *arguments: str) -> list[cli.Fork]:
    devices = f"distributed.cpu_devices={placement.devices}"
    return hosts.start_forked([workplace] * placement.hosts, *arguments, devices, placement.groups)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process on one device per row, without groups."""
    workplace = cli.make_workplace(tmp_path_factory.mktemp("alone"))
    cli.Forks(workplace).train("alone", *job(1), "distributed.cpu_devices=4")
    return workplace


def check_equal(run: Path, alone: Path) -> None:
    got, expected = read_metrics(run / "metrics.jsonl"), read_metrics(alone / "metrics.jsonl")
    assert [line["samples_checksum"] for line in got] == [line["samples_checksum"] for line in expected]
    assert [line["step"] for line in got] == [line["step"] for line in expected]
    for key in ("train/loss", "validation/loss", "validation/bits_per_byte"):
        values, others = ([line[key] for line in lines if key in line] for lines in (got, expected))
        assert values
        np.testing.assert_allclose(values, others, rtol=2e-6, err_msg=key)


WIDE = [pytest.param(name, marks=pytest.mark.wide) for name in PLACEMENTS]  # training/test_row_places.py has the rows


@pytest.mark.parametrize("name", [*WIDE, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_equals_one_process_without_groups(alone: Path, name: str) -> None:
    """Rows, losses, evaluations and samples are those of one process."""
    placement = (PLACEMENTS | SLOW)[name]
    run = name.replace(" ", "-")
    done = hosts.finish(start(alone, placement, *job(placement.hosts), f"hydra.run.dir={run}"))
    assert [one.returncode for one in done] == [0] * placement.hosts, [one.stderr for one in done]
    check_equal(alone / run, alone / "alone")
    assert (alone / run / "samples.txt").read_text() == (alone / "alone" / "samples.txt").read_text()


@pytest.mark.slow
def test_killed_and_resumed_with_other_groups(alone: Path) -> None:
    """A run that is killed while a group lies on two hosts continues on three hosts with other groups."""
    placement = Placement(2, 2, "zero.context_shards=4")
    processes = start(alone, placement, *job(2), "data.save_every=1", "hydra.run.dir=killed")
    hosts.wait_for_step(alone / "killed", 2, processes)
    processes[1].send_signal(signal.SIGKILL)
    done = hosts.finish(processes)
    assert all(one.returncode != 0 for one in done)
    assert saved_steps(alone / "killed")
    resume = ("--resume", "hydra.run.dir=killed")
    stops = ("training.total_steps=6", "zero.context_shards=1")
    three = Placement(3, 2, "zero.tensor_shards=3")
    done = hosts.finish(start(alone, three, *resume, *stops))
    assert [one.returncode for one in done] == [0] * 3, [one.stderr for one in done]
    check_equal(alone / "killed", alone / "alone")


@pytest.mark.slow
def test_a_copy_is_lost(alone: Path) -> None:
    """Two of four hosts, which hold a copy of the state, are lost, as a slice of TPUs is: all end, and two continue."""
    processes = start(alone, Placement(4, 1, "zero.replicas=2"), *job(4), "data.save_every=1", "hydra.run.dir=lost")
    hosts.wait_for_step(alone / "lost", 2, processes)
    for process in processes[2:]:
        process.send_signal(signal.SIGKILL)
    done = hosts.finish(processes)
    assert all(one.returncode != 0 for one in done)
    left = Placement(2, 1, "zero.replicas=1")
    done = hosts.finish(start(alone, left, "--resume", "hydra.run.dir=lost", "training.total_steps=6"))
    assert [one.returncode for one in done] == [0] * 2, [one.stderr for one in done]
    check_equal(alone / "lost", alone / "alone")
