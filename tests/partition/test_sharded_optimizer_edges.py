"""Programs at the edges of the library: each is as the unsharded one, or refused in words that name the remedy."""

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
from tests.partition.exact_training import local_grads, lower, make_params, replicate


def test_narrow_gradients_keep_their_dtype() -> None:
    """Slices of narrow gradients reach the optimizer in their dtype.

    In float32, in which `scatter_mean` sums bfloat16, they would promote the moments, and the scan would be refused.
    """
    params = {"w": np.full((16, 3), 1.5, jnp.bfloat16), "few": np.ones(3, jnp.bfloat16)}
    layout = zero.make_layout(params, 8)
    plain = optax.adam(0.1)
    tx = zero.shard_optimizer(plain, "batch", reduction="scattered")
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: rng.normal(size=(8, 5, *p.shape)).astype(jnp.bfloat16), params)

    def run(is_sharded: bool, params: Any, grads: Any) -> Any:
        def step(carry: Any, grads: Any) -> Any:
            params, state = carry
            if is_sharded:
                grads = zero.local(zero.scatter_mean(grads, layout, "batch"))
            else:
                grads = lax.pmean(grads, "batch")
            updates, state = (tx if is_sharded else plain).update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, (tx if is_sharded else plain).init(params)), grads)[0]

    expected, expected_state = jax.pmap(partial(run, False), "batch")(replicate(params), grads)
    found, state = jax.pmap(zero.in_order(partial(run, True)), "batch")(replicate(params), grads)
    whole = zero.to_host(state)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(expected_state), strict=True):
        assert x.dtype == y.dtype
    for name in params:
        np.testing.assert_allclose(found[name].astype(np.float32), expected[name].astype(np.float32), rtol=1e-2)


AROUND = {
    "partition": lambda tx: optax.partition({"big": tx, "small": optax.sgd(1.0)}, {"w": "big", "b": "small"}),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "conditionally_transform": lambda tx: optax.transforms.conditionally_transform(tx, lambda step, **_: step < 9),
}


@pytest.mark.parametrize("name", AROUND)
def test_unreduced_gradients_are_refused(name: str) -> None:
    """Wrappers that leave gradients unreduced are refused.

    What they do not hand in would be applied as it is on each device.
    """
    params = {"w": np.ones((16, 3), np.float32), "b": np.ones(24, np.float32)}
    around, plain = AROUND[name], optax.adam(0.1)
    wrong = around(zero.shard_optimizer(plain, "batch"))

    def step(grads: Any, params: Any) -> Any:
        updates, _ = wrong.update(zero.local(grads), wrong.init(params), params)
        return optax.apply_updates(params, updates)

    with pytest.raises(ValueError, match=r"zero.local marked, .* inside: zero.shard_optimizer\(optax"):
        lower(step, replicate(params), replicate(params))

    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: rng.integers(-8, 9, (8, *p.shape)).astype(np.float32), params)
    mean = jax.tree.map(lambda g: g.mean(0), grads)
    expected, _ = jax.jit(around(plain).update)(mean, around(plain).init(params), params)
    inside, reduced = (
        zero.shard_optimizer(around(plain), "batch"),
        around(zero.shard_optimizer(plain, "batch", reduction=None)),
    )
    for tx, given in ((inside, grads), (reduced, replicate(mean))):
        mark = zero.local if tx is inside else lambda g: g
        found, _ = jax.pmap(lambda g, p, tx=tx, mark=mark: tx.update(mark(g), tx.init(p), p), "batch")(
            given, replicate(params)
        )
        zero.check_replicated(found, "batch")
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x[0], y, rtol=1e-6), found, expected)


ALLOWED = {
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
    "inject_hyperparams": lambda tx: optax.chain(tx, optax.inject_hyperparams(optax.scale)(0.5)),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
    "conditionally_mask": lambda tx: optax.transforms.conditionally_mask(tx, lambda step, **_: step < 2),
    "partition, frozen": lambda tx: optax.partition(
        {"train": tx, "freeze": optax.set_to_zero()},
        lambda p: {name: "freeze" if name == "w" else "train" for name in p},
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("schedule_free", "partition, frozen") else pytest.param(name, marks=pytest.mark.wide)
        for name in ALLOWED
    ],
)
def test_wrappers_of_whole_updates(name: str) -> None:
    """Wrappers that only see whole updates are right."""
    params, plain = make_params(), ALLOWED[name](optax.sgd(0.25, momentum=0.5))
    tx = ALLOWED[name](zero.shard_optimizer(optax.sgd(0.25, momentum=0.5), "batch"))
    start = (lambda p: optax.LookaheadParams(p, p)) if name == "lookahead" else (lambda p: p)

    def step(tx: Any, mark: Any, params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(mark(grads), state, params)
        return optax.apply_updates(params, updates), state

    found = start(replicate(params))
    state = jax.pmap(tx.init, "batch")(found)
    expected = start(params)
    right = plain.init(expected)
    for i in range(3):
        found, state = jax.pmap(partial(step, tx, zero.local), "batch")(found, state, local_grads(i))
        mean = jax.tree.map(lambda g: jnp.mean(g, 0), local_grads(i))
        expected, right = jax.jit(partial(step, plain, lambda g: g))(expected, right, mean)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[0], y, rtol=1e-5, atol=1e-6), found, expected)


