"""The structures of published programs, as they are and sharded: the same losses, and each reads the other's state."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.examples import patched

FOLDER = Path(__file__).parents[2] / "examples" / "structures"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SIX_REVERSED = "jax.devices()[:1:-1]"


def load(name: str, is_sharded: bool, folder: Path, optimizer: str = "") -> ModuleType:
    """The program, on six of eight devices in another order, with one of its optimizers."""
    path = folder / f"{name}{'_sharded' * is_sharded}.py"
    text = (FOLDER / f"{name}.py").read_text()
    if is_sharded:
        text = patched(text, (FOLDER / f"{name}.diff").read_text())
    assert "DEVICES = jax.devices()" in text
    text = text.replace("DEVICES = jax.devices()", f"DEVICES = {SIX_REVERSED}")
    path.write_text(re.sub(r'^NAME = "\w+"', f'NAME = "{optimizer}"', text, flags=re.MULTILINE))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(program: ModuleType, state: Any, steps: range) -> tuple[list[float], Any]:
    losses = []
    for step in steps:
        state, loss = program.train_step(state, program.batch(step))
        losses.append(float(loss[0]))
    return losses, state


def started(program: ModuleType, saved: Any = None) -> Any:
    """The first state on the devices, with the leaves that another program has saved."""
    if saved is None and hasattr(program, "first_state"):
        return program.first_state()
    state = program.create_state()
    if saved is not None:
        state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(saved))
    return program.to_devices(state)


SOME = ("nnx_model",)  # the others are trees of the same kinds
OPTIMIZERS = ("schedule_free", "dog", "prodigy", "muon")  # of the program with that name
NEW = (
    "alphazero",
    "clm_flax",
    "equinox_model",
    "flow_matching",
    "line_search",
    "nested_ppo",
    "optimizers",
    "td3",
)


def cases() -> list[Any]:
    each = [(name, "") for name in NAMES if name != "optimizers"] + [("optimizers", name) for name in OPTIMIZERS]
    return [pytest.param(*case, marks=() if case[0] in SOME else pytest.mark.wide) for case in each]


@pytest.mark.parametrize(("name", "optimizer"), cases())
def test_structure_equals_unsharded(name: str, optimizer: str, tmp_path: Path) -> None:
    plain, sharded = (load(name, is_sharded, tmp_path, optimizer) for is_sharded in (False, True))
    losses, state = train(plain, started(plain), range(3))
    found, slices = train(sharded, started(sharded), range(3))
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(found, losses, rtol=1e-6 if name in NEW else 1e-5)

    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(slices))
    assert held < 0.8 * sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    of_plain, of_sharded = plain.to_host(state), sharded.to_host(slices)
    pairs = zip(*map(jax.tree_util.tree_leaves_with_path, (of_plain, of_sharded)), strict=True)
    for (path, x), (other, y) in pairs:
        assert path == other and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=str(path))

    expected, _ = train(plain, state, range(3, 5))
    np.testing.assert_allclose(train(plain, started(plain, of_sharded), range(3, 5))[0], expected, rtol=1e-5)
    np.testing.assert_allclose(train(sharded, started(sharded, of_plain), range(3, 5))[0], expected, rtol=1e-5)


def test_readme_counts_the_lines_that_change() -> None:
    text = (FOLDER.parent / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\(structures/.* \| (\d+, \d+) \|$", text, re.MULTILINE)
    assert sorted(name for name, _ in rows) == NAMES
    for name, counted in rows:
        lines = (FOLDER / f"{name}.diff").read_text().splitlines()[2:]
        removed, added = ([line for line in lines if line[0] == sign and line[1:].strip()] for sign in "-+")
        assert counted == f"{len(removed)}, {len(added)}", name


def runs_of_changes(diff: str) -> list[tuple[int, int]]:
    """Lines removed and added by each uninterrupted run of changes, blank ones and imports aside."""
    runs = [(0, 0)]
    for line in diff.splitlines()[2:]:
        if line[:1] not in ("-", "+"):
            runs.append((0, 0))
        elif line[1:].strip() and not re.match("(import|from) ", line[1:]):
            removed, added = runs[-1]
            runs[-1] = (removed + (line[0] == "-"), added + (line[0] == "+"))
    return runs


def test_ports_before_and_now_are_counted() -> None:
    """The table of benchmarks/measured/porting.md has the lines of both ports."""
    text = (FOLDER.parents[1] / "benchmarks" / "measured" / "porting.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| ([\d.]+) \| (\d+, \d+) \| (\d+, \d+) \|", text, re.MULTILINE)
    assert [name for name, *_ in rows] == ["byol", "vdm", "sac", "mpo"]
    for name, *counted in rows:
        folders = (FOLDER.parents[1] / "docs" / "sources" / "ports-before", FOLDER)
        before, now = (runs_of_changes((folder / f"{name}.diff").read_text()) for folder in folders)
        lines = [sum(max(run) for run in runs) for runs in (before, now)]
        both = [f"{sum(run[0] for run in runs)}, {sum(run[1] for run in runs)}" for runs in (before, now)]
        assert counted == [str(lines[0]), str(lines[1]), f"{lines[1] / lines[0]:.2f}", *both], name
