"""The drop-in wrapper: what goes in and out, what is held, what is refused. Values are compared in `test_optax.py`."""

import re
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
from optax.contrib import reduce_on_plateau

import zero
from zero.partition.collectives import fill_padding

AXES = {
    "flat": zero.Axis("batch", (1, 8)),
    "phases": zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
    "hybrid": zero.Axis("batch", (2, 4)),
    "both": zero.Axis("batch", (2, 2, 2), (0, 4, 1, 5, 2, 6, 3, 7)),
}


def make_params() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"w": (13, 24), "b": (24,), "s": (), "t": (3,)}
    return {name: rng.integers(-8, 9, shape).astype(np.float32) / 8 for name, shape in shapes.items()}


def local_grads(step: int) -> Any:
    """Per leaf `(8, ...)`; sums over devices are exact."""
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: rng.integers(-8, 9, (8, *p.shape)).astype(np.float32) / 8, make_params())


def replicate(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x] * 8), tree)


def train(tx: optax.GradientTransformationExtraArgs, params: Any, steps: int = 3, **extra: Any) -> tuple[Any, Any]:
    """A data-parallel program; parameters and state of all devices out."""
    params = replicate(params)
    state = jax.pmap(tx.init, "batch")(params)

    @partial(jax.pmap, axis_name="batch")
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        params, state = step(params, state, local_grads(i))
    zero.check_replicated(params, "batch")
    return params, state


def train_unsharded(
    tx: optax.GradientTransformation, params: Any, reduce: Callable[..., Any] = jnp.mean, steps: int = 3
) -> Any:
    state = tx.init(params)
    for i in range(steps):
        grads = jax.tree.map(lambda g: reduce(g, 0), local_grads(i))
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def lower(fn: Callable[..., Any], *args: Any) -> Any:
    """Traces in a real pmap; nothing is computed."""
    return jax.pmap(fn, "batch").lower(*args)


def assert_close(got: Any, expected: Any) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x[0], y, rtol=0, atol=1e-6 * np.max(np.abs(y)), err_msg=str(path))


