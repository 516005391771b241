"""What the wrapped optimizer refuses, with the remedy in the message."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.partition.exact_training import local_grads, lower, make_params, replicate


def test_outside_pmap_names_the_remedy() -> None:
    tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    with pytest.raises(RuntimeError, match=r"inside pmap over 'batch'.*jax.pmap\(train_step, axis_name='batch'\)"):
        tx.update(make_params(), None, make_params())
    whole = tx.init(make_params())
    with pytest.raises(
        TypeError, match=r"is whole, .* zero.to_devices\(state\), in place of jax_utils.replicate\(state\)"
    ):
        lower(
            lambda g, s, p: tx.update(zero.local(g), s, p), local_grads(0), replicate(whole), replicate(make_params())
        )


def test_init_under_pmap_without_the_axis_is_refused() -> None:
    """Each device would hold the whole state, and no later message would name the axis."""
    tx = zero.shard_optimizer(optax.adam(0.1), "batch")
    for mapped in (jax.pmap(tx.init), jax.pmap(tx.init, axis_name="data")):
        with pytest.raises(RuntimeError, match=r"no axis 'batch'.*jax.pmap\(tx.init, axis_name='batch'\)"):
            mapped(replicate(make_params()))
    for make in (jax.jit(tx.init), partial(jax.eval_shape, tx.init)):  # no devices: the whole state
        assert make(make_params())[0].mu["b"].shape == (24,)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="reduction must be"):
        zero.shard_optimizer(optax.adam(0.1), "batch", reduction="max")  # type: ignore[arg-type]  # the mistake
    wrong_size = zero.shard_optimizer(optax.adam(0.1), zero.Axis("batch", (1, 4)))
    with pytest.raises(ValueError, match="axis 'batch' has 8 devices, but its Axis describes 4"):
        jax.pmap(wrong_size.init, "batch")(replicate(make_params()))
    tx = zero.shard_optimizer(optax.sgd(0.1), "batch")
    with pytest.raises(ValueError, match=r"leaf b: the parameter has shape \(24,\), its gradient \(2, 24\)"):
        per_example = replicate(jax.tree.map(lambda p: np.stack([p, p]), make_params()))
        jax.pmap(lambda g, p: tx.update(zero.local(g), tx.init(p), p), "batch")(per_example, replicate(make_params()))
    with pytest.raises(ValueError, match=r"leaf b: .* \(24,\), its gradient \(3,\); slices need reduction='scattered'"):
        slices = jax.tree.map(lambda p: p[:, :3] if p.ndim == 2 else p, replicate(make_params()))
        lower(lambda g, p: tx.update(zero.local(g), tx.init(p), p), slices, replicate(make_params()))
    adam = zero.shard_optimizer(optax.adam(0.1), "batch")
    whole = optax.adam(0.1).init(make_params())
    with pytest.raises(TypeError, match=r"a ShardedState, got a tuple: .*zero.to_devices\(opt_state, like=...\)"):
        jax.pmap(lambda g, p: adam.update(zero.local(g), whole, p), "batch")(local_grads(0), replicate(make_params()))
    with pytest.raises(
        ValueError, match=r"leaf 0/mu/b: expected a shard of \(3,\), got \(24,\); this is the whole array"
    ):
        labeled = zero.ShardedState(whole, jnp.arange(8, dtype=jnp.int32))
        jax.pmap(lambda g, p: adam.update(zero.local(g), labeled, p), "batch")(local_grads(0), replicate(make_params()))


def centered() -> optax.GradientTransformation:
    """A transform of the author's, of functions with names of their own."""

    def centered_update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: g - jnp.mean(g), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), centered_update)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            optax.clip_by_global_norm(100.0),
            r"clip_by_global_norm .* use zero.across_shards\(optax.clip_by_global_norm\(",
        ),
        (optax.chain(optax.adam(0.1), optax.clip_by_global_norm(1.0)), "clip_by_global_norm .* reduce_sum"),
        (
            optax.lamb(0.1),
            r"scale_by_trust_ratio .* use zero.across_shards\(optax.lamb\(.* optax.lars, or optax.scale_by_trust_ratio",
        ),
        (
            optax.adafactor(0.1, min_dim_size_to_factor=8),
            r"scale_by_factored_rms .* use zero.across_shards\(optax.adafactor\(.* optax.scale_by_factored_rms",
        ),
        (optax.contrib.muon(0.1), r"use zero.across_shards\(optax.contrib.muon\("),
        (optax.centralize(), "centralize is not element-wise: reduce_sum .* use zero.across_shards"),
        (optax.apply_if_finite(optax.adam(0.1), 3), "apply_if_finite .* reduce_and"),
        (optax.noisy_sgd(0.1, key=jax.random.key(0)), "add_noise .* random numbers"),
        (optax.sm3(0.1), "scale_by_sm3"),
        (optax.flatten(optax.adam(0.1)), r"flatten .* leave optax\.flatten out"),
        (optax.zero_nans(), r"zero_nans .* use zero\.across_shards"),
        (
            optax.chain(optax.scale(2.0), centered()),
            r"centered \(test_sharded_optimizer_refusals.py:\d+\) is not element",
        ),
        (optax.masked(optax.lamb(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), "scale_by_trust_ratio"),
        (optax.MultiSteps(optax.lamb(0.1), 2), "scale_by_trust_ratio"),
        (
            optax.stateless(lambda g, _: jax.tree.map(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y - y[:1], x), g)),
            r"<lambda> \(test_sharded_optimizer_refusals.py:\d+\) is not element-wise: slice",
        ),
    ],
)
def test_refusal_names_the_remedy(tx: Any, message: str) -> None:
    """The refusal names the transform and the remedy."""
    params = {"w": jnp.zeros((13, 24)), "b": jnp.zeros((24,))}
    sharded = zero.shard_optimizer(tx, "batch")
    with pytest.raises(zero.NotElementwiseError, match=message):
        lower(lambda p: sharded.update(zero.local(p), sharded.init(p), p), replicate(params))


