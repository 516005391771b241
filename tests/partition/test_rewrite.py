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

MASK = np.random.default_rng(0).integers(0, 2, (13, 6)).astype(np.float32)
# 13 rows over eight devices: three rows of padding. exp(x) is 1 there and -exp(x) is -1, so that padding shows.
ELEMENTWISE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "arithmetic": lambda x: jnp.where(x > 0, jnp.exp(x), x * 3 - 1),
    "scalar operand": lambda x: x * jnp.sqrt(jnp.float32(x.size)),
    "broadcast along rows": lambda x: x * jnp.arange(6.0)[None],
    "broadcast along the split dimension": lambda x: x * jnp.arange(13.0)[:, None],
    "constant of the whole shape": lambda x: x * MASK,
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
}


def make_x() -> np.ndarray:
    x = np.random.default_rng(1).normal(size=(13, 6)).astype(np.float32)
    return np.where(np.abs(x) < 1e-3, 0.5, x)


def on_shards(fn: Callable[[jax.Array], jax.Array], axis: zero.Axis, across: bool) -> Callable[[jax.Array], jax.Array]:
    """The function by way of shards. Whole arrays in and out, inside pmap."""
    tx = optax.stateless(lambda updates, _: fn(updates))
    layout = zero.make_layout(make_x(), axis.shards)
    assert layout.leaves[0].splits[0].dim == 0 and layout.leaves[0].splits[0].padding
    sharded = zero.on_shards(zero.across_shards(tx) if across else tx, layout, axis)

    def run(x: jax.Array) -> jax.Array:
        shard = zero.shard(x, layout, axis)
        return zero.gather(sharded.update(shard, sharded.init(shard))[0], layout, axis)

    return run


@pytest.mark.parametrize(("across", "shape"), [(False, (1, 8)), (True, (1, 8)), (True, (2, 4))])
def test_equal_to_the_function_itself(across: bool, shape: tuple[int, ...]) -> None:
    functions = ACROSS if across else ELEMENTWISE
    axis = zero.Axis("batch", shape)
    runs = {name: on_shards(fn, axis, across) for name, fn in functions.items()}
    results = jax.pmap(lambda x: {name: run(x) for name, run in runs.items()}, "batch")(np.stack([make_x()] * 8))
    zero.check_replicated(results, "batch")
    for name, fn in functions.items():
        expected = np.asarray(fn(jnp.asarray(make_x())))
        atol = 1e-5 * np.max(np.abs(expected))
        np.testing.assert_allclose(results[name][0], expected, rtol=1e-5, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", ACROSS)
def test_refused_elsewhere(name: str) -> None:
    run = on_shards(ACROSS[name], zero.Axis("batch", (1, 8)), across=False)
    with pytest.raises(zero.NotElementwiseError, match=r"use zero\.across_shards"):
        jax.make_jaxpr(run, axis_env=[("batch", 8)])(make_x())


def test_loops_are_dealt_to_devices_that_own_them() -> None:
    """Sixteen matrices on eight devices: each device runs the loops of two of them, and no other."""
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
        jax.make_jaxpr(run, axis_env=[("batch", 8)])(jnp.zeros((2, 6)))