@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
@pytest.mark.parametrize("name", ["adamw", "lamb", "clipped adam"])
def test_groups_equal_unsharded(name: str, axis: zero.Axis) -> None:
    plain, sharded = {
        "adamw": (optax.adamw(0.1), optax.adamw(0.1)),
        "lamb": (optax.lamb(0.1), zero.lamb(0.1)),
        "clipped adam": (
            optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
            optax.chain(zero.clip_by_global_norm(0.5), optax.adam(0.1)),
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
    assert_close(
        train(tx, make_params())[0], train_unsharded(optax.sgd(0.5, momentum=0.5), make_params(), reduce or jnp.mean)
    )


def test_narrow_gradients_are_summed_in_float32_and_reach_the_transform_as_they_were() -> None:
    seen = []

    def look(updates: jax.Array, _: Any) -> jax.Array:
        seen.append(updates.dtype)
        return updates

    tx = zero.shard_optimizer(optax.stateless(look), "batch", reduction="sum")
    # 256 + 1 is not a bfloat16: a sum that is rounded at every hop loses the ones.
    grads = jnp.where(jnp.arange(8) == 0, 256, 1).astype(jnp.bfloat16)[:, None] * jnp.ones((8, 16), jnp.bfloat16)
    updates = jax.pmap(lambda g: tx.update(g, tx.init(g), g)[0], "batch")(grads)
    assert updates.dtype == jnp.bfloat16 and seen[-1] == jnp.bfloat16
    np.testing.assert_array_equal(updates.astype(jnp.float32), jnp.asarray(263, jnp.bfloat16).astype(jnp.float32))


def test_wire_dtype_rounds_what_travels() -> None:
    tx = zero.shard_optimizer(optax.identity(), "batch", reduction="sum", wire_dtype=jnp.bfloat16)
    grads = jnp.broadcast_to(jnp.float32(1 + 2**-12), (8, 16))
    updates = jax.pmap(lambda g: tx.update(g, tx.init(g), g)[0], "batch")(grads)
    np.testing.assert_array_equal(updates, 8.0)


def test_outside_pmap_names_the_remedy() -> None:
    tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    with pytest.raises(RuntimeError, match=r"inside pmap over 'batch'.*jax.pmap\(tx.init, axis_name='batch'\)"):
        tx.init(make_params())
    with pytest.raises(RuntimeError, match="inside pmap"):
        tx.update(make_params(), None, make_params())


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="reduction must be"):
        zero.shard_optimizer(optax.adam(0.1), "batch", reduction="max")  # type: ignore[arg-type]  # the mistake
    wrong_size = zero.shard_optimizer(optax.adam(0.1), zero.Axis("batch", (1, 4)))
    with pytest.raises(ValueError, match="axis 'batch' has 8 devices, but its Axis describes 4"):
        jax.pmap(wrong_size.init, "batch")(replicate(make_params()))
    tx = zero.shard_optimizer(optax.sgd(0.1), "batch")
    with pytest.raises(ValueError, match=r"leaf b: the parameter has shape \(24,\), its gradient \(2, 24\)"):
        per_example = replicate(jax.tree.map(lambda p: np.stack([p, p]), make_params()))
        jax.pmap(lambda g, p: tx.update(g, tx.init(p), p), "batch")(per_example, replicate(make_params()))
    adam = zero.shard_optimizer(optax.adam(0.1), "batch")
    whole = optax.adam(0.1).init(make_params())
    with pytest.raises(TypeError, match=r"a ShardedState, got a tuple: .*zero.shard_state\(opt_state, tx, params\)"):
        jax.pmap(lambda g, p: adam.update(g, whole, p), "batch")(local_grads(0), replicate(make_params()))
    with pytest.raises(
        ValueError, match=r"leaf 0/mu/b: expected a shard of \(3,\), got \(24,\); that is the whole array"
    ):
        labelled = zero.ShardedState(whole, jnp.arange(8, dtype=jnp.int32))
        jax.pmap(lambda g, p: adam.update(g, labelled, p), "batch")(local_grads(0), replicate(make_params()))
    with pytest.raises(RuntimeError, match=r"inside pmap over 'batch'.*zero.shard_state\(opt_state, tx, params\)"):
        adam.init(make_params())


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.clip_by_global_norm(100.0), "clip_by_global_norm .* use zero.clip_by_global_norm"),
        (optax.chain(optax.adam(0.1), optax.clip_by_global_norm(1.0)), "clip_by_global_norm .* reduce_sum"),
        (optax.lamb(0.1), "scale_by_trust_ratio .* use zero.lamb or zero.lars"),
        (optax.adafactor(0.1, min_dim_size_to_factor=8), "scale_by_factored_rms .* use zero.adafactor"),
        (optax.contrib.muon(0.1), "use zero.muon"),
        (optax.centralize(), "centralize is not element-wise: reduce_sum .* use zero.across_shards"),
        (optax.apply_if_finite(optax.adam(0.1), 3), "apply_if_finite .* reduce_and"),
        (optax.noisy_sgd(0.1, key=jax.random.key(0)), "add_noise .* random numbers"),
        (optax.sm3(0.1), "scale_by_sm3"),
        (optax.masked(optax.lamb(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), "scale_by_trust_ratio"),
        (optax.MultiSteps(optax.lamb(0.1), 2), "scale_by_trust_ratio"),
        (
            optax.stateless(lambda g, _: jax.tree.map(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y - y[:1], x), g)),
            "stateless is not element-wise: slice",
        ),
    ],
)
def test_guard_names_the_transform_and_what_is_right(tx: Any, message: str) -> None:
    params = {"w": jnp.zeros((13, 24)), "b": jnp.zeros((24,))}
    sharded = zero.shard_optimizer(tx, "batch")
    with pytest.raises(zero.NotElementwiseError, match=message):
        lower(lambda p: sharded.update(p, sharded.init(p), p), replicate(params))


def test_line_searches_are_refused() -> None:
    tx = zero.shard_optimizer(zero.across_shards(optax.lbfgs()), "batch")

    def update(p: Any) -> Any:
        return tx.update(p, tx.init(p), p, value=1.0, grad=p, value_fn=lambda p: jnp.sum(p["w"]))

    with pytest.raises(zero.NotElementwiseError, match="value_fn is a function of whole parameters"):
        lower(update, {"w": jnp.zeros((8, 13, 24))})


def test_trust_runs_the_transform_as_it_is() -> None:
    tx = zero.shard_optimizer(optax.clip_by_global_norm(1.0), "batch", trust=True)
    updates = jax.pmap(lambda g: tx.update(g, tx.init(g), g)[0], "batch")(jnp.full((8, 16), 3.0))
    # The norm of a slice of two, as promised to nobody.
    np.testing.assert_allclose(updates, 1 / np.sqrt(2), rtol=1e-6)


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
        lambda w: eqx.filter(eqx.nn.MLP(13, 24, 7, 2, key=jax.random.key(0)), eqx.is_array),
        lambda w: nnx.state(nnx.Linear(13, 24, rngs=nnx.Rngs(0))),
    ],
    ids=["empty", "array", "nested", "names of the state", "dtypes", "no elements", "Equinox", "NNX"],
)
def test_any_tree(make: Callable[[Any], Any]) -> None:
    params = make(jnp.arange(13.0 * 24).reshape(13, 24) / 64)
    tx = optax.adamw(0.1)
    sharded = zero.shard_optimizer(tx, "batch")

    def run(tx: Any) -> Any:
        def steps(params: Any) -> Any:
            state = tx.init(params)
            for _ in range(2):
                updates, state = tx.update(params, state, params)
                params = optax.apply_updates(params, updates)
            return params

        return steps

    got = jax.pmap(run(sharded), "batch", axis_size=8)(replicate(params)) if jax.tree.leaves(params) else params
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(run(tx))(params)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x[0], np.complex64), np.asarray(y, np.complex64), rtol=2e-6, atol=1e-7)


