"""Random programs on shards, through a real pmap: bit for bit what they are on whole arrays, or refused.

All numbers are small multiples of a quarter, so that every sum is exact, in whatever order it is made.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zero

SHAPES = {"a": (13, 6), "b": (6, 13), "c": (13,), "d": (6, 6), "e": (2, 3, 9), "s": ()}
AXES = {
    "three": zero.Axis("batch", (1, 3)),
    "eight": zero.Axis("batch", (1, 8)),
    "hybrid": zero.Axis("batch", (2, 4)),
    "phases of a hybrid": zero.Axis("batch", (2, 2, 2), (0, 4, 1, 5, 2, 6, 3, 7)),
}


def make_tree() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: (rng.integers(-8, 9, shape) / 4).astype(np.float32) for name, shape in SHAPES.items()}


def on_grid(x: jax.Array) -> jax.Array:
    return jnp.clip(jnp.round(x.astype(jnp.float32) * 4) / 4, -4, 4)


def loop(v: jax.Array, body: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return lax.fori_loop(0, 2, lambda _, y: on_grid(body(y)), v)


# Of an array, a dimension and a number below 100.
UNARY: dict[str, Callable[[jax.Array, int, int], Any]] = {
    "halve": lambda v, dim, n: v / 2 + n / 100,
    "where": lambda v, dim, n: jnp.where(v > 0, v, 0.0),
    "nan_to_num": lambda v, dim, n: jnp.nan_to_num(v),
    "power": lambda v, dim, n: v**2 - 1,
    "relu": lambda v, dim, n: jax.nn.relu(v),
    "remat": lambda v, dim, n: jax.checkpoint(lambda y: y * y)(v),
    "bits": lambda v, dim, n: lax.bitcast_convert_type(lax.bitcast_convert_type(v, jnp.int16) + 0, jnp.float32),
    "barrier": lambda v, dim, n: lax.optimization_barrier((v, v * 2))[1],
    "roll": lambda v, dim, n: jnp.roll(v, n, dim),
    "flip": lambda v, dim, n: jnp.flip(v, dim),
    "sort": lambda v, dim, n: jnp.sort(v, dim),
    "cumsum": lambda v, dim, n: jnp.cumsum(v, dim),
    "cummax": lambda v, dim, n: lax.cummax(v, dim),
    "transpose": lambda v, dim, n: jnp.moveaxis(v, dim, 0),
    "expand": lambda v, dim, n: jnp.expand_dims(v, dim),
    "sum": lambda v, dim, n: jnp.sum(v, dim),
    "mean": lambda v, dim, n: jnp.mean(v, dim, keepdims=True),
    "max": lambda v, dim, n: jnp.max(v, dim, keepdims=bool(n % 2)),
    "min": lambda v, dim, n: jnp.min(v, keepdims=bool(n % 2)),
    "any": lambda v, dim, n: jnp.any(v > 1, dim, keepdims=True),
    "all": lambda v, dim, n: jnp.all(v > -2, dim),
    "xor": lambda v, dim, n: lax.reduce((v * 4).astype(jnp.int32), jnp.int32(0), lax.bitwise_xor, (dim,)),
    "argmax": lambda v, dim, n: jnp.argmax(v, dim),
    "tile": lambda v, dim, n: jnp.tile(v, [1 + (d == dim) for d in range(v.ndim)]),
    "pad": lambda v, dim, n: jnp.pad(v, [(d == dim, 0) for d in range(v.ndim)]),
    "concatenate": lambda v, dim, n: jnp.concatenate([v, v + 1], dim),
    "stack": lambda v, dim, n: jnp.stack([v, v + 1], dim),
    "split": lambda v, dim, n: jnp.split(v, [1], dim)[0],
    "slice": lambda v, dim, n: lax.slice_in_dim(v, n % 2, None, 1, dim),
    "dynamic slice": lambda v, dim, n: lax.dynamic_slice_in_dim(v, n % 2, max(1, v.shape[dim] - 1), dim),
    "update": lambda v, dim, n: lax.dynamic_update_slice_in_dim(v, lax.slice_in_dim(v, 0, 1, 1, dim) + 1, n, dim),
    "take": lambda v, dim, n: jnp.take(v, jnp.array([0, n % v.shape[dim]]), dim),
    "flatten": lambda v, dim, n: v.reshape(-1),
    "fold": lambda v, dim, n: v.reshape(*v.shape[:dim], -1, *v.shape[dim + 2 :]),
    "square": lambda v, dim, n: jnp.einsum("...i,...j->ij", v, v),
    "gram": lambda v, dim, n: jnp.einsum("i...,j...->ij", v, v),
    "batched": lambda v, dim, n: jnp.einsum("i...,i...->i", v, v),
    "outer": lambda v, dim, n: jnp.expand_dims(v.reshape(-1)[:13], 0) * jnp.expand_dims(v.reshape(-1)[:13], 1),
    "loop": lambda v, dim, n: loop(v, lambda y: y * 2 - v),
    "loop across": lambda v, dim, n: loop(v, lambda y: y - jnp.max(y, dim, keepdims=True)),
    "stacking loop": lambda v, dim, n: lax.scan(lambda y, k: (on_grid(y + k), y), v, jnp.arange(2.0))[1],
    "loop over rows": lambda v, dim, n: lax.scan(lambda s, row: (s, on_grid(row * 2)), 0.0, v)[1],
    "while": lambda v, dim, n: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, on_grid(c[1] * 2)), (0, v))[1],
    "branch": lambda v, dim, n: lax.cond(n % 2 == 0, lambda y: y + 1, jnp.zeros_like, v),
    "branch across": lambda v, dim, n: lax.cond(jnp.sum(v) > 0, lambda y: y - 1, lambda y: y + jnp.min(y), v),
}
BINARY: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
    jnp.add,
    jnp.subtract,
    jnp.multiply,
    jnp.minimum,
    lambda v, w: jnp.where(v > w, v, w * 2),
]


def program(tree: dict[str, jax.Array], seed: int, names: list[str], operations: int) -> dict[str, jax.Array]:
    """A function that the seed makes up: each leaf of the result is a sum of values of its shape."""
    rng = np.random.default_rng(seed)
    values = list(tree.values())
    for _ in range(operations):
        v = values[rng.integers(len(values))]
        partners = [w for w in values if w.ndim == v.ndim and _fit(v.shape, w.shape)]
        if v.ndim == 0 or rng.random() < 0.4:
            new = BINARY[rng.integers(len(BINARY))](v, partners[rng.integers(len(partners))])
        else:
            new = UNARY[names[rng.integers(len(names))]](v, int(rng.integers(v.ndim)), int(rng.integers(100)))
        if 0 < new.size < 400 and new.ndim < 5:
            values.append(on_grid(new))
    return {name: on_grid(sum(v for v in values if v.shape == x.shape)) for name, x in tree.items()}  # type: ignore[arg-type]


def _fit(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(left, right, strict=True))


def on_shards(tree: Any, seed: int, names: list[str], axis: zero.Axis, across: bool) -> Any:
    """The same on shards; None where it is refused."""
    tx: Any = optax.stateless(lambda updates, _: program(updates, seed, names, 8 if across else 5))
    layout = zero.make_layout(tree, axis.shards)
    sharded = zero.on_shards(zero.across_shards(tx) if across else tx, layout, axis)
    shards = zero.shard(tree, layout, axis)
    try:
        return zero.gather(sharded.update(shards, sharded.init(shards))[0], layout, axis)
    except zero.NotElementwiseError:
        assert not across
        return None


def check(seeds: range, axis: zero.Axis, across: bool) -> int:
    """Compares programs, all in one pmap; returns how many, which are those that are not refused."""
    # Unmarked, a program of many kinds of operations is all but surely refused.
    kinds = None if across else 12
    names = {seed: list(np.random.default_rng(seed).permutation(list(UNARY))[:kinds]) for seed in seeds}
    tree = make_tree()
    expected = jax.jit(lambda tree: {seed: program(tree, seed, names[seed], 8 if across else 5) for seed in seeds})(
        tree
    )

    def run(tree: Any) -> Any:
        results = {seed: on_shards(tree, seed, names[seed], axis, across) for seed in seeds}
        return {seed: result for seed, result in results.items() if result is not None}

    got = jax.pmap(run, "batch")(jax.tree.map(lambda x: np.stack([x] * axis.size), tree))
    zero.check_replicated(got, "batch")
    for seed, result in got.items():
        for name, x in result.items():
            np.testing.assert_array_equal(x[0], expected[seed][name], err_msg=f"seed {seed}, leaf {name}")
    return len(got)


FAST = [
    pytest.param("three", False, 0, 20, marks=pytest.mark.wide),
    pytest.param("three", True, 1, 20, marks=pytest.mark.slow),
    pytest.param("eight", True, 2, 20, marks=pytest.mark.wide),
    ("hybrid", True, 3, 10),
    pytest.param("hybrid", True, 3, 20, marks=pytest.mark.wide),
    pytest.param("eight", False, 4, 20, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("axis", "across", "part", "count"), FAST)
def test_a_hundred_programs(axis: str, across: bool, part: int, count: int) -> None:
    compared = check(range(20 * part, 20 * part + count), AXES[axis], across)
    assert compared == count if across else 5 <= compared < 20


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
@pytest.mark.parametrize("axis", AXES)
def test_a_thousand_programs_that_communicate(axis: str, part: int) -> None:
    first = 1000 + 32 * 16 * list(AXES).index(axis) + 16 * (2 * part + 1)
    assert check(range(first, first + 16), AXES[axis], across=True) == 16
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("axis", AXES)
def test_unmarked_programs(axis: str, part: int) -> None:
    """Most are refused, which only takes tracing: so there are 2,560, of which 777 are compared with jax 0.10."""
    first = 10_000 + 80 * (8 * list(AXES).index(axis) + part)
    assert check(range(first, first + 80), AXES[axis], across=False) >= 12
    jax.clear_caches()
