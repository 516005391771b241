"""What mypy --strict says of a user's file: nothing of a right program, and of each wrong call what is wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
from typing import Any

import flax.linen as nn
import jax
import optax
import zero

tx = zero.shard_optimizer(optax.adamw(1e-3), axis_name="batch", reduction="mean")
layout: zero.Layout = zero.make_layout({"w": jax.numpy.ones((8, 3))}, shards=8)


def step(params: dict[str, jax.Array], opt_state: zero.ShardedState, loss: jax.Array) -> tuple[Any, zero.ShardedState]:
    grads = zero.local(params)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    tx.update(grads, opt_state, parameters=params)  # error: arg-type
    tx.update(grads, opt_state, params, value_fn=lambda p: loss)
    tx.update(grads, opt_state, params, value="loss")  # error: arg-type
    tx.update(grads)  # error: call-arg
    return updates, opt_state


def read(opt_state: zero.ShardedState) -> jax.Array:
    count: jax.Array = opt_state[0].count
    return count


def build(axis: zero.Axis) -> tuple[type[nn.Dense], nn.Dense]:
    zero.fully_shard("dense", layout, axis)  # error: type-var
    return zero.fully_shard(nn.Dense, layout, axis), zero.fully_shard(nn.Dense(3), layout, axis)


def save(state: Any) -> Any:
    zero.to_host(state, path="here")  # error: call-arg
    zero.make_layout(state, 8, tensor=2)  # error: call-arg
    zero.shard_optimizer(optax.sgd(0.1), axis="batch")  # error: call-arg
    zero.shard_optimizer(optax.sgd(0.1), "batch", reduction="median")  # error: arg-type
    zero.whole_state(state)  # error: attr-defined
    return zero.to_host(state), zero.__version__ + zero.groups.__name__
"""
SETTINGS = """
[mypy]
strict = true
[mypy-zero.*]
follow_imports = silent
[mypy-optax.*,flax.*]
ignore_missing_imports = true
"""


@pytest.mark.wide  # the types of jax take ten seconds
def test_strict_types_of_a_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "program.py"]
    env = {"MYPYPATH": str(REPOSITORY), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    found = re.findall(r"^program\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    lines = PROGRAM.splitlines()
    marked = [(str(number), line.split("# error: ")[1]) for number, line in enumerate(lines, 1) if "# error: " in line]
    assert [one for one in found if one in marked] == marked and len(found) == len(marked), done.stdout
