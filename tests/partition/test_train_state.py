"""A whole train state between host and devices: its sharded optimizers are found, the rest is replicated."""

import copy
import dataclasses
import doctest
import pydoc
import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

import zero
from tests.helpers.public_names import FUNCTIONS, MODULES, TYPES
from tests.partition.exact_training import local_grads, make_params, replicate
from zero.partition.sharded_state import WholeState

API = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()


def three_optimizers(shard: Callable[[Any], Any]) -> Any:
    """A state of three optimizers, one around which there is a chain, with an average and other leaves."""
    params = make_params()
    actor, critic = shard(optax.adam(0.1)), optax.chain(shard(optax.sgd(0.1, momentum=0.5)), optax.scale(0.5))
    alpha = shard(optax.adam(0.1))
    average = shard(optax.GradientTransformation(lambda p: p, lambda p, ema, _: (p, ema)))
    return {
        "params": params,
        "optimizers": [actor.init(params), {"critic": critic.init(params)}],
        "alpha": (np.float32(0.5), alpha.init(np.float32(0.5))),
        "ema": average.init(params),
        "steps": 3,
        "rate": 0.25,
        "key": jax.random.key(7),
    }


def leaves_with_names(tree: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    is_key = [jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) for _, x in flat]
    return {
        jax.tree_util.keystr(path): np.asarray(jax.random.key_data(x) if key else x)
        for (path, x), key in zip(flat, is_key, strict=True)
    }


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def assert_same(found: Any, expected: Any) -> None:
    assert structure(found) == structure(expected)
    right = leaves_with_names(expected)
    for name, x in leaves_with_names(found).items():
        np.testing.assert_array_equal(x, right[name], err_msg=name)


@pytest.mark.parametrize("devices", [None, jax.devices()[::-1], jax.devices()[:1:-1], jax.devices()[:1]])
def test_three_optimizers_in_one_state(devices: Any) -> None:
    """A state goes to the devices and comes back as the unsharded program's, whose devices need not be said."""
    plain = three_optimizers(lambda tx: tx)
    state = three_optimizers(lambda tx: zero.shard_optimizer(tx, "batch"))
    assert list(leaves_with_names(state)) == list(leaves_with_names(plain))  # as files name them
    placed = zero.to_devices(state, devices=devices)
    count = len(devices or jax.devices())
    for x in jax.tree.leaves(placed):
        assert [part.device for part in x.addressable_shards] == list(devices or jax.devices()) and x.shape[0] == count
    assert placed["optimizers"][0].slices[0].mu["w"].shape == (count, 13, 24 // count)
    saved = zero.to_host(placed)
    assert_same(saved, plain)
    for like in (
        placed,
        state,
        jax.eval_shape(partial(three_optimizers, lambda tx: zero.shard_optimizer(tx, "batch"))),
    ):
        again = zero.to_devices(saved, like=like, devices=devices)
        assert structure(again) == structure(placed)
        assert_same(zero.to_host(again), plain)


def test_flax_train_state() -> None:
    """A program of flax keeps its lines, reads the file of the unsharded one and compiles its step once."""
    plain, tx = optax.adamw(0.1), zero.shard_optimizer(optax.adamw(0.1), "batch")
    create = partial(TrainState.create, apply_fn=lambda: None, params=make_params())
    old = create(tx=plain)
    old = old.replace(opt_state=jax.tree.map(lambda x: x + 1, old.opt_state), step=np.asarray(5, np.int32))
    file = serialization.to_bytes(old)
    state = serialization.from_bytes(create(tx=tx), file)
    assert isinstance(state.opt_state, WholeState) and state.opt_state[0].count == 1
    traces = []

    @partial(jax.pmap, axis_name="batch")
    def step(state: Any, grads: Any) -> Any:
        traces.append(1)
        return state.apply_gradients(grads=zero.local(grads))

    placed = zero.to_devices(state)
    assert_same(serialization.from_bytes(old, serialization.to_bytes(zero.to_host(placed))), old)
    placed = step(placed, local_grads(0))
    again = zero.to_devices(zero.to_host(placed), like=placed)
    step(again, local_grads(1))
    assert len(traces) == 1
    mean = jax.tree.map(lambda g: jnp.mean(g, 0), local_grads(0))
    expected = jax.jit(lambda s, g: s.apply_gradients(grads=g))(old, mean)
    found = zero.to_host(placed)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_optimizer_keeps_what_it_knows() -> None:
    """Copies of a sharded optimizer, and of its state, know what the first one knew."""
    tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    for other in (tx._replace(update=tx.update), copy.copy(tx), copy.deepcopy(tx)):
        assert isinstance(other, zero.ShardedOptimizer) and other.axis == "batch"
        assert other.unsharded.init is tx.unsharded.init
    state = zero.to_devices(tx.init(make_params()))
    expected = zero.to_host(state)
    copies = [copy.copy(state), dataclasses.replace(state, slices=state.slices), jax.tree.map(lambda x: x, state)]
    copies += [serialization.from_bytes(state, serialization.to_bytes(jax.device_get(state)))]
    copies[-1] = jax.pmap(lambda x: x, "batch")(copies[-1])
    for one in copies:
        assert_same(zero.to_host(one), expected)


def test_gather_inside_pmap() -> None:
    """The whole state inside pmap, and NaN in place of slices of another device."""
    tx = zero.shard_optimizer(
        optax.GradientTransformation(lambda p: p, lambda p, ema, _: (p, p)), "batch", reduction=None
    )
    params = make_params()
    state = {"ema": zero.to_devices(tx.init(params)), "other": np.ones((8, 2), np.float32)}
    gather = jax.pmap(zero.gather, "batch")
    whole = gather(state)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[3], y), whole["ema"], params)
    np.testing.assert_array_equal(whole["other"], state["other"])
    leaves, treedef = jax.tree.flatten(state["ema"])
    foreign = jax.tree.unflatten(treedef, [np.broadcast_to(x[:1], x.shape) for x in leaves])
    assert np.isnan(gather({"ema": foreign})["ema"]["w"]).any()
    with pytest.raises(RuntimeError, match=r"zero.gather runs inside pmap; outside, zero.to_host"):
        zero.gather(state)
    with pytest.raises(TypeError, match=r"gather needs the layout and the axis"):
        zero.gather(params)


