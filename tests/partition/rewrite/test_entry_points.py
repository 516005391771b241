"""Each rule by which a function of whole arrays is carried out on padded shards, against the function itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zero

rounded = jax.custom_vjp(lambda x: jnp.round(x))
rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))  # a straight-through estimator


def positions_in_a_loop(x: jax.Array, row: jax.Array) -> jax.Array:
    return row * 2 * lax.fori_loop(0, 3, lambda _, y: y * 0.5 + row * 2, x)


MASK = np.random.default_rng(0).integers(0, 2, (13, 6)).astype(np.float32)
# 13 rows over eight devices: three rows of padding. exp(x) is 1 there and -exp(x) is -1, so that padding shows.
ELEMENTWISE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "arithmetic": lambda x: jnp.where(x > 0, jnp.exp(x), x * 3 - 1),
    "scalar operand": lambda x: x * jnp.sqrt(jnp.float32(x.size)),
    "broadcast along rows": lambda x: x * jnp.arange(6.0)[None],
    "broadcast along the split dimension": lambda x: x * jnp.arange(13.0)[:, None],
    "constant of the whole shape": lambda x: x * MASK,
    "positions": lambda x: x * jnp.sin(sum(lax.broadcasted_iota(jnp.float32, x.shape, d) * 10**d for d in range(2))),
    "positions inside a loop and after it": lambda x: positions_in_a_loop(
        x, lax.broadcasted_iota(jnp.float32, (13, 6), 0)
    ),
    "size decides": lambda x: x if x.size > 70 else -x,
    "reduction of other dimensions": lambda x: x * jnp.sum(jnp.exp(x), axis=1, keepdims=True),
    "product over other dimensions": lambda x: (
        x @ jnp.arange(36.0).reshape(6, 6) + (jnp.arange(36.0).reshape(6, 6) @ x.T).T
    ),
    "transpose and back": lambda x: (x.T * jnp.arange(6.0)[:, None]).T,
    "reshape of other dimensions": lambda x: (x.reshape(13, 2, 3) + x.reshape(13, 1, 6)[:, :, :3]).reshape(13, 6),
    "slice and concatenation of other dimensions": lambda x: jnp.concatenate(
        [x[:, 3:], jnp.zeros((13, 1)), x[:, 1:3]], 1
    ),
    "squeeze": lambda x: jnp.squeeze(x[:, :1], 1)[:, None] * x,
    "branches, one of them whole": lambda x: lax.cond(jnp.float32(x.size) > 3, jnp.exp, jnp.zeros_like, x),
    "cast": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "where with a number": lambda x: jnp.where(x > 0, x, 0.0),
    "nan_to_num": lambda x: jnp.nan_to_num(x),
    "stack of other dimensions": lambda x: jnp.stack([x, jnp.exp(x)], 1)[:, 1],
    "split of other dimensions": lambda x: jnp.concatenate(jnp.split(x, 2, 1)[::-1], 1),
    "tile of other dimensions": lambda x: jnp.tile(x, (1, 2))[:, 3:9],
    "pad of other dimensions": lambda x: jnp.pad(x, ((0, 0), (2, 1)))[:, 1:7],
    "reversal of other dimensions": lambda x: jnp.flip(x, 1),
    "sort of other dimensions": lambda x: jnp.sort(jnp.exp(x), 1),
    "argmax of other dimensions": lambda x: x * jnp.argmax(x, 1)[:, None].astype(jnp.float32),
    "cumsum of other dimensions": lambda x: jnp.cumsum(x, 1),
    "top_k of other dimensions": lambda x: x * lax.top_k(x, 2)[0][:, 1:],
    "dynamic slice of other dimensions": lambda x: x * lax.dynamic_slice(x, (7, 2), (13, 1)),
    "dynamic update of other dimensions": lambda x: lax.dynamic_update_slice(x, jnp.exp(x[:, :2]), (7, 3)),
    "bit cast": lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) ^ 1, jnp.float32),
    "bit cast to halves": lambda x: lax.bitcast_convert_type(
        jnp.flip(lax.bitcast_convert_type(x, jnp.int16), 1), jnp.float32
    ),
    "remat": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, y: y * jnp.tanh(y) + i, x),
    "loop whose carry becomes split": lambda x: lax.fori_loop(0, 3, lambda _, y: y + x, jnp.ones((13, 6))),
    "scan with results": lambda x: lax.scan(lambda c, k: (c * k, c - k), x, jnp.arange(3.0))[1].sum(0),
    "scan over other dimensions": lambda x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(13), x.T)[1].T,
    "loop with a condition": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.exp(-c[1])), (0, x))[
        1
    ],
    "product batched over the split dimension": lambda x: jnp.einsum("ij,ijk->ik", x, x[:, :, None] * x[:, None, :]),
    "product with a whole batch": lambda x: jnp.einsum("ij,ij->i", x, jnp.asarray(MASK))[:, None] * x,
    "derivative of its own": lambda x: jax.nn.relu(x) + rounded(x),
    "barrier": lambda x: lax.optimization_barrier((x, jnp.exp(x)))[1],
}
ACROSS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sum": lambda x: x * jnp.sum(jnp.exp(x)),
    "mean of rows": lambda x: x - jnp.mean(jnp.exp(x), axis=0, keepdims=True),
    "max": lambda x: x * jnp.max(-jnp.exp(x)),
    "min": lambda x: x * jnp.min(jnp.exp(x) + 2, axis=0, keepdims=True),
    "all": lambda x: x * jnp.all(jnp.exp(x) != 1).astype(jnp.float32),
    "any": lambda x: x * (1 + jnp.any(jnp.exp(x) == 1).astype(jnp.float32)),
    "integer max": lambda x: x * jnp.max(-1 - jnp.abs(jnp.round(x)).astype(jnp.int32)).astype(jnp.float32),
    "product over the split dimension": lambda x: x @ (jnp.exp(x).T @ jnp.exp(x)),
    "product with a whole array": lambda x: x * (jnp.arange(13.0) @ jnp.exp(x))[None],
    "whole array first": lambda x: x * (jnp.exp(x).T @ jnp.arange(13.0))[None],
    "outer product": lambda x: (x @ x.T) @ x,
    "flattened": lambda x: jnp.cumsum(x.reshape(-1)).reshape(13, 6),
    "concatenation of parts of other sizes": lambda x: jnp.concatenate([jnp.exp(x), x[:3], jnp.ones((1, 6))], 0)[3:16],
    "sorted": lambda x: jnp.sort(x, axis=0),
    "reversed": lambda x: x[::-1],
    "two splits": lambda x: x + jnp.resize(x.T, (13, 6)),
    "loop": lambda x: lax.fori_loop(0, 3, lambda _, y: y * jnp.tanh(jnp.sum(y)), x),
    "loop with a condition": lambda x: jnp.where(
        lax.while_loop(lambda c: ~c[1], lambda c: (c[0] + 1, jnp.sum(c[0]) > 9), (x, jnp.array(False)))[1], x, -x
    ),
    "factorisation": lambda x: jnp.linalg.qr(x)[0],
    "branch on a norm": lambda x: lax.cond(jnp.sum(jnp.exp(x)) > 5, lambda y: y - jnp.mean(jnp.exp(y)), jnp.exp, x),
    "random numbers": lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
    "mean along another dimension": lambda x: (gram(x) - jnp.mean(gram(x), 1)[None]) @ x,
    "outer product of one vector": lambda x: (jnp.sum(x, 1)[:, None] * jnp.sum(x, 1)[None]) @ x,
    "rows and columns": lambda x: (gram(x) / (jnp.sum(gram(x), 1)[:, None] * jnp.sum(gram(x), 1)[None])) @ x,
    "maximum with a NaN": lambda x: jnp.where(jnp.isfinite(jnp.max(jnp.sqrt(x + 2))), x, 0.0),
    "minimum with a NaN": lambda x: jnp.where(jnp.isfinite(jnp.min(jnp.sqrt(x + 2), 0, keepdims=True)), x, 0.0),
    "bitwise and": lambda x: x * lax.reduce(integers(x) | 6, jnp.int32(-1), lax.bitwise_and, (0,))[None],
    "bitwise or": lambda x: x * lax.reduce(integers(x) & 6, jnp.int32(0), lax.bitwise_or, (0, 1)),
    "bitwise xor": lambda x: x * lax.reduce(integers(x), jnp.int32(0), lax.bitwise_xor, (0,))[None],
    "sum of large integers": lambda x: x * (jnp.sum(integers(x) + 2**24) >> 20),
    "sum of large narrow floats": lambda x: (
        x * lax.reduce(jnp.full((13, 6), 800, jnp.float16) + 0 * x.astype(jnp.float16), jnp.float16(0), lax.add, (0, 1))
    ),
    "product": lambda x: x * jnp.prod(1 + x / 99, axis=0, keepdims=True),
    "argmax": lambda x: x * jnp.argmax(x, 0)[None].astype(jnp.float32),
    "maximum of booleans": lambda x: x * (1 + jnp.max(x > 1, 0, keepdims=True)),
}


def gram(x: jax.Array) -> jax.Array:
    return jnp.exp(x) @ jnp.exp(x).T


def integers(x: jax.Array) -> jax.Array:
    return jnp.round(x * 9).astype(jnp.int32)


def make_x() -> np.ndarray:
    x = np.random.default_rng(1).normal(size=(13, 6)).astype(np.float32)
    return np.where(np.abs(x) < 1e-3, 0.5, x)


def on_shards(fn: Callable[[jax.Array], jax.Array], axis: zero.Axis, across: bool) -> Callable[[jax.Array], jax.Array]:
    """The function on shards. Whole arrays in and out, inside pmap."""
    tx = optax.stateless(lambda updates, _: fn(updates))
    rows = zero.groups.Split(0, 13, axis.shards)
    leaf = zero.groups.LeafLayout((), (13, 6), np.dtype(np.float32), (rows,) if axis.shards > 1 else ())
    layout = zero.Layout(jax.tree.structure(0), (leaf,), axis.shards)
    sharded = zero.on_shards(zero.across_shards(tx) if across else tx, layout, axis)

    def run(x: jax.Array) -> jax.Array:
        shard = zero.shard(x, layout, axis)
        return zero.gather(sharded.update(shard, sharded.init(shard))[0], layout, axis)

    return run


@pytest.mark.parametrize(
    ("shape", "across"),
    [
        ((1, 3), False),
        pytest.param((2, 4), True, marks=pytest.mark.wide),
        *(pytest.param(shape, False, marks=pytest.mark.slow) for shape in ((1, 1), (1, 8), (2, 4))),
        *(pytest.param(shape, True, marks=pytest.mark.slow) for shape in ((1, 1), (1, 3), (1, 8))),
    ],
)
def test_equal_to_the_function_itself(shape: tuple[int, ...], across: bool) -> None:
    functions = ACROSS if across else ELEMENTWISE
    axis = zero.Axis("batch", shape)
    runs = {name: on_shards(fn, axis, across) for name, fn in functions.items()}
    results = jax.pmap(lambda x: {name: run(x) for name, run in runs.items()}, "batch")(
        np.stack([make_x()] * axis.size)
    )
    zero.check_replicated(results, "batch")
    for name, fn in functions.items():
        expected = np.asarray(fn(jnp.asarray(make_x())))
        atol = 1e-5 * np.nanmax(np.abs(expected))
        np.testing.assert_allclose(results[name][0], expected, rtol=1e-5, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", ACROSS)
def test_refused_elsewhere(name: str) -> None:
    run = on_shards(ACROSS[name], zero.Axis("batch", (1, 8)), across=False)
    with pytest.raises(zero.NotElementwiseError, match=r"use zero\.across_shards"):
        jax.pmap(run, "batch").lower(np.stack([make_x()] * 8))


def test_loops_run_on_owners() -> None:
    """Loops over matrices are divided among the devices.

    Sixteen matrices on eight devices: each device runs the loops of two of them, and no other.
    """
    ran: list[int] = []

    def body(y: jax.Array, _: None) -> tuple[jax.Array, None]:
        jax.debug.callback(lambda device: ran.append(int(device)), lax.axis_index("batch"))
        return y @ (y.T @ y), None

    params = {f"{i:02}": np.full((4, 4), i, np.float32) for i in range(16)}
    layout = zero.make_layout(params, 8)
    tx = optax.stateless(lambda updates, _: jax.tree.map(lambda x: lax.scan(body, x, length=1)[0], updates))
    sharded = zero.on_shards(zero.across_shards(tx), layout, "batch")

    def run(_: jax.Array) -> Any:
        shards = zero.shard(params, layout, "batch")
        return sharded.update(shards, sharded.init(shards))[0]

    jax.block_until_ready(jax.pmap(run, "batch")(np.arange(8)))
    jax.effects_barrier()
    assert sorted(ran) == sorted([*range(8)] * 2)


def test_a_region_ends_where_it_ends() -> None:
    """Leave to communicate is not inherited by the next transform of a chain."""
    layout = zero.make_layout(make_x(), 8)
    centralize = partial(optax.stateless, lambda updates, _: updates - jnp.mean(updates))
    tx = zero.on_shards(optax.chain(zero.across_shards(centralize()), centralize()), layout, "batch")

    def run(x: Any) -> Any:
        return tx.update(x, tx.init(x))[0]

    with pytest.raises(zero.NotElementwiseError):
        jax.pmap(run, "batch").lower(jnp.zeros((8, 2, 6)))


@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
def test_loop_with_collective(shape: tuple[int, ...]) -> None:
    """A loop with a collective inside runs on all devices.

    On its owner alone it would wait for the others for ever.
    """

    def fn(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, y: lax.pmean(y, "batch") * jnp.tanh(jnp.sum(y)), x)

    got = jax.pmap(on_shards(fn, zero.Axis("batch", shape), across=True), "batch")(np.stack([make_x()] * 8))
    expected = jax.pmap(fn, "batch")(make_x()[None])
    np.testing.assert_allclose(got[3], expected[0], rtol=1e-5)


@pytest.mark.parametrize("how", [{"sums_copies": False}, {"copies_dtype": "bfloat16"}])
def test_loop_reaches_all_copies(how: Any) -> None:
    """The owner's result reaches the other copy unrounded, however gradients are summed over copies."""

    def fn(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, y: jnp.cumsum(y, 0)[::-1] * jnp.tanh(x), x)

    x = make_x()
    got = jax.pmap(on_shards(fn, zero.Axis("batch", (2, 4), **how), across=True), "batch")(np.stack([x] * 8))
    for copy in (got[3], got[7]):
        np.testing.assert_allclose(copy, fn(jnp.asarray(x)), rtol=1e-5)


