"""Arrays of awkward `SHAPES` (`make_whole`), and their shards (`make_shards`) as a pmap holds them on all `AXES`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero

SHAPES = {"w": (5, 24), "odd": (13, 3), "b": (9,), "scalar": (), "tiny": (2,)}
AXES = [
    zero.Axis("batch", (1, 8)),
    zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
    zero.Axis("batch", (2, 4)),
    zero.Axis("batch", (4, 2), (7, 6, 5, 4, 3, 2, 1, 0)),
    zero.Axis("batch", (1, 3)),
    zero.Axis("batch", (1, 1)),
]
# By default tests leave out one of two axes with copies, and one device.
LEFT_OUT: dict[tuple[int, ...], Any] = {(2, 4): pytest.mark.slow, (1, 1): pytest.mark.wide}
MOST_AXES = [pytest.param(axis, marks=LEFT_OUT.get(axis.shape, ())) for axis in AXES]


def make_whole() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def make_shards(layout: zero.Layout, axis: zero.Axis) -> dict[str, jax.Array]:
    whole = make_whole()
    return jax.pmap(lambda _: zero.shard(whole, layout, axis), "batch")(jnp.zeros(axis.size))