def test_mistakes_with_a_train_state() -> None:
    tx, params = zero.shard_optimizer(optax.adam(0.1), "batch"), make_params()
    state = zero.to_devices({"params": params, "opt_state": tx.init(params)})
    with pytest.raises(ValueError, match=r"leaf opt_state: this state is sharded already"):
        zero.to_devices(state)
    with pytest.raises(
        ValueError, match=r"leaf params/b: expected what pmap returns, .* \(24,\) on the host: leave it out"
    ):
        zero.to_host({**state, "params": params})
    with pytest.raises(
        ValueError, match=r"leaf params/b: this array is on several devices already, got shape \(8, 24\)"
    ):
        zero.to_devices({"params": state["params"]})
    with pytest.raises(TypeError, match=r"leaf name: expected an array or a number, got a str"):
        zero.to_devices({"name": "run"})
    with pytest.raises(ValueError, match="like= has a different structure from the tree"):
        zero.to_devices({"params": params}, like=state)
    with pytest.raises(RuntimeError, match=r"leaf opt_state: zero.to_host runs outside pmap; inside, zero.gather"):
        jax.pmap(zero.to_host, "batch")(state)
    ensemble = jax.pmap(jax.vmap(tx.init), "batch")(replicate(jax.tree.map(lambda x: np.stack([x, x]), params)))
    with pytest.raises(ValueError, match=r"made by vmap inside pmap, .* \(members, ...\) per leaf"):
        zero.to_host(ensemble)
    with pytest.raises(ValueError, match="leave devices= out"):
        zero.to_host(state, devices=jax.make_mesh((8,), ("batch",)))
    with pytest.raises(TypeError, match=r"need the axis .*zero.to_host\(tree, layout, axis\)"):
        zero.to_host(params, zero.make_layout(params, 8))


def test_devices_that_decide_for_themselves() -> None:
    """An overflow on one device poisons all of them alike, and the next save names the remedy."""
    tx, params = zero.shard_optimizer(optax.adam(0.1), "batch"), make_params()

    @partial(jax.pmap, axis_name="batch")
    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        is_finite = jnp.isfinite(optax.tree.norm(grads))  # of this device only
        updates, new = tx.update(zero.local(grads), opt_state, params)
        keep = partial(jax.tree.map, partial(jnp.where, is_finite))
        return keep(optax.apply_updates(params, updates), params), keep(new, opt_state)

    state = zero.to_devices((params, tx.init(params)))
    grads = local_grads(0)
    grads["w"][3, 0, 0] = np.inf
    for one in (grads, local_grads(1)):
        state = step(*state, one)
    assert not any(np.isfinite(x).all() for x in state[0]["w"])
    with pytest.raises(ValueError, match=r"same updates, .*lax.pmin\(is_finite.astype\(jnp.int32\), axis_name\) == 1"):
        zero.to_host(state)


