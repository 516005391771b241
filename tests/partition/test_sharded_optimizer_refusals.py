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
    with pytest.raises(ValueError, match=r"leaf b: .* \(24,\), its gradient \(3,\); slices need reduction='scattered'"):
        slices = jax.tree.map(lambda p: p[:, :3] if p.ndim == 2 else p, replicate(make_params()))
        lower(lambda g, p: tx.update(g, tx.init(p), p), slices, replicate(make_params()))
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
def test_refusal_names_the_remedy(tx: Any, message: str) -> None:
    """The refusal names the transform and the remedy."""
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


def test_update_shape_is_checked() -> None:
    """An update of another shape is refused.

    Padded and sliced, a row for all rows would be a row for the first.
    """
    for make in (lambda x: x[:1], lambda x: jnp.sum(x, 1, keepdims=True), lambda x: 0.0, lambda x: x[None]):
        tx = zero.shard_optimizer(optax.stateless(lambda g, _, make=make: jax.tree.map(make, g)), "batch")
        with pytest.raises(ValueError, match=r"leaf w: .* its update of \(13, 6\) into one of \("):
            lower(lambda g, tx=tx: tx.update(g, tx.init(g), g), {"w": np.ones((8, 13, 6), np.float32)})


def test_state_shape_is_checked() -> None:
    """A state that grows or changes its shape is refused."""
    p = {"w": np.ones((8, 13, 6), np.float32)}
    grows = zero.shard_optimizer(optax.GradientTransformation(lambda p: [], lambda u, s, p=None: (u, [*s, u])), "batch")
    with pytest.raises(ValueError, match="another state than its init: it has, unexpectedly, 0/w"):
        lower(lambda g: grows.update(g, grows.init(g), g), p)
    widens = zero.shard_optimizer(
        optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, jax.tree.map(lambda x: x[:5], u))), "batch"
    )
    with pytest.raises(ValueError, match=r"leaf w: .* its state of \(13, 6\) into one of \(5, 6\)"):
        lower(lambda g: widens.update(g, widens.init(g), g), p)


def test_float0_gradients_are_explained() -> None:
    tx = zero.shard_optimizer(optax.sgd(0.5), "batch")

    def run(params: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(p["w"]) * p["n"][0], allow_int=True)(params)
        return tx.update(grads, tx.init(params), params)

    with pytest.raises(ValueError, match="leaf n: its gradient is float0, that of an integer"):
        lower(run, {"w": np.ones((8, 3), np.float32), "n": np.ones((8, 16), int)})


AROUND = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("sharded", tx)),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite),
    "contrib.sam": lambda tx: optax.contrib.sam(tx, optax.sgd(0.1)),
    "contrib.mechanize": lambda tx: optax.contrib.mechanize(tx),
}


@pytest.mark.parametrize("name", AROUND)
def test_transforms_of_local_gradients_are_refused(name: str) -> None:
    grads = {"w": np.ones((8, 13, 6), np.float32)}
    around = AROUND[name]
    tx = around(zero.shard_optimizer(optax.sgd(0.1), "batch"))
    with pytest.raises(ValueError, match=rf"optax.{name} .* each device's own gradients before they are reduced"):
        lower(lambda g: tx.update(g, tx.init(g), g), grads)
    reduced = around(zero.shard_optimizer(optax.sgd(0.1), "batch", reduction=None))
    first = optax.chain(zero.shard_optimizer(optax.sgd(0.1), "batch"), optax.scale(0.5))
    lower(lambda g: reduced.update(g, reduced.init(g), g), grads)
    lower(lambda g: first.update(g, first.init(g), g), grads)


@pytest.mark.parametrize("name", ["chain", "named_chain", "apply_if_finite"])
def test_transforms_of_gradient_slices(name: str) -> None:
    """Transforms of slices of gradients are refused.

    Each device would clip its slices by their own norm, or wait alone in a gather that it alone decided on.
    """
    scattered = zero.shard_optimizer(optax.sgd(0.1), "batch", reduction="scattered")
    tx = AROUND[name](scattered)
    first = optax.chain(scattered, optax.scale(0.5))

    def run(tx: Any, params: Any) -> Any:
        return tx.update(zero.scatter_mean(params, zero.make_layout(params, 8), "batch"), tx.init(params), params)

    params = {"w": np.ones((8, 13, 6), np.float32)}
    with pytest.raises(ValueError, match=rf"optax.{name} .* slices .* inside: .*, reduction='scattered'"):
        lower(partial(run, tx), params)
    lower(partial(run, first), params)