def test_empty_tree() -> None:
    tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    updates, _ = jax.pmap(lambda _: tx.update({}, tx.init({}), {}), "batch")(jnp.zeros(8))
    assert updates == {}


def test_accumulation_inside_and_outside() -> None:
    expected = train_unsharded(optax.MultiSteps(optax.adam(0.1), 2), make_params(), steps=4)
    inside = zero.shard_optimizer(optax.MultiSteps(optax.adam(0.1), 2), "batch")
    assert_close(train(inside, make_params(), steps=4)[0], expected)
    outside = optax.MultiSteps(zero.shard_optimizer(optax.adam(0.1), "batch"), 2).gradient_transformation()
    assert_close(train(outside, make_params(), steps=4)[0], expected)


def test_extra_arguments_reach_the_transform() -> None:
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    _, state = train(zero.shard_optimizer(tx, "batch"), make_params(), steps=4, value=jnp.float32(1.0))
    assert state.inner[1].scale[0] < 1


def test_state_is_laid_out_like_the_parameters_and_moves_to_another_number_of_devices() -> None:
    tx = optax.inject_hyperparams(optax.adamw)(optax.constant_schedule(0.1))
    params, state = train(zero.shard_optimizer(tx, "batch"), make_params())
    layout = zero.derive_layout(tx.init, zero.make_layout(make_params(), 8))
    whole = zero.to_global(state.inner, layout, "batch")
    mu = whole.inner_state[0].mu["w"]
    assert mu.shape == (13, 24)

    sharded = zero.shard_optimizer(tx, "batch")
    grads = local_grads(3)
    expected = jax.pmap(lambda p, s, g: optax.apply_updates(p, sharded.update(g, s, p)[0]), "batch")(
        params, state, grads
    )
    quarter = zero.derive_layout(tx.init, zero.make_layout(make_params(), 4))
    cropped = quarter.map(lambda leaf, x: np.asarray(x)[tuple(map(slice, leaf.padded_shape))], whole)
    shards = zero.ShardedState(zero.from_global(cropped, quarter, "batch"), jnp.arange(4, dtype=jnp.int32))
    mean = jax.tree.map(lambda g: np.stack([g.mean(0)] * 4), grads)
    four = jax.tree.map(lambda p: np.asarray(p[:4]), params)
    got = jax.pmap(lambda p, s, g: optax.apply_updates(p, sharded.update(g, s, p)[0]), "batch")(four, shards, mean)
    assert_close(got, jax.tree.map(lambda p: p[0], expected))


def test_on_shards_takes_and_gives_shards() -> None:
    params = {"blocks": {"w": make_params()["w"]}, "b": make_params()["b"]}
    layout = zero.make_layout(params, 8, stacked=["blocks"])
    tx = zero.on_shards(optax.chain(zero.clip_by_global_norm(0.1), optax.adam(0.1)), layout, "batch")
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
def test_global_norm_does_not_read_padding_and_knows_every_dtype(axis: zero.Axis) -> None:
    params = {"w": np.ones((13, 3), np.float32), "c": np.full((9,), 3 + 4j, np.complex64), "n": np.full((9,), 2, int)}
    layout = zero.make_layout(params, axis.shards)

    def run(_: jax.Array) -> jax.Array:
        # What an update without an epsilon leaves where there is no gradient: 0 / 0.
        spoilt = layout.map(lambda leaf, x: fill_padding(x, leaf, axis, 7), zero.shard(params, layout, axis))
        return zero.global_norm(spoilt, layout, axis)

    np.testing.assert_allclose(jax.pmap(run, "batch")(jnp.zeros(8)), np.sqrt(39 + 9 * 25 + 9 * 4), rtol=1e-6)


