"""Wrappers of optax nested at random, sharded at any level: as the unsharded program, or refused by name."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero

DTYPES: tuple[Any, ...] = (np.float32, jnp.bfloat16)
DEVICES = (1, 3, 8)
REFUSALS = (ValueError, TypeError)  # NotElementwiseError is a ValueError
BASES: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(2**-4),
    "momentum": lambda: optax.sgd(2**-4, momentum=0.5),
    "clipped": lambda: optax.chain(zero.across_shards(optax.clip_by_global_norm(0.5)), optax.adam(2**-4)),
    "adafactor": lambda: zero.across_shards(optax.adafactor(2**-4, min_dim_size_to_factor=3)),
}


def labels(tree: Any) -> Any:
    return {name: "one" if name == "w" else "two" for name in tree}


def early(step: Any, **_: Any) -> Any:
    return step < 2


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "chain before": lambda tx: optax.chain(tx, optax.scale(0.5)),
    "chain after": lambda tx: optax.chain(optax.clip(0.25), tx),
    "masked": lambda tx: optax.masked(tx, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "partition": lambda tx: optax.partition({"one": tx, "two": optax.sgd(2**-4)}, labels),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "inject_hyperparams": lambda tx: optax.chain(tx, optax.inject_hyperparams(optax.scale)(0.5)),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.transforms.conditionally_transform(tx, early),
    "conditionally_mask": lambda tx: optax.transforms.conditionally_mask(tx, early),
}


def params_of(dtypes: tuple[Any, Any]) -> Any:
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 5), "b": (8,), "s": ()}
    return {name: (rng.integers(1, 9, shape) / 8).astype(dtypes[name == "b"]) for name, shape in shapes.items()}


def grads_of(params: Any, devices: int, step: int) -> Any:
    """Sums over 1, 3 and 8 devices are exact in any dtype, and their means in those of 8 and 1; 3 devices are alike."""
    rng = np.random.default_rng(step)
    whole = {name: rng.integers(-4, 5, (8, *p.shape)) / 4 for name, p in sorted(params.items())}
    return {
        name: np.stack([x[i if devices == 8 else 0] for i in range(devices)]).astype(params[name].dtype)
        for name, x in whole.items()
    }


def train(tx: Any, params: Any, devices: int) -> Any:
    """Parameters and state of all devices after three steps."""
    pmap = partial(jax.pmap, axis_name="batch", devices=jax.devices()[:devices])
    start = jax.tree.map(lambda x: np.stack([x] * devices), params)
    state = pmap(tx.init)(start)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(zero.local(grads), state, params)
        return optax.apply_updates(params, updates), state

    step = pmap(step)
    for i in range(3):
        start, state = step(start, state, grads_of(params, devices, i))
    return start, state, step


def expected_of(tx: Any, params: Any, devices: int) -> Any:
    state = tx.init(params)
    update = jax.jit(tx.update)
    for i in range(3):
        mean = jax.tree.map(lambda g: np.mean(g, 0, np.float32).astype(g.dtype), grads_of(params, devices, i))
        updates, state = update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def states_in(state: Any) -> Iterator[zero.ShardedState]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, zero.ShardedState))
    return (x for x in leaves if isinstance(x, zero.ShardedState))


def assert_close(found: Any, expected: Any, what: str) -> None:
    leaves = [jax.tree_util.tree_leaves_with_path(tree) for tree in (found, expected)]
    for (path, x), (_, y) in zip(*leaves, strict=True):
        assert x.dtype == y.dtype, f"{what}{jax.tree_util.keystr(path)}: {x.dtype}, not {y.dtype}"
        tolerance = 2**-6 if x.dtype == jnp.bfloat16 else 1e-5
        got, right = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance, err_msg=f"{what} {path}")


def check(case: tuple[Any, ...]) -> str:
    """ "exact" or "refused"; anything else is an error."""
    base, names, level, dtypes, devices = case
    params = params_of(dtypes)
    make = BASES[base]
    plain = sharded = make()
    for depth in range(len(names) + 1):
        if depth == level:
            sharded = inner = zero.shard_optimizer(sharded, "batch")
        if depth < len(names):
            plain, sharded = WRAPPERS[names[depth]](plain), WRAPPERS[names[depth]](sharded)
    try:
        expected, right = expected_of(plain, params, devices)
    except TypeError:
        return "refused"  # by jax, without shards
    try:
        found, state, step = train(sharded, params, devices)
    except REFUSALS as error:
        assert any(word in str(error) for word in ("zero.", "optax.")), f"{case}: {error}"
        return "refused"
    zero.check_replicated(found, "batch", jax.devices()[:devices])
    assert_close(jax.tree.map(lambda x: x[0], found), expected, f"{case}: parameters")
    if level == len(names):
        here = jax.devices()[:devices]
        saved = zero.to_host(state, devices=here)
        assert_close(saved, right, f"{case}: state")
        for whole in (saved, jax.device_get(right)):
            back = zero.to_devices(whole, like=inner.init(params), devices=here)
            again = zero.to_host(back, devices=here)
            jax.tree.map(np.testing.assert_array_equal, again, jax.tree.map(np.asarray, whole))
        grads = grads_of(params, devices, 3)
        after = step(found, zero.to_devices(saved, like=inner.init(params), devices=here), grads)[0]
        jax.tree.map(np.testing.assert_array_equal, after, step(found, state, grads)[0])
    else:
        for one in states_in(state):
            zero.check_replicated(found, "batch", jax.devices()[:devices])
            assert one.shard.shape == (devices, 1)
    return "exact"


def cases(count: int, seed: int) -> list[tuple[Any, ...]]:
    """Up to three wrappers around a base, sharded at any level, each case once."""
    rng = np.random.default_rng(seed)
    nestings = [names for depth in range(4) for names in itertools.product(WRAPPERS, repeat=depth)]
    found: dict[tuple[Any, ...], None] = {}
    while len(found) < count:
        names = nestings[rng.integers(len(nestings))]
        dtypes = tuple(DTYPES[i] for i in rng.integers(0, 2, 2))
        level, base = int(rng.integers(len(names) + 1)), list(BASES)[rng.integers(len(BASES))]
        found[base, names, level, dtypes, DEVICES[rng.integers(3)]] = None
    return list(found)


# One of each kind, the sharded optimizer outermost and innermost.
SHORT: list[tuple[Any, ...]] = [
    ("adamw", ("masked", "MultiSteps"), 2, (np.float32, jnp.bfloat16), 8),
    ("clipped", ("partition", "chain after"), 2, (np.float32, np.float32), 3),
    ("momentum", ("conditionally_transform",), 0, (np.float32, np.float32), 8),
    ("momentum", ("MultiSteps", "inject_hyperparams"), 0, (jnp.bfloat16, jnp.bfloat16), 8),
    ("adafactor", ("chain before",), 1, (np.float32, np.float32), 1),
]
RESULTS = ["exact", "exact", "refused", "refused", "exact"]


def test_a_few_nestings() -> None:
    assert [check(case) for case in SHORT] == RESULTS


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_nestings(part: int) -> None:
    results = [check(case) for case in cases(1000, 0)[part::20]]
    assert {"exact", "refused"} == set(results)