def test_line_searches_are_refused() -> None:
    tx = zero.shard_optimizer(zero.across_shards(optax.lbfgs()), "batch")

    def update(p: Any) -> Any:
        of_line_search: Any = {"value": 1.0, "grad": p, "value_fn": lambda p: jnp.sum(p["w"])}
        return tx.update(zero.local(p), tx.init(p), p, **of_line_search)

    with pytest.raises(zero.NotElementwiseError, match="value_fn is a function of whole parameters"):
        lower(update, {"w": jnp.zeros((8, 13, 24))})


def test_line_search_after_a_sharded_optimizer() -> None:
    """The chain hands its function to the sharded optimizer as well, which does not call it."""
    search = optax.scale_by_backtracking_linesearch(5)
    plain = optax.chain(optax.scale_by_adam(), optax.scale(-1.0), search)
    directions = zero.shard_optimizer(optax.scale_by_adam(), "batch", reduction=None)
    tx = optax.chain(directions, optax.scale(-1.0), search)
    params = {"w": np.linspace(-1, 1, 39, dtype=np.float32).reshape(13, 3)}

    def update(tx: Any, params: Any) -> Any:
        value, grads = jax.value_and_grad(quartic)(params)
        return tx.update(grads, tx.init(params), params, value=value, grad=grads, value_fn=quartic)[0]

    found = jax.pmap(lambda p: update(tx, p), "batch")(replicate(params))
    expected = jax.jit(lambda p: update(plain, p))(params)
    np.testing.assert_allclose(found["w"], np.stack([expected["w"]] * 8), rtol=1e-6)


def quartic(params: Any) -> Any:
    return jnp.sum(jnp.square(jnp.square(params["w"]) - 0.5))


