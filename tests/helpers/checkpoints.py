"""Checkpoints of random arrays.

- `placed`, `save`, `restore`: the state of a small GPT (`CONFIG`), with `META` beside it.
- `small`, `save_small`, `restore_small`: two leaves.
- `make_state`, `assert_same`: a state of random arrays for a layout, and its comparison leaf by leaf.
- `leaves`: the arrays of a checkpoint of a run, by name.
- `run`: runs a Python program in the repository.
"""

import dataclasses
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zero
from zero.checkpoints.manager import Checkpoints
from zero.models.config import GPTConfig
from zero.training.optimizers.optimizer import adamw
from zero.training.sharded_gpt import ShardedGPT
from zero.training.step import state_layout

CONFIG = GPTConfig(embedding_dim=42, vocab_size=101, num_head=3, block_size=12, dropout=0.0, N=2, vocab_chunks=3)
META = {"cursor": {"batches": 7, "seed": 1}, "global_rows": 24, "config": {"seed": None, "names": ["é", "'"]}}


@cache
def placed(devices: int, stage: int, **changes: Any) -> tuple[zero.Layout, zero.Axis]:
    axis = zero.Axis("zero", (1, devices))
    model = ShardedGPT(dataclasses.replace(CONFIG, **changes), axis, stage)
    return state_layout(model, adamw(0.1, axes=model.axes)), axis


def make_state(layout: zero.Layout, axis: zero.Axis, seed: int = 0) -> Any:
    """Random whole arrays, padded with zeros and laid out as `zero.to_global` does."""
    rng = np.random.default_rng(seed)

    def one(leaf: zero.groups.LeafLayout, target: jax.ShapeDtypeStruct) -> jax.Array:
        padded = np.zeros(leaf.padded_shape, leaf.dtype)
        padded[tuple(slice(size) for size in leaf.shape)] = rng.normal(size=leaf.shape, scale=1e3).astype(leaf.dtype)
        return jax.device_put(padded, target.sharding)

    return layout.map(one, zero.global_shapes(layout, axis))


def save(directory: Path, *steps: int, devices: int = 8, stage: int = 3, keep: int = 3, **changes: Any) -> None:
    layout, axis = placed(devices, stage, **changes)
    with Checkpoints(directory, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(layout, axis, seed=step), layout, META)


def restore(directory: Path, step: int, devices: int = 8, stage: int = 3, **changes: Any) -> Any:
    with Checkpoints(directory, None) as checkpoints:
        return checkpoints.restore(step, *placed(devices, stage, **changes))


def assert_same(got: Any, expected: Any, layout: zero.Layout) -> None:
    for leaf, x, y in zip(layout.leaves, jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y, err_msg=leaf.name)
        assert x.sharding == y.sharding, leaf.name


def save_small(checkpoints: Checkpoints, step: int, **options: Any) -> None:
    layout, axis = small(8)
    checkpoints.save(step, make_state(layout, axis, seed=step), layout, {}, **options)


@cache
def small(devices: int) -> tuple[zero.Layout, zero.Axis]:
    tree = {"w": jax.ShapeDtypeStruct((40, 400), jnp.float32), "b": jax.ShapeDtypeStruct((7,), jnp.float32)}
    return zero.make_layout(tree, devices), zero.Axis("zero", (1, devices))


def leaves(run: Path, step: int, *prefixes: str) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint whose names start with one of the prefixes (by default all), whole."""
    with Checkpoints(run / "checkpoints", None) as checkpoints:
        names = [name for name in checkpoints.meta(step)["shapes"] if name.startswith(prefixes or ("",))]
        return {name: checkpoints.read(step, name) for name in names}


def run(program: str) -> str:
    """What a Python program prints; it runs in the repository."""
    here = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def restore_small(directory: Path, step: int) -> Any:
    with Checkpoints(directory, None) as checkpoints:
        return checkpoints.restore(step, *small(8))
