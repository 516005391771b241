"""Joined dimensions of which the second is split: loops, factorizations and random programs on them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax

import zero
from tests.helpers.array_programs import newton_schulz
from tests.helpers.sharded_programs import Case, compare
from zero.partition.layout import LeafLayout, Split
from zero.partition.rewrite.joined import Joined

Function = Callable[[jax.Array], jax.Array]


def of_matrix(fn: Function) -> Function:
    """On all dimensions but the last one as one, of which the second is split."""
    return lambda x: fn(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def gram(x: jax.Array) -> jax.Array:
    return x @ x.T + jnp.eye(len(x))


KERNEL = (3, 16, 5)  # on eight devices 16 is split, on three devices 3, on five devices 5
FUNCTIONS: dict[str, tuple[Function, tuple[int, ...], int]] = {
    "qr": (of_matrix(lambda x: jnp.linalg.qr(x)[0]), KERNEL, 8),
    "svd": (of_matrix(lambda x: jnp.linalg.svd(x, full_matrices=False)[0]), KERNEL, 8),
    "cholesky": (of_matrix(lambda x: jnp.linalg.cholesky(gram(x)) @ x), KERNEL, 8),
    "cholesky of a square": (of_matrix(lambda x: jnp.linalg.cholesky(gram(x))), (3, 16, 48), 8),
    "triangular solve": (
        of_matrix(lambda x: lax.linalg.triangular_solve(jnp.tril(jnp.ones((5, 5))), x, lower=True)),
        KERNEL,
        8,
    ),
    "loop of products": (of_matrix(lambda x: newton_schulz(x, 3)), KERNEL, 8),
    "flat loop on three devices": (
        flat := of_matrix(lambda x: lax.fori_loop(0, 2, lambda _, y: jnp.cumsum(y, 0) / 9, x)),
        (2, 17, 1),
        3,
    ),
    "flat loop": (flat, (2, 17, 1), 5),
    "kernel of query, key and value": (of_matrix(lambda x: newton_schulz(x, 2)), (20, 3, 16), 3),
    "edges of an empty array": (lambda x: jnp.pad(x, ((1, 1), (0, 0), (0, 0)), mode="edge")[1:-1], KERNEL, 5),
    "no rows": (of_matrix(lambda x: x + jnp.sum(x[:0].reshape(-1))), KERNEL, 8),
    "one row": (of_matrix(lambda x: x + lax.squeeze(x[:1], (0,)) + jnp.broadcast_to(x[:1], x.shape)), KERNEL, 8),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_of_a_joined_dimension(name: str) -> None:
    """Equal to the function itself, to the last bit but for the order of sums."""
    fn, shape, devices = FUNCTIONS[name]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    tx = optax.stateless(lambda updates, _: fn(updates))
    sharded = zero.shard_optimizer(zero.across_shards(tx), "batch", reduction=None)

    @partial(jax.vmap, axis_name="batch", axis_size=devices, in_axes=None)
    def on_devices(x: jax.Array) -> jax.Array:
        return sharded.update(x, sharded.init(x), x)[0]

    with jax.numpy_rank_promotion("allow"):
        found, expected = jax.jit(on_devices)(x), jax.jit(fn)(x)
    np.testing.assert_allclose(found, np.stack([expected] * devices), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("devices", [pytest.param(3, marks=pytest.mark.slow), 8])
def test_muon_on_attention_kernels(devices: int) -> None:
    """As flax has them: twelve heads of four, of which eight devices split the fours and three devices the heads."""
    rng = np.random.default_rng(0)
    shapes = {"query": (20, 12, 4), "out": (12, 4, 20), "bias": (12, 4)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    numbers = optax.contrib.MuonDimensionNumbers
    tx = optax.contrib.muon(
        0.02, muon_weight_dimension_numbers={"query": numbers(0, (1, 2)), "out": numbers((0, 1), 2), "bias": None}
    )
    sharded = zero.shard_optimizer(zero.across_shards(tx), "batch", reduction=None)

    @partial(jax.vmap, axis_name="batch", axis_size=devices, in_axes=None)
    def on_devices(params: Any) -> Any:
        return sharded.update(params, sharded.init(params), params)[0]

    found, expected = jax.jit(on_devices)(params), jax.jit(lambda p: tx.update(p, tx.init(p), p)[0])(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, np.stack([y] * devices), atol=1e-5), found, expected)


def test_no_layout_holds_a_joined_split() -> None:
    """Its shard is not contiguous, so what computes with positions, sizes and padding cannot read it."""
    joined = Joined.of(Split(1, 16, 8), 3, 0)
    assert not isinstance(joined, Split)
    assert not {"size", "shard_size", "padding", "positions"} & set(dir(joined))
    leaf = LeafLayout((), (48, 5), np.dtype(np.float32), (joined,))  # type: ignore[arg-type]  # the mistake
    with pytest.raises(AttributeError, match="shard_size"):
        _ = leaf.shard_shape


@pytest.fixture
def float64() -> Iterator[None]:
    """Separates faults from rounding."""
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("part", [pytest.param(part, marks=pytest.mark.slow if part else ()) for part in range(16)])
def test_programs_that_first_join_dimensions(part: int) -> None:
    """Of 25 each by default, and of 40 each in all others; on three, five and eight devices."""
    cases = [
        Case(seed, joins=True, operations=3 if part == 0 else 5)
        for seed in range(40 * part, 40 * part + (40 if part else 25))
    ]
    assert compare(cases).wrong == []
    jax.clear_caches()