def test_update_shape_is_checked() -> None:
    """An update of another shape is refused.

    Padded and sliced, a row for all rows would be a row for the first.
    """
    for make in (lambda x: x[:1], lambda x: jnp.sum(x, 1, keepdims=True), lambda x: 0.0, lambda x: x[None]):
        tx = zero.shard_optimizer(optax.stateless(lambda g, _, make=make: jax.tree.map(make, g)), "batch")
        with pytest.raises(ValueError, match=r"leaf w: .* its update from \(13, 6\) to \("):
            lower(lambda g, tx=tx: tx.update(zero.local(g), tx.init(g), g), {"w": np.ones((8, 13, 6), np.float32)})


def test_state_shape_is_checked() -> None:
    """A state that grows or changes its shape is refused."""
    p = {"w": np.ones((8, 13, 6), np.float32)}
    grows = zero.shard_optimizer(optax.GradientTransformation(lambda p: [], lambda u, s, p=None: (u, [*s, u])), "batch")
    with pytest.raises(ValueError, match="a different state from its init: it has, unexpectedly, 0/w"):
        lower(lambda g: grows.update(zero.local(g), grows.init(g), g), p)
    widens = zero.shard_optimizer(
        optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, jax.tree.map(lambda x: x[:5], u))), "batch"
    )
    with pytest.raises(ValueError, match=r"leaf w: .* its state from \(13, 6\) to \(5, 6\)"):
        lower(lambda g: widens.update(zero.local(g), widens.init(g), g), p)


def test_float0_gradients_are_explained() -> None:
    tx = zero.shard_optimizer(optax.sgd(0.5), "batch")

    def run(params: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(p["w"]) * p["n"][0], allow_int=True)(params)
        return tx.update(zero.local(grads), tx.init(params), params)

    with pytest.raises(ValueError, match="leaf n: its gradient is float0, that of an integer"):
        lower(run, {"w": np.ones((8, 3), np.float32), "n": np.ones((8, 16), int)})


