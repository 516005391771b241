"""The programs in examples/, with and without their diff: the same losses, whoever wrote the checkpoint."""

import functools
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from flax import jax_utils

import zero
from benchmarks.examples import EXAMPLES, NAMES, load
from tests.helpers import hosts
from tests.helpers.ordering import unordered

WORKER = Path(__file__).with_name("two_examples.py")


@functools.cache
def program(name: str, diffs: int, folder: Path) -> ModuleType:
    return load(name, diffs, folder)


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


# test_two_processes_resume trains diffusion, and test_language_model_under_shard_map that one by pmap as well;
# translation has the state of flax_classifier, and padded pairs, which zero does not see; sam takes two gradients, of
# which zero reduces the second one, as test_whole_state.py does between reduction and update.
ELSEWHERE = ("diffusion", "language_model", "sam", "translation")


def marks(name: str) -> Any:
    """By default the programs are traced, and test_structures.py compares losses of such a port."""
    return pytest.mark.slow if name in ELSEWHERE else pytest.mark.wide


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in NAMES])
def test_losses_equal_unsharded(name: str, folder: Path) -> None:
    """Losses equal those of the unsharded program, through checkpoints of both."""
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


@pytest.mark.wide  # tests/partition has shard_map
def test_language_model_under_shard_map(folder: Path) -> None:
    """Under shard_map the language model is the same and reads and writes the same checkpoints."""
    name = "language_model"
    losses, path = expected(name, folder), folder / f"{name}.moved"
    plain, by_pmap, by_shard_map = (program(name, diffs, folder) for diffs in range(3))
    found = by_shard_map.train(10, path)[0]
    found += by_pmap.train(15, path, resume=True)[0]
    found += by_shard_map.train(25, path, resume=True)[0]
    found += plain.train(30, path, resume=True)[0]
    np.testing.assert_allclose(found, losses, rtol=1e-6)


REFUSING: dict[str, Any] = {  # kinds of states; the others are like one of them
    "flax_classifier": (),
    "haiku_mixed_precision": pytest.mark.wide,
    "ppo": pytest.mark.wide,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=REFUSING.get(name, pytest.mark.slow)) for name in NAMES])
def test_wrongly_saved_state_is_refused(name: str, folder: Path) -> None:
    """A state saved the wrong way is refused.

    One slice where it is taken; what the unsharded program saves, and the stack of slices, where it is restored.
    """
    plain, sharded = program(name, False, folder), program(name, True, folder)
    state = sharded.to_devices(sharded.create_state())
    first: list[Any] = [lambda x: x[0], lambda x: np.asarray(x[0]), lambda x: x.addressable_shards[0].data[0]]
    taken: list[Any] = [jax_utils.unreplicate, *(functools.partial(jax.tree.map, one) for one in first)]
    for take in taken:
        with pytest.raises(ValueError, match=r"one device's slice .* zero\.to_host"):
            take(state.opt_state)
    with pytest.raises(ValueError, match=r"one device's slice|sharded already"):
        sharded.to_devices(plain.to_host(state))
    stack = jax.tree.map(np.asarray, state.opt_state)
    with pytest.raises(ValueError, match=r"expected the whole .*, without padding"):
        zero.to_devices(stack.slices, like=state.opt_state)


LOOPS = ("sam", "language_model")  # in which the most communicates


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in LOOPS else pytest.mark.wide) for name in NAMES]
)
@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])
def test_collectives_are_ordered(name: str, sharded: bool, folder: Path) -> None:
    """Collectives wait for loops that contain collectives.

    Else the program may hang on virtual CPU devices; docs/decisions/virtual-devices.md.
    """
    example = program(name, sharded, folder)
    jaxpr = jax.make_jaxpr(example.train_step)(example.to_devices(example.create_state()), *example.batch(0))
    assert unordered(jaxpr.jaxpr) == []


@pytest.mark.wide  # of the losses of that program, which are wide
def test_haiku_skips_overflows(folder: Path) -> None:
    """Steps that overflow are skipped in the Haiku program.

    Else its loss scaling would show nothing.
    """
    expected("haiku_mixed_precision", folder)
    plain = program("haiku_mixed_precision", False, folder)
    _, state = plain.train(10, folder / "haiku_mixed_precision.old", resume=True)
    assert int(state.step[0]) == 10 and 0 < int(state.opt_state[0].count[0]) < 10


def copy_for_two(name: str, folder: Path, to: Path) -> None:
    """The sharded program, and the checkpoint of the unsharded one after ten steps."""
    expected(name, folder)
    program(name, True, folder)
    old = folder / f"{name}.old"
    (shutil.copytree if old.is_dir() else shutil.copy)(old, to / f"{name}.two")
    if to != folder:
        shutil.copy(folder / f"{name}_sharded.py", to)


def check_two(name: str, folder: Path, found: list[float], path: Path) -> None:
    """Two processes have continued to step 20, and the unsharded program continues from there."""
    losses = expected(name, folder)
    np.testing.assert_allclose(found, losses[10:20], rtol=1e-6)
    resumed = program(name, False, folder).train(30, path, resume=True)[0]
    np.testing.assert_allclose(resumed, losses[20:], rtol=1e-6)


ORBAX = ("diffusion",)  # of all hosts
OTHERS = ("sam", "translation")  # scattered gradients; a flax TrainState


@pytest.mark.parametrize(
    "names", [pytest.param(ORBAX, marks=pytest.mark.wide), pytest.param(OTHERS, marks=pytest.mark.slow)]
)
def test_two_processes_resume(names: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    """Two processes resume from checkpoints of the unsharded programs and of their own, and write some."""
    for name in names:
        copy_for_two(name, folder, tmp_path)
    hosts.run_two(WORKER, tmp_path)
    for name in names:
        first, second = ((tmp_path / f"{name}.losses{process}").read_text() for process in range(2))
        assert first == second
        check_two(name, folder, [float(x) for x in first.split()], tmp_path / f"{name}.two")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_command_of_two_processes(name: str, folder: Path) -> None:
    """The same by the command line of each program."""
    copy_for_two(name, folder, folder)
    path = folder / f"{name}.two"
    env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    env |= {"XLA_FLAGS": "--xla_cpu_enable_concurrency_optimized_scheduler=false", "JAX_NUM_CPU_DEVICES": "4"}
    line: list[Any] = [sys.executable, folder / f"{name}_sharded.py", "--steps", "20", "--checkpoint", path, "--resume"]
    line += ["--processes", f"127.0.0.1:{hosts.free_port()}", "2"]
    first, second = hosts.run_together([[*map(str, line), str(process)] for process in range(2)], env)
    assert first.splitlines()[-1] == second.splitlines()[-1]
    check_two(name, folder, [float(x) for x in first.splitlines()[-1].split()], path)


def test_readmes_count_the_lines_that_change() -> None:
    """Blank ones aside."""
    text = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(\w+/train.py.* \| (\d+, \d+) \|$", text, re.MULTILINE)
    assert sorted(name for name, _ in rows) == NAMES
    for name, counted in rows:
        lines = (EXAMPLES / name / "sharded.diff").read_text().splitlines()[2:]
        removed, added = ([line for line in lines if line[0] == sign and line[1:].strip()] for sign in "-+")
        assert counted == f"{len(removed)}, {len(added)}", name
    front = EXAMPLES.parent.joinpath("README.md").read_text().partition("| lines removed, added |")[2]
    shown = re.findall(r"\| (\d+, \d+) \|$", front, re.MULTILINE)
    assert shown == [counted for _, counted in rows]