def test_an_update_of_another_shape_is_refused() -> None:
    """Padded and sliced, a row for all rows would be a row for the first."""
    for make in (lambda x: x[:1], lambda x: jnp.sum(x, 1, keepdims=True), lambda x: 0.0, lambda x: x[None]):
        tx = zero.shard_optimizer(optax.stateless(lambda g, _, make=make: jax.tree.map(make, g)), "batch")
        with pytest.raises(ValueError, match=r"leaf w: the update of \(13, 6\) became one of \("):
            lower(lambda g, tx=tx: tx.update(g, tx.init(g), g), {"w": np.ones((8, 13, 6), np.float32)})


def test_a_state_that_grows_or_changes_its_shape_is_refused() -> None:
    p = {"w": np.ones((8, 13, 6), np.float32)}
    grows = zero.shard_optimizer(optax.GradientTransformation(lambda p: [], lambda u, s, p=None: (u, [*s, u])), "batch")
    with pytest.raises(ValueError, match="the layout has no leaf 0/w"):
        lower(lambda g: grows.update(g, grows.init(g), g), p)
    widens = zero.shard_optimizer(
        optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, jax.tree.map(lambda x: x[:5], u))), "batch"
    )
    with pytest.raises(ValueError, match=r"leaf w: the state of \(13, 6\) became one of \(5, 6\)"):
        lower(lambda g: widens.update(g, widens.init(g), g), p)


@pytest.mark.parametrize("tx", [optax.sgd(0.5, momentum=0.5), optax.sgd(0.5)])
def test_gradients_may_be_none(tx: Any) -> None:
    params, grads = make_params(), {**local_grads(0), "w": None}
    mean = jax.tree.map(lambda g: jnp.mean(g, 0), grads)
    expected = tx.update(mean, tx.update(mean, tx.init(params), params)[1], params)[0]
    sharded = zero.shard_optimizer(tx, "batch")

    def run(grads: Any, params: Any) -> Any:
        state = sharded.update(grads, sharded.init(params), params)[1]
        return sharded.update(grads, state, params)[0]

    got = jax.pmap(run, "batch")(grads, replicate(params))
    assert got["w"] is None
    assert_close(got, expected)


def test_float0_gradients_are_explained() -> None:
    tx = zero.shard_optimizer(optax.sgd(0.5), "batch")

    def run(params: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(p["w"]) * p["n"][0], allow_int=True)(params)
        return tx.update(grads, tx.init(params), params)

    with pytest.raises(ValueError, match="leaf n: its gradient is float0, that of an integer"):
        lower(run, {"w": np.ones((8, 3), np.float32), "n": np.ones((8, 16), int)})


def test_trees_that_differ_as_optax_allows() -> None:
    """Parameters in a FrozenDict beside gradients in a dict; pairs of parameters beside gradients of one of them."""
    params, grads = make_params(), local_grads(0)
    mean = jax.tree.map(lambda g: jnp.mean(g, 0), grads)
    sgd, lookahead = optax.sgd(0.5, momentum=0.5), optax.lookahead(optax.sgd(0.5), 1, 0.5)
    pair = optax.LookaheadParams.init_synced(params)
    moved = optax.LookaheadParams(params, jax.tree.map(lambda p: p + 1, params))
    sharded = {name: zero.shard_optimizer(tx, "batch") for name, tx in {"sgd": sgd, "lookahead": lookahead}.items()}

    def run(grads: Any, params: Any, moved: Any) -> Any:
        first = sharded["sgd"].update(grads, sharded["sgd"].init(params), freeze(params))[0]
        return first, sharded["lookahead"].update(grads, sharded["lookahead"].init(moved), moved)[0]

    got = jax.pmap(run, "batch")(grads, replicate(params), replicate(moved))
    assert_close(got[0], sgd.update(mean, sgd.init(params))[0])
    assert_close(got[1], lookahead.update(mean, lookahead.init(pair), moved)[0])


@pytest.mark.parametrize("wrapper", [lambda tx: tx, lambda tx: optax.MultiSteps(tx, 1)])
def test_accumulation_passes_extra_arguments_on(wrapper: Any) -> None:
    tx = zero.shard_optimizer(wrapper(optax.chain(optax.sgd(0.1), reduce_on_plateau(factor=0.5, patience=1))), "batch")
    params, _ = train(tx, make_params(), steps=4, value=jnp.float32(1.0))
    plain = optax.with_extra_args_support(optax.chain(optax.sgd(0.1), reduce_on_plateau(factor=0.5, patience=1)))
    wanted = optax.GradientTransformation(plain.init, partial(plain.update, value=jnp.float32(1.0)))
    assert_close(params, train_unsharded(wanted, make_params(), steps=4))