def normalized(tx: Any) -> Any:
    """A wrapper that optax does not know: divides by the largest gradient."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return tx.update(jax.tree.map(lambda g: g / jnp.max(jnp.abs(g)), updates), state, params)

    return optax.GradientTransformation(tx.init, update)


AROUND: dict[str, Any] = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("sharded", tx)),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite),
    "contrib.sam": lambda tx: optax.contrib.sam(tx, optax.sgd(0.1)),
    "contrib.mechanize": lambda tx: optax.contrib.mechanize(tx),
    "flatten": optax.flatten,
    "a user's own": lambda tx: normalized(tx),
    "a user's own, jitted": lambda tx: normalized(optax.GradientTransformation(tx.init, jax.jit(tx.update))),
}


READ = r"zero.local marked, .* inside: zero.shard_optimizer\(optax.chain\(.*lax.pmean.* reduction=None"


@pytest.mark.parametrize("name", AROUND)
def test_transforms_of_local_gradients_are_refused(name: str) -> None:
    """What reads gradients before they are reduced gets none, whoever wrote it."""
    grads = {"w": np.ones((8, 13, 6), np.float32)}
    around = AROUND[name]
    tx = around(zero.shard_optimizer(optax.sgd(0.1), "batch"))
    with pytest.raises(ValueError, match=READ):
        lower(lambda g: tx.update(zero.local(g), tx.init(g), g), grads)
    with pytest.raises((TypeError, ValueError), match=r"zero.local(\(grads\)| marked)"):
        lower(lambda g: tx.update(g, tx.init(g), g), grads)
    reduced = around(zero.shard_optimizer(optax.sgd(0.1), "batch", reduction=None))
    first = optax.chain(zero.shard_optimizer(optax.sgd(0.1), "batch"), optax.scale(0.5))
    lower(lambda g: reduced.update(g, reduced.init(g), g), grads)
    lower(lambda g: first.update(zero.local(g), first.init(g), g), grads)


def test_errors_of_optax_name_the_remedy() -> None:
    """A function of optax that checks for arrays by itself quotes the gradient, which says where it belongs."""
    grads = {"w": np.ones((8, 13, 6), np.float32)}
    tx = optax.chain(optax.clip_by_block_rms(0.5), zero.shard_optimizer(optax.sgd(0.1), "batch"))
    with pytest.raises(ValueError, match=r"abs_sq.*read it inside zero\.shard_optimizer"):
        lower(lambda g: tx.update(zero.local(g), tx.init(g), g), grads)


def test_update_traced_before() -> None:
    """An update that was traced alone reads nothing inside a chain that clips."""
    sharded = zero.shard_optimizer(optax.sgd(0.1), "batch")
    jitted = jax.jit(lambda g, s, p: sharded.update(zero.local(g), s, p))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.GradientTransformation(sharded.init, jitted))
    grads = {"w": np.ones((8, 13, 6), np.float32)}
    lower(lambda g: jitted(g, sharded.init(g), g), grads)
    with pytest.raises(ValueError, match=READ):
        lower(lambda g: tx.update(zero.local(g), tx.init(g), g), grads)


def test_gradients_without_a_mark() -> None:
    """Gradients that are not marked, a kept pmean among them, are refused with the word that is missing."""
    grads = {"w": np.ones((8, 13, 6), np.float32), "b": np.ones((8, 6), np.float32)}
    tx = zero.shard_optimizer(optax.sgd(0.1), "batch")
    for reduce in (lambda g: g, lambda g: jax.lax.pmean(g, "batch"), lambda g: {**zero.local(g), "b": g["b"]}):
        with pytest.raises(
            TypeError, match=r"leaf b: .* zero.local\(grads\) where .* lax.pmean\(grads, 'batch'\)\. .* reduction=None"
        ):
            lower(lambda g, reduce=reduce: tx.update(reduce(g), tx.init(g), g), grads)
    reduced = zero.shard_optimizer(optax.sgd(0.1), "batch", reduction=None)
    with pytest.raises(TypeError, match=r"leaf b: .* reduction=None expects reduced ones"):
        lower(lambda g: reduced.update(zero.local(g), reduced.init(g), g), grads)


@pytest.mark.parametrize(
    "read",
    [
        lambda g: g * 2,
        lambda g: 2 - g,
        lambda g: jnp.ones(()) * g,
        lambda g: -g,
        lambda g: g[0],
        lambda g: float(g),
        lambda g: bool(g),
        lambda g: np.asarray(g),
        jnp.sum,
        jax.lax.stop_gradient,
        jax.jit(lambda g: g),
        lambda g: jax.lax.cond(True, lambda g: g, lambda g: g, g),
        lambda g: jax.lax.scan(lambda g, _: (g, None), g, length=2),
        lambda g: optax.apply_updates(jnp.ones(3), g),
        jax.device_get,
    ],
)
def test_marked_gradients_are_no_arrays(read: Any) -> None:
    with pytest.raises(ValueError, match=READ):
        read(zero.local(jnp.ones(3)))
    with pytest.raises(ValueError, match=r"has no 'astype': .* inside: zero.shard_optimizer"):
        zero.local(jnp.ones(3)).astype(jnp.bfloat16)
    assert not hasattr(zero.local(jnp.ones(3)), "real")


@pytest.mark.parametrize("name", AROUND)
def test_transforms_of_gradient_slices(name: str) -> None:
    """Slices are read by no transform around the optimizer, marked or not.

    Each device would clip its slices by their own norm, or wait alone in a gather that it alone decided on.
    """
    scattered = zero.shard_optimizer(optax.sgd(0.1), "batch", reduction="scattered")
    tx = AROUND[name](scattered)
    first = optax.chain(scattered, optax.scale(0.5))

    def run(tx: Any, mark: Any, params: Any) -> Any:
        slices = zero.scatter_mean(params, zero.make_layout(params, 8), "batch")
        return tx.update(mark(slices), tx.init(params), params)

    def unmarked(slices: Any) -> Any:
        return slices

    params = {"w": np.ones((8, 13, 6), np.float32)}
    with pytest.raises(ValueError, match=READ):
        lower(partial(run, tx, zero.local), params)
    for other in (tx, first):
        with pytest.raises(
            (TypeError, ValueError), match=r"a slice that zero.local marks, after the last|zero.local marked"
        ):
            lower(partial(run, other, unmarked), params)
    lower(partial(run, first, zero.local), params)
