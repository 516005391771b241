"""Trees and dtypes that the wrapped optimizer accepts: any that optax does."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze

import zero
from tests.partition.exact_training import assert_close, local_grads, lower, make_params, replicate


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "make",
    [
        lambda w: {},
        lambda w: w,
        lambda w: Point(w, [w[0], (w[:, 0], {"deep": w})]),
        lambda w: {"mu": w, "nu": {"mu": w[0], "w": w}},
        lambda w: {"half": w.astype(jnp.bfloat16), "whole": w, "complex": w + 1j * w},
        lambda w: {"none": jnp.zeros((0, 3)), "w": w},
        pytest.param(
            lambda w: eqx.filter(eqx.nn.MLP(13, 24, 7, 2, key=jax.random.key(0)), eqx.is_array), marks=pytest.mark.wide
        ),
        lambda w: nnx.state(nnx.Linear(13, 24, rngs=nnx.Rngs(0))),
    ],
    ids=["empty", "array", "nested", "names of the state", "dtypes", "no elements", "Equinox", "NNX"],
)
def test_any_tree(make: Callable[[Any], Any]) -> None:
    params = make(jnp.arange(13.0 * 24).reshape(13, 24) / 64)
    tx = optax.adamw(0.1)
    sharded = zero.shard_optimizer(tx, "batch")

    def run(tx: Any, mark: Callable[[Any], Any] = lambda g: g) -> Any:
        def steps(params: Any) -> Any:
            state = tx.init(params)
            for _ in range(2):
                updates, state = tx.update(mark(params), state, params)
                params = optax.apply_updates(params, updates)
            return params

        return steps

    got = (
        jax.pmap(run(sharded, zero.local), "batch", axis_size=8)(replicate(params))
        if jax.tree.leaves(params)
        else params
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(run(tx))(params)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x[0], np.complex64), np.asarray(y, np.complex64), rtol=2e-6, atol=1e-7)


def test_empty_tree() -> None:
    tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    updates, _ = jax.pmap(lambda _: tx.update({}, tx.init({}), {}), "batch")(jnp.zeros(8))
    assert updates == {}


@pytest.mark.parametrize("tx", [optax.sgd(0.5, momentum=0.5), optax.sgd(0.5)])
def test_gradients_may_be_none(tx: Any) -> None:
    params, grads = make_params(), {**local_grads(0), "w": None}
    mean = jax.tree.map(lambda g: jnp.mean(g, 0), grads)
    expected = tx.update(mean, tx.update(mean, tx.init(params), params)[1], params)[0]
    sharded = zero.shard_optimizer(tx, "batch")

    def run(grads: Any, params: Any) -> Any:
        state = sharded.update(zero.local(grads), sharded.init(params), params)[1]
        return sharded.update(zero.local(grads), state, params)[0]

    got = jax.pmap(run, "batch")(grads, replicate(params))
    assert got["w"] is None
    assert_close(got, expected)


def test_trees_that_differ_as_optax_allows() -> None:
    """Parameters in a FrozenDict beside gradients in a dict; pairs of parameters beside gradients of one of them."""
    params, grads = make_params(), local_grads(0)
    mean = jax.tree.map(lambda g: jnp.mean(g, 0), grads)
    sgd, lookahead = optax.sgd(0.5, momentum=0.5), optax.lookahead(optax.sgd(0.5), 1, 0.5)
    pair = optax.LookaheadParams.init_synced(params)
    moved = optax.LookaheadParams(params, jax.tree.map(lambda p: p + 1, params))
    sharded = {name: zero.shard_optimizer(tx, "batch") for name, tx in {"sgd": sgd, "lookahead": lookahead}.items()}

    def run(grads: Any, params: Any, moved: Any) -> Any:
        first = sharded["sgd"].update(zero.local(grads), sharded["sgd"].init(params), freeze(params))[0]
        return first, sharded["lookahead"].update(zero.local(grads), sharded["lookahead"].init(moved), moved)[0]

    got = jax.pmap(run, "batch")(grads, replicate(params), replicate(moved))
    assert_close(got[0], sgd.update(mean, sgd.init(params))[0])
    assert_close(got[1], lookahead.update(mean, lookahead.init(pair), moved)[0])


def test_complex_and_integer_leaves() -> None:
    """On a narrow wire as well: only floats are rounded."""
    local = {"c": np.arange(8)[:, None] + 1j * np.arange(9)[None], "n": np.arange(8)[:, None] * 1000 + np.arange(9)}
    local = {"c": local["c"].astype(np.complex64), "n": local["n"].astype(np.int32)}
    whole = jax.tree.map(lambda x: x[0], local)
    expected = jax.tree.map(lambda x: x.mean(0), local)

    def run(grads: Any, wire: Any) -> Any:
        tx = zero.shard_optimizer(optax.identity(), "batch", wire_dtype=wire)
        return tx.update(zero.local(grads), tx.init(whole), whole)[0]

    for wire in (None, jnp.bfloat16, jnp.int8):
        got = jax.pmap(partial(run, wire=wire), "batch")(local)
        assert got["c"].dtype == np.complex64 and got["n"].dtype == np.float32  # as pmean
        for name, x in expected.items():
            np.testing.assert_allclose(got[name][3], x, rtol=1e-6)


def test_weak_types_are_kept() -> None:
    """Weak types are kept so that a scan accepts the state."""

    def run(_: jax.Array) -> Any:
        params = {"w": jnp.broadcast_to(jnp.asarray(1.0), (13,)), "v": jnp.ones(9)}
        assert jax.typeof(params["w"]).weak_type
        tx = zero.shard_optimizer(optax.trace(0.5), "batch")
        state = tx.init(params)
        assert [x.weak_type for x in jax.tree.leaves(jax.tree.map(jax.typeof, state.slices))] == [False, True]
        return jax.lax.scan(lambda s, _: (tx.update(zero.local(params), s, params)[1], None), state, None, length=3)[0]

    assert float(jax.pmap(run, "batch")(jnp.zeros(8)).slices.trace["w"][0, 0]) == 1.75


def test_strict_promotion() -> None:
    tx = zero.shard_optimizer(
        optax.chain(zero.across_shards(optax.clip_by_global_norm(1.0)), optax.sgd(0.1, 0.9)), "batch"
    )
    grads = {"w": np.ones((8, 13, 6), np.float32), "h": np.ones((8, 13), np.float32)}
    with jax.numpy_dtype_promotion("strict"):
        lower(lambda g: tx.update(zero.local(g), tx.init(g), g), grads)
        narrow = zero.shard_optimizer(optax.sgd(0.1), "batch")
        lower(
            lambda g: narrow.update(zero.local(g), narrow.init(g), g),
            jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads),
        )