def test_sharding_twice_is_refused() -> None:
    """An optimizer that is sharded twice is refused."""
    sharded = zero.shard_optimizer(optax.adam(0.1), "batch")
    with pytest.raises(ValueError, match="sharded already"):
        zero.shard_optimizer(sharded, "batch")
    nested = zero.shard_optimizer(optax.chain(optax.clip(1.0), sharded), "batch")
    with pytest.raises(ValueError, match=r"zero.shard_optimizer inside zero.shard_optimizer: .* outermost"):
        lower(lambda p: nested.init(p), replicate(make_params()))


def test_function_among_parameters() -> None:
    """A function or a string among the parameters is named."""
    tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    for static, kind in ((jnp.tanh, "a function"), ("float32", "a str, 'float32'")):
        with pytest.raises(TypeError, match=rf"leaf model/activation: .* array.* got {kind}.* outside of the tree"):
            lower(lambda x, static=static: tx.init({"model": {"activation": static, "w": x}}), np.ones((8, 16)))


def test_state_of_another_optimizer() -> None:
    """The state of another optimizer is named."""
    params, tx = make_params(), zero.shard_optimizer(optax.adam(0.1), "batch")
    other = optax.sgd(0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"fit this optimizer.*: it lacks 0/count, .*; it has, .*, 0/trace/b"):
        zero.to_devices(other.init(params), like=tx.init(params))
    state = jax.pmap(zero.shard_optimizer(other, "batch").init, "batch")(replicate(params))
    with pytest.raises(ValueError, match=r"fit this optimizer.*: it lacks 0/count, .*; it has, .*, 0/trace/b"):
        lower(lambda s, p: tx.update(zero.local(p), s, p), state, replicate(params))
    more = {**params, "more": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match=r"these parameters: it lacks 0/mu/more, 0/nu/more\. Pass those"):
        zero.to_devices(optax.adam(0.1).init(params), like=tx.init(more))
    with pytest.raises(ValueError, match=r"same leaves in other containers, .*from_state_dict"):
        zero.to_devices(_as_dicts(optax.adam(0.1).init(params)), like=tx.init(params))


def _as_dicts(state: Any) -> Any:
    return [dict(state[0]._asdict()), dict(state[1]._asdict())]


def test_scalar_in_stacked_state() -> None:
    """A scalar put into the stacked state is named."""
    params = make_params()
    tx = zero.shard_optimizer(optax.inject_hyperparams(optax.adam)(0.1), "batch")
    state = jax.pmap(tx.init, "batch")(replicate(params))
    step = jax.pmap(lambda s, p: tx.update(zero.local(p), s, p), "batch")
    for value in (0.5, jnp.float32(0.5), np.float32(0.5), np.full(4, 0.5)):
        state.slices.hyperparams["learning_rate"] = value
        for use in (lambda: step(state, replicate(params)), lambda: zero.to_host(state)):
            with pytest.raises(ValueError, match=r"leaf hyperparams/learning_rate: .*scalar.* jnp.full\(8, value\)"):
                use()
    state.slices.hyperparams["learning_rate"] = jnp.full(8, 0.5)
    updates, _ = step(state, replicate(params))
    np.testing.assert_allclose(np.abs(updates["w"]).max(), 0.5, rtol=1e-4)


def test_whole_state_inside_pmap() -> None:
    """State is read whole beside whole parameters inside pmap.

    A dimension as long as there are devices: a slice of one row would be broadcast over all of them.
    """
    params = {"w": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)}
    plain = optax.contrib.schedule_free_sgd(0.1)
    tx = zero.shard_optimizer(plain, "batch")

    @partial(jax.pmap, axis_name="batch")
    def evaluated(params: Any) -> Any:
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(zero.local(params), state, params)
            params = optax.apply_updates(params, updates)
        return optax.contrib.schedule_free_eval_params(zero.gather(state), params)

    expected, state = params, plain.init(params)
    for _ in range(2):
        updates, state = plain.update(expected, state, expected)
        expected = optax.apply_updates(expected, updates)
    right = optax.contrib.schedule_free_eval_params(state, expected)
    np.testing.assert_allclose(evaluated(replicate(params))["w"][3], right["w"], rtol=1e-6)
    with pytest.raises(AttributeError, match=r"no 'z' that is whole: .* use zero.gather\(opt_state\) inside"):
        lower(lambda p: optax.contrib.schedule_free_eval_params(tx.init(p), p), replicate(params))


def test_copies_of_global_arrays() -> None:
    """Copies of a global array are compared.

    As the parameters of shard_map are: one array of which every device has a copy.
    """
    mesh = jax.make_mesh((8,), ("data",))
    x = jax.device_put(np.ones(3, np.float32), jax.NamedSharding(mesh, jax.P()))
    zero.check_replicated({"w": x}, "data")
    parts = [part.data + (part.device.id == 5) for part in x.addressable_shards]
    broken = jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
    with pytest.raises(ValueError, match=r"leaves differ .*: w"):
        zero.check_replicated({"w": broken}, "data")
    with pytest.raises(ValueError, match=r"leaf w: expected one row per local device, \(8, ...\), got \(3,\)"):
        zero.check_replicated({"w": np.ones(3, np.float32)}, "data")
