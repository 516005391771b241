"""Joined collectives of many leaves: the same bits, and no more kernels to compile for more leaves."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import zero
from zero.partition.collectives import coalesced
from zero.partition.layout import make_layout

SHAPES = [(8,), (5, 3), (16, 24), (3, 7), (24,)]


def leaves_of(count: int, devices: int) -> dict[str, np.ndarray]:
    """A stack per leaf, a row for each device; every shape occurs again and again."""
    random = np.random.default_rng(0)
    return {
        f"leaf {i:04}": random.standard_normal((devices, *SHAPES[i % len(SHAPES)])).astype(np.float32)
        for i in range(count)
    }


def exchange(tree: Any, devices: int) -> Any:
    """A program that scatters a tree over devices, halves the shards, and gathers them."""
    layout = make_layout(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree), devices)

    def run(full: Any) -> tuple[Any, Any]:
        shards = zero.scatter_sum(full, layout, "batch")
        return shards, zero.gather(jax.tree.map(lambda x: x / 2, shards), layout, "batch")

    return jax.pmap(run, axis_name="batch", devices=jax.devices()[:devices])


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_many_leaves_have_the_same_bits(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns from a runtime index are those of a split."""
    tree = leaves_of(10, devices)
    results = []
    for many in (math.inf, 1):
        monkeypatch.setattr(coalesced, "MANY", many)
        results.append(exchange(tree, devices)(tree))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), *results)))


def kernels(count: int) -> int:
    """How many different kernels a program of so many leaves has."""
    tree = leaves_of(count, 8)
    text = exchange(tree, 8).lower(tree).compile().as_text()
    bodies = [
        part.split("\n", 1)[1] for part in text.split("\n\n") if re.match(r"%?\S*fused_computation", part.strip())
    ]
    return len({re.sub(r"%[\w.-]+|, metadata=.*", "", body) for body in bodies})


@pytest.mark.slow
def test_kernels_do_not_grow_with_leaves() -> None:
    """XLA for CPU compiles equal kernels once: those of many leaves of a few shapes are equal."""
    few = kernels(coalesced.MANY)
    assert few == kernels(2 * coalesced.MANY)


def test_columns_are_no_arguments() -> None:
    """Numbers of columns are in the program: XLA compares each of its arguments with all others."""
    tree = leaves_of(coalesced.MANY, 8)
    [arguments] = re.findall(r"sdy.manual_computation\((.*?)\)", exchange(tree, 8).lower(tree).as_text())
    assert arguments.count("%") == len(tree)


def test_joining_costs_the_same_for_each_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The elements of a joined array are added up once, not again for every leaf that joins it."""
    tree = {f"{i:04}": jnp.zeros((8,)) for i in range(1000)}
    layout = make_layout(tree, 8)
    products = []
    prod = math.prod

    def counted(shape: Any) -> int:
        products.append(shape)
        return prod(shape)

    monkeypatch.setattr(coalesced.math, "prod", counted)
    groups = list(coalesced._coalesce(list(tree.values()), layout.leaves, is_quantized=False))
    assert len(groups) == 1 and len(products) <= 2 * len(tree)


def test_other_platforms_get_constants() -> None:
    """Elsewhere than on CPU the columns are slices: no compiler has to prove anything."""
    rows = jnp.zeros((8, 30))

    def columns(rows: jax.Array) -> jax.Array:
        zero_there = lax.platform_dependent(lax.axis_index("batch"), tpu=lambda i: i, default=jnp.zeros_like)
        return coalesced._columns_from(rows, 10, jnp.broadcast_to(zero_there, (3,)), 5)

    text = jax.pmap(columns, axis_name="batch").lower(jnp.stack([rows] * 8)).compile().as_text()
    assert "dynamic-slice" not in text and "slice=" in text
