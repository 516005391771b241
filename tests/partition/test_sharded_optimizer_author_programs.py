"""What authors of pmap programs put around a sharded optimizer: it works, or is refused with what to write instead."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jmp  # type: ignore[import-untyped]
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import zero
from tests.partition.exact_training import lower, replicate

SHAPES = {"w": (16, 3), "b": (16,), "s": ()}
ADAM = optax.adam(2.0**-4)


def make_params() -> Any:
    return {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def grads_with_a_nan() -> Any:
    """Of eight devices, alike but for a NaN on the sixth."""
    grads = replicate(jax.tree.map(lambda x: np.arange(x.size, dtype=np.float32).reshape(x.shape), make_params()))
    grads["w"][5, 3, 1] = np.nan
    return grads


REMEDIES: dict[str, Any] = {
    "zero_nans": lambda: optax.zero_nans(),
    "apply_if_finite": lambda: optax.apply_if_finite(ADAM, 2),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.5),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_remedy_of_a_refusal_is_right(name: str) -> None:
    """What users take for element-wise is refused, and what the message says is equal to the unsharded program.

    With a NaN on one device, whose mean is NaN, too.
    """
    make, params, grads = REMEDIES[name], make_params(), grads_with_a_nan()
    with pytest.raises(
        zero.NotElementwiseError, match=rf"^{name} is not .* use zero.across_shards\(optax.{name}\(\.\.\.\)\)"
    ):
        refused = zero.shard_optimizer(make(), "batch")
        lower(lambda g, p: refused.update(zero.local(g), refused.init(p), p), grads, replicate(params))

    plain = optax.chain(make(), optax.scale(0.5))
    tx = zero.shard_optimizer(optax.chain(zero.across_shards(make()), optax.scale(0.5)), "batch")
    found, state = jax.pmap(lambda g, p: tx.update(zero.local(g), tx.init(p), p), "batch")(grads, replicate(params))
    mean = jax.tree.map(lambda g: jnp.mean(g, 0), grads)
    expected, right = jax.jit(plain.update)(mean, plain.init(params), params)
    np.testing.assert_equal(np.isnan(expected["w"]).any(), name == "clip_by_block_rms")
    zero.check_replicated(found, "batch")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[0], y, rtol=1e-6), found, expected)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), zero.to_host(state), right)


def test_flatten_is_left_out() -> None:
    """`optax.flatten` is refused with what to do, which gives the same numbers."""
    params, grads = make_params(), replicate(make_params())
    inside = zero.shard_optimizer(optax.flatten(ADAM), "batch")
    with pytest.raises(zero.NotElementwiseError, match=r"^flatten is not .* leave optax\.flatten out"):
        lower(lambda g, p: inside.update(zero.local(g), inside.init(p), p), grads, replicate(params))
    tx, plain = zero.shard_optimizer(ADAM, "batch"), optax.flatten(ADAM)
    found, _ = jax.pmap(lambda g, p: tx.update(zero.local(g), tx.init(p), p), "batch")(grads, replicate(params))
    expected, _ = plain.update(make_params(), plain.init(params), params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[0], y, rtol=1e-6), found, expected)


def quadratic(params: Any, x: jax.Array) -> jax.Array:
    return x.mean() * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))


def step_of_flax(tx: Any, state: Any, x: jax.Array) -> Any:
    params, opt_state, scale = state
    scale, is_finite, _, grads = scale.value_and_grad(quadratic)(params, x)  # its author forgot axis_name=
    updates, new = tx.update(zero.local(grads), opt_state, params)
    keep = partial(jax.tree.map, partial(jnp.where, is_finite))
    return keep(optax.apply_updates(params, updates), params), keep(new, opt_state), scale


def step_of_jmp(tx: Any, state: Any, x: jax.Array) -> Any:
    params, opt_state, scale = state
    grads = scale.unscale(jax.grad(lambda p: scale.scale(quadratic(p, x)))(params))
    is_finite = jmp.all_finite(grads)  # of this device only
    updates, new = tx.update(zero.local(grads), opt_state, params)
    params, opt_state = jmp.select_tree(is_finite, (optax.apply_updates(params, updates), new), (params, opt_state))
    return params, opt_state, scale.adjust(is_finite)


SAVED = (
    r"did not take the same updates, .* axis_name and jmp.*lax.pmin\(is_finite.astype\(jnp.int32\), axis_name\) == 1"
)


@pytest.mark.parametrize(
    ("step", "scale"),
    [(step_of_flax, DynamicScale(scale=jnp.float32(4))), (step_of_jmp, jmp.DynamicLossScale(jnp.float32(4)))],
)
def test_loss_scale_without_an_axis(step: Any, scale: Any) -> None:
    """A loss scale that each device adjusts by its own gradients poisons all of them, and the next save says why."""
    tx, params = zero.shard_optimizer(ADAM, "batch"), make_params()
    state = zero.to_devices((params, tx.init(params), scale))
    run = jax.pmap(partial(step, tx), "batch")
    x = np.ones((8, 2), np.float32)
    x[3, 0] = np.inf
    state = run(state, x)
    with pytest.raises(ValueError, match=r"differ between the devices .*, and numbers that decide, over the devices"):
        zero.check_replicated(state[2], "batch")  # later the scales agree again
    with pytest.raises(ValueError, match=SAVED):
        zero.to_host(state)
    for _ in range(3):
        state = run(state, np.ones((8, 2), np.float32))
    for leaf in jax.tree.leaves(state[0]):
        assert np.isnan(leaf).reshape(8, -1).any(1).all()
    with pytest.raises(ValueError, match=SAVED):
        zero.to_host(state)


def test_monitor_resumes_from_a_new_state() -> None:
    """The state of `optax.monitor` has more leaves after an update than `init` makes, and is restored nevertheless."""
    params = make_params()
    tx = optax.chain(zero.shard_optimizer(ADAM, "batch"), optax.monitor({"norm": optax.tree.norm}))
    step = jax.pmap(lambda p, s: tx.update(zero.local(p), s, p)[1], "batch")
    state = step(zero.to_devices(params), zero.to_devices(tx.init(params)))
    saved = zero.to_host(state)
    again = zero.to_devices(saved, like=tx.init(params))
    assert structure(again) == structure(state)
    jax.tree.map(np.testing.assert_array_equal, again[0].slices, state[0].slices)
    jax.tree.map(np.testing.assert_array_equal, again[1], state[1])
    with pytest.raises(
        ValueError,
        match=r"like= has a different structure .*: the state of a sharded optimizer is at 0, where the tree has",
    ):
        zero.to_devices({"opt_state": saved}, like=tx.init(params))


def test_like_keeps_the_marks_of_the_tree() -> None:
    """`like` adds what the tree does not know, and takes nothing away."""
    tx, params = zero.shard_optimizer(ADAM, "batch"), make_params()
    placed = zero.to_devices({"params": params, "opt_state": tx.init(params)}, like={"params": params})
    assert isinstance(placed["opt_state"], zero.ShardedState)


@pytest.mark.parametrize("rows", [8, 16])
def test_schedule_free_parameters(rows: int) -> None:
    """Parameters for evaluation come of the whole state; the sharded one says so, instead of a wrong result.

    On eight devices a slice of eight rows is one row, which would be broadcast over the whole parameter.
    """
    params = {"w": np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)}
    tx = zero.shard_optimizer(optax.contrib.schedule_free_sgd(2.0**-4), "batch")
    evaluate = optax.contrib.schedule_free_eval_params
    state = zero.to_devices(tx.init(params))
    refused = (
        r"no 'z' that is whole: .* use zero.gather\(opt_state\) inside pmap and zero.to_host\(opt_state\) outside. In "
        ".slices .* is wrong"
    )
    for read in (evaluate, jax.pmap(evaluate, "batch")):
        with pytest.raises(AttributeError, match=refused):
            read(state, zero.to_devices(params))
    inside = jax.pmap(lambda s, p: evaluate(zero.gather(s), p), "batch")(state, zero.to_devices(params))
    outside = evaluate(zero.to_host(state), params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[7], y, rtol=1e-6), inside, outside)


def test_average_whose_decay_depends_on_the_step() -> None:
    """The transform that the page gives: the mean of the parameters of all steps."""
    page = (Path(__file__).parents[2] / "docs/how-to/pmap-programs.md").read_text()
    transform = re.findall(r"`(optax\.GradientTransformationExtraArgs\(.*?)`", page, re.DOTALL)
    averages = zero.shard_optimizer(eval(" ".join(transform[0].split())), "batch", reduction=None)
    params = make_params()

    def train_step(params: Any, ema: Any, step: Any) -> Any:
        params = jax.tree.map(lambda p: p + 1, params)
        return params, averages.update(params, ema, rate=1 / (step + 1))[1], step + 1

    state = zero.to_devices((params, averages.init(params), jnp.int32(0)))
    for _ in range(3):
        state = jax.pmap(train_step, "batch")(*state)
    jax.tree.map(lambda x, p: np.testing.assert_allclose(x, p + 2, rtol=1e-6), zero.to_host(state)[1], params)


def test_functions_of_optax_that_read_a_state() -> None:
    """`optax.tree.get`, `set` and `map_params` as the page says: scalars as they are, all else of the whole state."""
    plain = optax.inject_hyperparams(optax.adam)(learning_rate=0.25)
    tx, params = zero.shard_optimizer(plain, "batch"), make_params()

    def read(opt_state: Any, params: Any) -> Any:
        _, opt_state = tx.update(zero.local(params), opt_state, params)
        opt_state = optax.tree.set(opt_state, learning_rate=optax.tree.get(opt_state, "learning_rate") / 2)
        return opt_state, optax.tree.get(zero.gather(opt_state), "mu")

    state, mu = jax.pmap(read, "batch")(zero.to_devices(tx.init(params)), zero.to_devices(params))
    _, expected = plain.update(params, plain.init(params), params)
    whole = zero.to_host(state)
    assert optax.tree.get(whole, "learning_rate") == 0.125
    assert optax.tree.get(state, "learning_rate").tolist() == [0.125] * 8
    for x in (jax.tree.map(lambda x: x[5], mu), optax.tree.get(whole, "mu")):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), x, optax.tree.get(expected, "mu"))
    doubled = optax.tree.map_params(tx.unsharded, lambda x: 2 * x, whole)
    again = zero.to_host(zero.to_devices(doubled, like=tx.init(params)))
    twice = optax.tree.map_params(plain, lambda x: 2 * x, expected)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6), optax.tree.get(again, "nu"), optax.tree.get(twice, "nu")
    )
    with pytest.raises(ValueError, match="different types"):  # slices are no parameters: jax refuses
        optax.tree.map_params(tx, lambda x: 2 * x, state)


def test_ensemble_by_vmap() -> None:
    """An ensemble by vmap inside pmap trains, and what would need its whole state says how to hold one."""
    tx, params = zero.shard_optimizer(ADAM, "batch"), make_params()
    members = jax.tree.map(lambda x: np.stack([x, 2 * x]), params)
    step = jax.vmap(lambda g, p: tx.update(zero.local(g), tx.init(p), p))
    updates, state = jax.pmap(step, "batch")(replicate(members), replicate(members))
    for i in range(2):
        member = jax.tree.map(lambda x, i=i: x[i], members)
        expected, _ = ADAM.update(member, ADAM.init(member), member)
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[0, i], y, rtol=1e-5), updates, expected)
    for read in (zero.to_host, jax.pmap(zero.gather, "batch")):
        with pytest.raises(
            ValueError, match=r"made by vmap inside pmap, .*\(members, ...\) per leaf, .* vmap the loss"
        ):
            read(state)
    one = zero.to_devices(tx.init(members))  # as the message says
    jax.tree.map(np.testing.assert_array_equal, zero.to_host(one), ADAM.init(members))


def test_typed_keys() -> None:
    """Typed keys of jax.random go everywhere, but where they would be cut, averaged or measured."""
    state = {"key": jax.random.key(3), "w": np.ones(16, np.float32)}
    placed = zero.to_devices(state)
    zero.check_replicated(placed, "batch")
    assert zero.to_host(placed)["key"] == state["key"]
    layout = zero.derive_layout(lambda w: {"key": jax.random.key(3), "w": w}, zero.make_layout(state["w"], 8))
    slices = zero.to_devices(state, layout, "batch")
    assert "key<fry>" in str(layout) and set(zero.checksums(slices, layout, "batch")) == {"key", "w"}
    assert (
        zero.to_host(zero.from_global(zero.to_global(slices, layout, "batch"), layout, "batch"), layout, "batch")["key"]
        == (state["key"])
    )
    differing = jax.pmap(lambda i: jax.random.fold_in(jax.random.key(3), i), "batch")(np.arange(8))
    with pytest.raises(ValueError, match=r"differ .*: key"):
        zero.check_replicated({"key": differing}, "batch")
    tx = zero.shard_optimizer(ADAM, "batch")
    for refused in (tx.init, partial(zero.make_layout, shards=8), lambda tree: zero.memory(tree, ADAM, 8)):
        with pytest.raises(TypeError, match=r"^leaf key: a typed key of jax.random .* jax.random.key_data\(key\)"):
            refused(state)
    for inside in (
        lambda tree: zero.global_norm(tree, layout, "batch"),
        lambda tree: zero.scatter_mean(zero.gather(tree, layout, "batch"), layout, "batch"),
    ):
        with pytest.raises(TypeError, match=r"^leaf key: a typed key of jax.random cannot be summed"):
            lower(inside, slices)


def test_names_with_slashes_in_messages() -> None:
    """Where two leaves would have one name, each message tells which it means."""
    params = {"a/b": np.ones((16, 3), np.float32), "a": {"b": np.zeros(24, np.float32)}}
    differing = jax.tree.map(lambda x: np.stack([x + i for i in range(8)]), params)
    with pytest.raises(ValueError, match=r"differ .*: \['a'\]\['b'\], \['a/b'\]\. Reduce"):
        zero.check_replicated(differing, "batch")
    tx = zero.shard_optimizer(ADAM, "batch")
    with pytest.raises(TypeError, match=r"^leaf \['a'\]\['b'\]: the gradient is an array"):
        lower(lambda p: tx.update(p, tx.init(p), p), replicate(params))
    with pytest.raises(ValueError, match=r"without leaf \['a'\]\['b'\]; it has \['a/b'\]"):
        other = zero.on_shards(ADAM, zero.make_layout({"a/b": params["a/b"]}, 8), "batch")
        other.update(params, ())
    with pytest.raises(ValueError, match=r"^leaf \['a'\]\['b'\]: expected what pmap returns"):
        zero.to_host(params)
    with pytest.raises(TypeError, match=r"^leaf \['a'\]\['b'\]: expected an array or a number, got a str"):
        zero.to_devices({**params, "a": {"b": "text"}})


def loud(learning_rate: float) -> Any:
    """A transform of an author, as optax's are written."""

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: learning_rate * g / jnp.linalg.norm(g), updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update_fn)