def test_state_as_global_arrays() -> None:
    """Slices of a state become global arrays by its own layout, and come back."""
    tx, params = zero.shard_optimizer(optax.adam(0.1), "batch"), make_params()
    state = zero.to_devices(tx.init(params))
    layout = state.layout(8)
    stored = zero.to_global(state.slices, layout, "batch")
    assert stored[0].mu["w"].shape == (13, 24)
    back = dataclasses.replace(state, slices=zero.from_global(stored, layout, "batch"))
    assert jax.tree.structure(back) == structure(state)
    assert_same(zero.to_host(back), zero.to_host(state))


def test_placed_arrays_stay() -> None:
    """On a mesh arrays that the program has placed stay where they are."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    w = jax.device_put(np.ones((3, 24), np.float32), jax.NamedSharding(mesh, jax.P(None, "model")))
    tx = zero.shard_optimizer(optax.adam(0.1), "data")
    placed = zero.to_devices({"params": {"w": w}, "opt_state": tx.init({"w": w}), "step": 0}, devices=mesh)
    assert placed["params"]["w"] is w and placed["step"].sharding.is_fully_replicated
    assert placed["opt_state"].slices[0].mu["w"].sharding.spec == jax.P(None, ("model", "data"))


def test_monitor_belongs_behind() -> None:
    """A transform whose state changes its structure is refused inside, and measures whole updates behind."""
    params, monitor = make_params(), optax.monitor({"norm": optax.tree.norm})
    inside = zero.shard_optimizer(optax.chain(optax.sgd(0.5), monitor), "batch")
    with pytest.raises(ValueError, match=r"a different state from its init: .*after the sharded optimizer"):
        jax.pmap(lambda g, p: inside.update(zero.local(g), inside.init(p), p), "batch").lower(
            local_grads(0), replicate(params)
        )
    behind = optax.chain(zero.shard_optimizer(optax.sgd(0.5), "batch"), monitor)
    step = jax.pmap(lambda g, p: behind.update(zero.local(g), behind.init(p), p), "batch")
    updates, state = step(local_grads(0), replicate(params))
    norm = optax.tree.norm(jax.tree.map(lambda x: x[0], updates))
    np.testing.assert_allclose(zero.to_host(state)[1].measurements["norm"], norm, rtol=1e-6)


def test_step_under_vmap() -> None:
    """The same step runs on one device under vmap, for a unit test."""
    tx, params = zero.shard_optimizer(optax.adam(0.1), "batch"), make_params()

    def step(params: Any, grads: Any) -> Any:
        updates, _ = tx.update(zero.local(grads), tx.init(params), params)
        return optax.apply_updates(params, updates)

    found = jax.vmap(step, axis_name="batch")(replicate(params), local_grads(0))
    expected = jax.pmap(step, "batch")(replicate(params), local_grads(0))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)


def test_names_with_slashes_are_told_apart() -> None:
    params = {"a/b": np.ones((16, 3), np.float32), "a": {"b": np.zeros(24, np.float32)}}
    layout = zero.make_layout(params, 8)
    assert "['a/b'] " in str(layout) and "['a']['b'] " in str(layout)
    assert layout.differences({"a": {"b": 0}}) == "it lacks ['a/b']"
    sums = zero.checksums(zero.to_devices(params, layout, "batch"), layout, "batch")
    assert sorted(sums) == ["['a']['b']", "['a/b']"]


def test_keys_among_parameters_are_named() -> None:
    with pytest.raises(TypeError, match=r"leaf key: a typed key of jax.random .*jax.random.key_data\(key\)"):
        zero.make_layout({"key": jax.random.key(0)}, 8)


def test_public_names() -> None:
    """At most 27, each with one use on the page of the interface."""
    rows = re.findall(r"^\| `zero\.(\w+)` \|", API, re.MULTILINE)
    assert sorted(rows) == sorted(FUNCTIONS) and len(rows) <= 27
    assert zero.__version__ == version("zero-pmap")


def test_help_fits_two_screens() -> None:
    lines = pydoc.plain(pydoc.render_doc(zero)).splitlines()
    assert len(lines) <= 96 and max(map(len, lines)) <= 124
    for name in (*FUNCTIONS, *TYPES, *MODULES):
        assert any(re.search(rf"\b{name}\b", line) for line in lines), name


@pytest.mark.parametrize("name", [*FUNCTIONS, *TYPES])
def test_public_name_has_an_example(name: str) -> None:
    """Its docstring shows one use, which runs with the doctests of its module."""
    found = doctest.DocTestFinder(recurse=False).find(getattr(zero, name), name)
    assert any(test.examples for test in found)
    assert getattr(zero, name).__module__.startswith("zero.")  # where pytest collects it
