"""The programs in examples/, with and without their diff: the same losses, whoever wrote the checkpoint."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.examples import EXAMPLES, NAMES, load
from tests import cli, hosts


@functools.cache
def program(name: str, sharded: bool, folder: Path) -> ModuleType:
    return load(name, sharded, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@functools.cache
def expected(name: str, folder: Path) -> list[float]:
    """The losses of thirty steps of the unsharded program, which learns, and its checkpoint after ten."""
    losses: list[float] = []
    plain = program(name, False, folder)
    losses += plain.train(10, folder / f"{name}.old")[0]
    losses += plain.train(30, folder / f"{name}.plain", resume=False)[0][10:]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_the_unsharded_program_through_checkpoints_of_both(name: str, folder: Path) -> None:
    losses, path = expected(name, folder), folder / f"{name}.turns"
    plain, sharded = program(name, False, folder), program(name, True, folder)
    found, state = sharded.train(10, path)
    found += plain.train(20, path, resume=True)[0]
    found += sharded.train(30, path, resume=True)[0]
    np.testing.assert_allclose(found, losses, rtol=1e-6)

    slices = jax.tree.leaves(state.opt_state)
    held = sum(x.addressable_shards[0].data.nbytes for x in slices)
    whole = sum(np.asarray(x).nbytes for x in jax.tree.leaves(sharded.to_host(state).opt_state))
    assert held < 0.2 * whole  # of eight devices; the smallest leaves are whole on each

    # The wrong way to save: as the unsharded program did, or (where it held one copy already) by taking the first.
    takes_first = name != "diffusion"
    with pytest.raises(ValueError, match=r"one device's slice .* zero\.whole_state"):
        plain.to_host(state) if takes_first else jax.tree.map(lambda x: x[0], state.opt_state)


SHORT = "language_model"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == SHORT else [pytest.mark.slow]) for n in NAMES])
def test_two_processes_resume_an_old_checkpoint_and_write_one(name: str, folder: Path) -> None:
    losses, path = expected(name, folder), folder / f"{name}.two"
    old = folder / f"{name}.old"
    (shutil.copytree if old.is_dir() else shutil.copy)(old, path)
    program(name, True, folder)
    env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    env |= {"XLA_FLAGS": "--xla_cpu_enable_concurrency_optimized_scheduler=false", "JAX_NUM_CPU_DEVICES": "4"}
    address = f"127.0.0.1:{hosts.free_port()}"
    line: list[Any] = [sys.executable, folder / f"{name}_sharded.py", "--steps", "20", "--checkpoint", path, "--resume"]
    processes = [
        subprocess.Popen(
            [*map(str, line), "--processes", address, "2", str(process)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    for done in [cli.finish(process) for process in processes]:
        assert done.returncode == 0, done.stdout
        found = [float(x) for x in done.stdout.splitlines()[-1].split()]
        np.testing.assert_allclose(found, losses[10:20], rtol=1e-6)
    resumed = program(name, False, folder).train(30, path, resume=True)[0]
    np.testing.assert_allclose(resumed, losses[20:], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_readme_counts_the_lines_that_change(name: str) -> None:
    """Blank ones aside."""
    lines = (EXAMPLES / name / "sharded.diff").read_text().splitlines()[2:]
    removed, added = ([line for line in lines if line[0] == sign and line[1:].strip()] for sign in "-+")
    row = next(line for line in (EXAMPLES / "README.md").read_text().splitlines() if line.startswith(f"| [{name}]"))
    assert row.endswith(f"| {len(removed)}, {len(added)} |")