WRITTEN: dict[str, tuple[Any, str]] = {
    "alone": (loud(0.1), "loud"),
    "in a chain": (optax.chain(ADAM, loud(0.1)), "loud"),
    "in a named chain": (optax.named_chain(("a", ADAM), ("b", loud(0.1))), "loud"),
    "injected": (optax.inject_hyperparams(loud)(0.1), "loud"),
    "masked": (optax.masked(loud(0.1), True), "loud"),
    "partitioned": (optax.partition({"a": loud(0.1)}, "a"), "loud"),
    "with extra arguments": (optax.with_extra_args_support(loud(0.1)), "loud"),
    "accumulated": (optax.MultiSteps(loud(0.1), 2), "loud"),
    "optax's": (optax.chain(optax.clip_by_block_rms(1.0), ADAM), "clip_by_block_rms"),
    "optax's, masked": (optax.masked(optax.adaptive_grad_clip(0.1), True), "adaptive_grad_clip"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_refusal_names_what_the_author_wrote(name: str) -> None:
    tx, written = WRITTEN[name]
    sharded = zero.shard_optimizer(tx, "batch")
    with pytest.raises(zero.NotElementwiseError, match=rf"^{written} is not element-wise: "):
        lower(lambda p: sharded.update(zero.local(p), sharded.init(p), p), {"w": np.ones((8, 16, 3), np.float32)})
