"""The primitives across two processes of four devices each, over gloo."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import zero
from tests.helpers import hosts

pytestmark = pytest.mark.wide  # tests/test_hosts.py trains on two hosts
WORKER = Path(__file__).with_name("two_processes.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two processes left behind: by default with one check of each kind."""
    folder = tmp_path_factory.mktemp("two")
    hosts.run_two(WORKER, folder)
    return folder


def test_one_process_reads_two(folder: Path) -> None:
    assert_read(folder, "hybrid")


def test_every_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every axis, and with narrow dtypes, slices under shard_map and moments of a byte."""
    monkeypatch.setenv("ZERO_TEST_EVERY_CHECK", "1")
    hosts.run_two(WORKER, tmp_path)
    for name in ("flat", "hybrid", "phases"):
        assert_read(tmp_path, name)


def assert_read(folder: Path, name: str) -> None:
    """One process reads what two processes have stored."""
    shapes = {"w": (5, 24), "odd": (13, 3), "b": (9,), "scalar": ()}
    rng = np.random.default_rng(0)
    whole = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    layout = zero.make_layout(whole, 4 if name == "hybrid" else 8)
    axis = zero.Axis("batch", (1, layout.shards))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder / name, zero.global_shapes(layout, axis))
    shards = zero.from_global(restored, layout, axis)
    gathered = jax.pmap(lambda shards: zero.gather(shards, layout, axis), "batch")(shards)
    for leaf, x in gathered.items():
        np.testing.assert_array_equal(x[0], whole[leaf])


@pytest.mark.slow  # the fixture has one that communicates by itself, and another in two copies
def test_every_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes update as one does, with every kind of optimizer."""
    monkeypatch.setenv("ZERO_TEST_EVERY_OPTIMIZER", "1")
    hosts.run_two(WORKER, tmp_path)


def test_checksums_of_two_processes(folder: Path) -> None:
    """Two processes find the checksums of one."""
    shapes = {"w": (5, 24), "odd": (13, 3), "b": (9,), "scalar": ()}
    rng = np.random.default_rng(0)
    whole = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    layout = zero.make_layout(whole, 1)
    shards = jax.pmap(lambda _: whole, "batch", devices=jax.devices()[:1])(np.ones(1))
    expected = zero.checksums(shards, layout, "batch", jax.devices()[:1])
    assert [(folder / f"checksums{process}").read_text() for process in range(2)] == [repr(expected)] * 2
