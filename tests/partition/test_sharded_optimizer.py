"""The drop-in wrapper: what goes in and out, and what is held.

`test_sharded_optimizer_of_optax.py` compares all of optax.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import reduce_on_plateau

import zero
from tests.partition.exact_training import (
    AXES,
    assert_close,
    local_grads,
    lower,
    make_params,
    train,
    train_unsharded,
)
from zero.partition.collectives.arrays import fill_padding

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        pytest.param(
            name, axis, id=f"{name}-{axes}", marks=() if name == "lamb" or axes == "flat" else pytest.mark.wide
        )
        for name in ("adamw", "lamb", "clipped adam")
        for axes, axis in AXES.items()
    ],
)
def test_groups_equal_unsharded(name: str, axis: zero.Axis) -> None:
    plain, sharded = {
        "adamw": (optax.adamw(0.1), optax.adamw(0.1)),
        "lamb": (optax.lamb(0.1), zero.across_shards(optax.lamb(0.1))),
        "clipped adam": (
            optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
            optax.chain(zero.across_shards(optax.clip_by_global_norm(0.5)), optax.adam(0.1)),
        ),
    }[name]
    params, state = train(zero.shard_optimizer(sharded, axis), make_params())
    assert_close(params, train_unsharded(plain, make_params()))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    # Two moments of 13 x 24 -> 13 x 3, 24 -> 3 (of 8), and whole: a scalar, three elements, Adam's count, the number of
    # the slice.
    assert held <= 2 * 4 * (13 * 24 // axis.shards + 24 // axis.shards + 1 + 3) + 8


@pytest.mark.parametrize(("reduction", "reduce"), [("mean", jnp.mean), ("sum", jnp.sum), (None, None)])
def test_reduction(reduction: Any, reduce: Any) -> None:
    tx = zero.shard_optimizer(optax.sgd(0.5, momentum=0.5), "batch", reduction=reduction)
    if reduction is None:
        reduced = zero.shard_optimizer(optax.sgd(0.5, momentum=0.5), "batch", reduction="mean")
        plain = tx.update
        tx = reduced._replace(update=lambda g, s, p: plain(jax.lax.pmean(g, "batch"), s, p))
    expected = train_unsharded(optax.sgd(0.5, momentum=0.5), make_params(), reduce or jnp.mean)
    mark = zero.local if reduction else lambda grads: grads
    assert_close(train(tx, make_params(), mark=mark)[0], expected)


def test_reduction_is_over_all_copies() -> None:
    """Also on an axis whose reduce-scatters leave that to the program, which has no gradients in between."""
    params, _ = train(
        zero.shard_optimizer(optax.adam(0.1), zero.Axis("batch", (2, 4), sums_copies=False)), make_params()
    )
    assert_close(params, train_unsharded(optax.adam(0.1), make_params()))


def test_narrow_gradients_are_summed_in_float32() -> None:
    """Narrow gradients are summed in float32 and reach the transform in their own dtype."""
    seen = []

    def look(updates: jax.Array, _: Any) -> jax.Array:
        seen.append(updates.dtype)
        return updates

    tx = zero.shard_optimizer(optax.stateless(look), "batch", reduction="sum")
    # 256 + 1 is not a bfloat16: a sum that is rounded at every hop loses the ones.
    grads = jnp.where(jnp.arange(8) == 0, 256, 1).astype(jnp.bfloat16)[:, None] * jnp.ones((8, 16), jnp.bfloat16)
    updates = jax.pmap(lambda g: tx.update(zero.local(g), tx.init(g), g)[0], "batch")(grads)
    assert updates.dtype == jnp.bfloat16 and seen[-1] == jnp.bfloat16
    np.testing.assert_array_equal(updates.astype(jnp.float32), jnp.asarray(263, jnp.bfloat16).astype(jnp.float32))


def test_wire_dtype_rounds_what_travels() -> None:
    tx = zero.shard_optimizer(optax.identity(), "batch", reduction="sum", wire_dtype=jnp.bfloat16)
    grads = jnp.broadcast_to(jnp.float32(1 + 2**-12), (8, 16))
    updates = jax.pmap(lambda g: tx.update(zero.local(g), tx.init(g), g)[0], "batch")(grads)
    np.testing.assert_array_equal(updates, 8.0)


def test_trusted_transform() -> None:
    """A trusted transform runs as it is."""
    tx = zero.shard_optimizer(optax.clip_by_global_norm(1.0), "batch", trust=True)
    updates = jax.pmap(lambda g: tx.update(zero.local(g), tx.init(g), g)[0], "batch")(jnp.full((8, 16), 3.0))
    # The norm of a slice of two, as promised to nobody.
    np.testing.assert_allclose(updates, 1 / np.sqrt(2), rtol=1e-6)


def test_accumulation_inside_and_outside() -> None:
    expected = train_unsharded(optax.MultiSteps(optax.adam(0.1), 2), make_params(), steps=4)
    inside = zero.shard_optimizer(optax.MultiSteps(optax.adam(0.1), 2), "batch")
    assert_close(train(inside, make_params(), steps=4)[0], expected)
    # Around it, the sums are of local gradients, which are marked behind it.
    marked = optax.chain(
        optax.stateless(lambda grads, _: zero.local(grads)), zero.shard_optimizer(optax.adam(0.1), "batch")
    )
    outside = optax.MultiSteps(marked, 2).gradient_transformation()
    assert_close(train(outside, make_params(), steps=4, mark=lambda grads: grads)[0], expected)


def test_extra_arguments_reach_the_transform() -> None:
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    _, state = train(zero.shard_optimizer(tx, "batch"), make_params(), steps=4, value=jnp.float32(1.0))
    assert state.slices[1].scale[0] < 1


def test_state_moves_between_device_counts() -> None:
    """State is laid out like the parameters and moves to another number of devices."""
    tx = optax.inject_hyperparams(optax.adamw)(optax.constant_schedule(0.1))
    params, state = train(zero.shard_optimizer(tx, "batch"), make_params())
    layout = zero.derive_layout(tx.init, zero.make_layout(make_params(), 8))
    whole = zero.to_global(state.slices, layout, "batch")
    mu = whole.inner_state[0].mu["w"]
    assert mu.shape == (13, 24)

    sharded = zero.shard_optimizer(tx, "batch")
    grads = local_grads(3)
    expected = jax.pmap(lambda p, s, g: optax.apply_updates(p, sharded.update(zero.local(g), s, p)[0]), "batch")(
        params, state, grads
    )
    quarter = zero.derive_layout(tx.init, zero.make_layout(make_params(), 4))
    cropped = quarter.map(lambda leaf, x: np.asarray(x)[tuple(map(slice, leaf.padded_shape))], whole)
    shards = zero.ShardedState(zero.from_global(cropped, quarter, "batch"), jnp.arange(4, dtype=jnp.int32)[:, None])
    mean = jax.tree.map(lambda g: np.stack([g.mean(0)] * 4), grads)
    four = jax.tree.map(lambda p: np.asarray(p[:4]), params)
    got = jax.pmap(lambda p, s, g: optax.apply_updates(p, sharded.update(zero.local(g), s, p)[0]), "batch")(
        four, shards, mean
    )
    assert_close(got, jax.tree.map(lambda p: p[0], expected))


def test_on_shards_takes_and_gives_shards() -> None:
    params = {"blocks": {"w": make_params()["w"]}, "b": make_params()["b"]}
    layout = zero.make_layout(params, 8, stacked=["blocks"])
    tx = zero.on_shards(
        optax.chain(zero.across_shards(optax.clip_by_global_norm(0.1)), optax.adam(0.1)), layout, "batch"
    )
    plain = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    grads = jax.tree.map(lambda p: p * 2 + 1, params)

    def step(_: jax.Array) -> Any:
        shards = zero.shard(params, layout, "batch")
        updates, _ = tx.update(zero.shard(grads, layout, "batch"), tx.init(shards), shards)
        return zero.gather(updates, layout, "batch")

    assert_close(jax.pmap(step, "batch")(jnp.zeros(8)), plain.update(grads, plain.init(params), params)[0])


@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_global_norm_counts_each_element_once(axis: zero.Axis) -> None:
    params = make_params()
    expected = optax.tree.norm(params)
    layout = zero.make_layout(params, axis.shards)
    got = jax.pmap(lambda _: zero.global_norm(zero.shard(params, layout, axis), layout, axis), "batch")(jnp.zeros(8))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert len(set(got.tolist())) == 1


@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_global_norm(axis: zero.Axis) -> None:
    """The global norm ignores padding and supports every dtype."""
    params = {"w": np.ones((13, 3), np.float32), "c": np.full((9,), 3 + 4j, np.complex64), "n": np.full((9,), 2, int)}
    layout = zero.make_layout(params, axis.shards)

    def run(_: jax.Array) -> jax.Array:
        # What an update without an epsilon leaves where there is no gradient: 0 / 0.
        spoilt = layout.map(lambda leaf, x: fill_padding(x, leaf, axis, 7), zero.shard(params, layout, axis))
        return zero.global_norm(spoilt, layout, axis)

    np.testing.assert_allclose(jax.pmap(run, "batch")(jnp.zeros(8)), np.sqrt(39 + 9 * 25 + 9 * 4), rtol=1e-6)


@pytest.mark.parametrize(
    "wrapper",
    [lambda tx: tx, lambda tx: optax.MultiSteps(tx, 1), lambda tx: zero.across_shards(optax.MultiSteps(tx, 1))],
    ids=["alone", "accumulated", "across"],
)
def test_accumulation_passes_extra_arguments_on(wrapper: Any) -> None:
    tx = zero.shard_optimizer(wrapper(optax.chain(optax.sgd(0.1), reduce_on_plateau(factor=0.5, patience=1))), "batch")
    params, _ = train(tx, make_params(), steps=4, value=jnp.float32(1.0))
    plain = optax.with_extra_args_support(optax.chain(optax.sgd(0.1), reduce_on_plateau(factor=0.5, patience=1)))
    wanted = optax.GradientTransformation(plain.init, partial(plain.update, value=jnp.float32(1.0)))
    assert_close(params, train_unsharded(wanted, make_params(), steps=4))


def test_sm3_after_a_nan() -> None:
    """XLA's maximum over CPU devices loses it, and so would the accumulators."""
    params, grads = {"w": np.ones((13, 6), np.float32)}, np.ones((13, 6), np.float32)
    grads[12, 5] = np.nan
    tx = zero.shard_optimizer(zero.across_shards(optax.sm3(0.1)), "batch")
    plain = optax.sm3(0.1)

    def run(tx: Any, grads: Any, mark: Callable[[Any], Any] = lambda g: g) -> Any:
        _, state = tx.update(mark({"w": grads}), tx.init(params), params)
        return tx.update(mark({"w": jnp.ones((13, 6))}), state, params)[0]

    got = jax.pmap(partial(run, tx, mark=zero.local), "batch")(np.stack([grads] * 8))
    np.testing.assert_allclose(got["w"][2], run(plain, grads)["w"], rtol=1e-6)