def test_complex_and_integer_leaves() -> None:
    """On a narrow wire as well: only floats are rounded."""
    local = {"c": np.arange(8)[:, None] + 1j * np.arange(9)[None], "n": np.arange(8)[:, None] * 1000 + np.arange(9)}
    local = {"c": local["c"].astype(np.complex64), "n": local["n"].astype(np.int32)}
    whole = jax.tree.map(lambda x: x[0], local)
    expected = jax.tree.map(lambda x: x.mean(0), local)

    def run(grads: Any, wire: Any) -> Any:
        tx = zero.shard_optimizer(optax.identity(), "batch", wire_dtype=wire)
        return tx.update(grads, tx.init(whole), whole)[0]

    for wire in (None, jnp.bfloat16, jnp.int8):
        got = jax.pmap(partial(run, wire=wire), "batch")(local)
        assert got["c"].dtype == np.complex64 and got["n"].dtype == np.float32  # as pmean
        for name, x in expected.items():
            np.testing.assert_allclose(got[name][3], x, rtol=1e-6)


def test_sm3_after_a_nan() -> None:
    """XLA's maximum over CPU devices loses it, and so would the accumulators."""
    params, grads = {"w": np.ones((13, 6), np.float32)}, np.ones((13, 6), np.float32)
    grads[12, 5] = np.nan
    tx = zero.shard_optimizer(zero.across_shards(optax.sm3(0.1)), "batch")
    plain = optax.sm3(0.1)

    def run(tx: Any, grads: Any) -> Any:
        _, state = tx.update({"w": grads}, tx.init(params), params)
        return tx.update({"w": jnp.ones((13, 6))}, state, params)[0]

    got = jax.pmap(partial(run, tx), "batch")(np.stack([grads] * 8))
    np.testing.assert_allclose(got["w"][2], run(plain, grads)["w"], rtol=1e-6)


def test_weak_types_are_kept_so_that_a_scan_accepts_the_state() -> None:
    def run(_: jax.Array) -> Any:
        params = {"w": jnp.broadcast_to(jnp.asarray(1.0), (13,)), "v": jnp.ones(9)}
        assert jax.typeof(params["w"]).weak_type
        tx = zero.shard_optimizer(optax.trace(0.5), "batch")
        state = tx.init(params)
        assert [x.weak_type for x in jax.tree.leaves(jax.tree.map(jax.typeof, state.inner))] == [False, True]
        return jax.lax.scan(lambda s, _: (tx.update(params, s, params)[1], None), state, None, length=3)[0]

    assert float(jax.pmap(run, "batch")(jnp.zeros(8)).inner.trace["w"][0, 0]) == 1.75


def test_strict_promotion() -> None:
    tx = zero.shard_optimizer(optax.chain(zero.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9)), "batch")
    grads = {"w": np.ones((8, 13, 6), np.float32), "h": np.ones((8, 13), np.float32)}
    with jax.numpy_dtype_promotion("strict"):
        lower(lambda g: tx.update(g, tx.init(g), g), grads)
        narrow = zero.shard_optimizer(optax.sgd(0.1), "batch")
        lower(lambda g: narrow.update(g, narrow.init(g), g), jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads))


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("sharded", tx)),
        lambda tx: optax.apply_if_finite(tx, 3),
    ],
)
def test_transforms_of_local_gradients_are_refused(around: Any) -> None:
    grads = {"w": np.ones((8, 13, 6), np.float32)}
    tx = around(zero.shard_optimizer(optax.sgd(0.1), "batch"))
    with pytest.raises(ValueError, match="transforms each device's own gradients before they are reduced"):
        lower(lambda g: tx.update(g, tx.init(g), g), grads)
    reduced = around(zero.shard_optimizer(optax.sgd(0.1), "batch", reduction=None))
    first = optax.chain(zero.shard_optimizer(optax.sgd(0.1), "batch"), optax.scale(0.5))
    lower(lambda g: reduced.update(g, reduced.init(g), g), grads)
    lower(lambda g: first.update(g, first.init(g), g), grads)


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
    make = getattr(zero, name)
    tx = zero.on_shards(make(0.1), layout, "batch")
    shards = jax.tree.map(lambda x: np.ones((8, *x.shape), np.float32), layout.shard_shapes())
    found = collectives(lambda g, p: tx.update(g, tx.init(p), p), shards, shards)
    assert {kind for _, kind in found} == set(EXPECTED[name])
    for results, kind in found:
        for result in re.sub(r"/\*.*?\*/", "", results).split(", "):
            assert re.fullmatch(EXPECTED[name][kind], result), (kind, result)
    assert sum(kind != "all-reduce" for _, kind in found) == len(EXPECTED[name]) - 1