def test_loop_with_random_key() -> None:
    """A loop that carries a key runs on all devices."""

    def fn(x: jax.Array) -> jax.Array:
        keys = lax.fori_loop(0, 3, lambda i, c: (jax.random.fold_in(c[0], i), jnp.cumsum(c[1])[::-1]), (KEY, x[:, 0]))
        return x * jax.random.uniform(keys[0]) + keys[1][:, None]

    KEY = jax.random.key(0)
    got = jax.pmap(on_shards(fn, zero.Axis("batch", (1, 8)), across=True), "batch")(np.stack([make_x()] * 8))
    np.testing.assert_allclose(got[3], fn(jnp.asarray(make_x())), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (1, 8), (2, 4)])
def test_custom_derivative_is_kept(shape: tuple[int, ...]) -> None:
    """A custom derivative is kept.

    Of a loss of the update with respect to the gradients and to a number that they are multiplied with.
    """

    @jax.custom_jvp
    def sign(x: jax.Array) -> jax.Array:
        return jnp.sign(x)

    @sign.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return sign(*primals), tangents[0] * jnp.mean(primals[0], 1, keepdims=True)

    def fn(x: jax.Array) -> jax.Array:
        return rounded(x * 3) * jnp.exp(x) + sign(x) * x + jax.nn.relu(jnp.round(x)) * 2

    def loss(fn: Any, x: jax.Array, rate: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(fn(x * rate)))

    axis = zero.Axis("batch", shape)
    run = on_shards(fn, axis, across=False)
    x = make_x()
    expected = jax.grad(partial(loss, fn), argnums=(0, 1))(jnp.asarray(x), jnp.float32(1.1))
    got = jax.pmap(
        lambda x: lax.pmean(jax.grad(partial(loss, run), argnums=(0, 1))(x, jnp.float32(1.1)), "batch"), "batch"
    )(np.stack([x] * axis.size))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a[0], b, rtol=2e-5, atol=1e-4)


def test_forward_mode_of_custom_derivative() -> None:
    """Forward mode works through a custom derivative."""
    x = make_x()
    run = on_shards(lambda x: jax.nn.relu(jnp.round(x)) * x, zero.Axis("batch", (1, 8)), across=False)
    got = jax.pmap(lambda x: jax.jvp(run, (x,), (x,))[1], "batch")(np.stack([x] * 8))
    expected = jax.jvp(lambda x: jax.nn.relu(jnp.round(x)) * x, (jnp.asarray(x),), (jnp.asarray(x),))[1]
    np.testing.assert_allclose(got[0], expected, rtol=1e-6)