def collectives(fn: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    """Each collective of the compiled program with its result: `('all-reduce', 'f32[]')`."""
    text = lower(fn, *args).compile().as_text()
    return re.findall(r"= \(?([^=]*?)\)? (all-reduce|all-gather|reduce-scatter|all-to-all)\(", text)


# The norms of leaves, of factored rows and columns, or the matrices that one device iterates on.
EXPECTED = {
    "lamb": {"all-reduce": r"f32\[\]"},
    "lars": {"all-reduce": r"f32\[\]"},
    "clip_by_global_norm": {"all-reduce": r"f32\[\]"},
    "adafactor": {"all-reduce": r"f32\[(129)?\].*", "all-gather": r"f32\[136\].*"},
    "muon": {"all-reduce": r"f32\[1?\].*", "all-gather": r"f32\[1,129,136\].*", "reduce-scatter": r"f32\[1,129,17\].*"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_collectives_of_the_compiled_update(name: str) -> None:
    layout = zero.make_layout({"w": np.zeros((129, 136)), "a": np.zeros((13, 6)), "b": np.zeros(9), "s": 0.0}, 8)
    layout = layout.only(["w", "b"]) if name == "muon" else layout
    make = optax.contrib.muon if name == "muon" else getattr(optax, name)
    tx = zero.on_shards(zero.across_shards(make(0.1)), layout, "batch")
    shards = jax.tree.map(lambda x: np.ones((8, *x.shape), np.float32), layout.shard_shapes())
    found = collectives(lambda g, p: tx.update(g, tx.init(p), p), shards, shards)
    assert {kind for _, kind in found} == set(EXPECTED[name])
    for results, kind in found:
        for result in re.sub(r"/\*.*?\*/", "", results).split(", "):
            assert re.fullmatch(EXPECTED[name][kind], result), (kind, result)
    assert sum(kind != "all-reduce" for _, kind in found) == len(EXPECTED[name]) - 1


def test_transform_without_a_default_for_params() -> None:
    """A transform whose update takes params by position is called as optax calls it, also without params."""
    average = optax.GradientTransformationExtraArgs(lambda p: p, lambda updates, state, _, *, step: (updates, state))
    tx = zero.shard_optimizer(average, "batch", reduction=None)
    params = jnp.arange(16.0)

    def updates(params: jax.Array) -> jax.Array:
        return tx.update(params, tx.init(params), step=1)[0]

    found = jax.pmap(updates, "batch")(jnp.stack([params] * jax.local_device_count()))
    np.testing.assert_array_equal(found[0], params)
