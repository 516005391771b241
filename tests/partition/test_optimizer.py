"""The drop-in wrapper: what goes in and out, what is held, what is refused. Values are compared in `test_optax.py`."""

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

import zero

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
        ValueError, match=r"leaf 0/mu/b: expected a shard of \(3,\), got \(24,\); it is whole: zero.shard"
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
    ],
)
def test_guard_names_the_transform_and_what_is_right(tx: Any, message: str) -> None:
    params = {"w": jnp.zeros((13, 24)), "b": jnp.zeros((24,))}
    sharded = zero.shard_optimizer(tx, "batch")
    with pytest.raises(zero.NotElementwiseError, match=message):
        jax.make_jaxpr(lambda p: sharded.update(p, sharded.init(p), p), axis_env=[("batch", 8)])(params)


def test_line_searches_are_refused() -> None:
    tx = zero.shard_optimizer(zero.across_shards(optax.lbfgs()), "batch")

    def update(p: Any) -> Any:
        return tx.update(p, tx.init(p), p, value=1.0, grad=p, value_fn=lambda p: jnp.sum(p["w"]))

    with pytest.raises(zero.NotElementwiseError, match="value_fn is a function of whole parameters"):
        jax.make_jaxpr(update, axis_env=[("batch", 8)])({"w": jnp.zeros((13, 24))})


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
