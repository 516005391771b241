"""Optimizer state on the host: whole and back, exactly; one device's slice is refused, or makes updates NaN."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import jax_utils, serialization
from jax import lax

import zero
from tests.helpers import optax_transforms
from zero.partition import whole_state

SHAPES = {"w": (13, 24), "odd": (9,), "few": (3,), "scalar": ()}


def make_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def grads_at(step: int) -> dict[str, np.ndarray]:
    """Alike on all devices and of small integers, so that any order of summing gives the same bits."""
    rng = np.random.default_rng(step + 1)
    return {name: rng.integers(-8, 9, shape).astype(np.float32) for name, shape in SHAPES.items()}


def replicate(tree: Any, devices: int) -> Any:
    return jax.tree.map(lambda x: np.broadcast_to(x, (devices, *np.shape(x))), tree)


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def stepper(tx: Any) -> Any:
    @partial(jax.pmap, axis_name="batch")
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(zero.local(grads), state, params)
        return optax.apply_updates(params, updates), state

    return step


OPTIMIZERS = {
    "adamw": (optax.adamw(0.1), optax.adamw(0.1)),
    "accumulated": (optax.MultiSteps(optax.adam(0.1), 2),) * 2,
    "hyperparameters": (optax.inject_hyperparams(optax.lion)(0.1),) * 2,
    "factored": (
        optax.adafactor(0.1, min_dim_size_to_factor=3),
        zero.across_shards(optax.adafactor(0.1, min_dim_size_to_factor=3)),
    ),
    "masked": (
        optax.multi_transform(
            {"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, lambda p: {k: "ab"[k == "w"] for k in p}
        ),
    )
    * 2,
    "stateless": (optax.sgd(0.1),) * 2,
}


GROUPS: dict[str, zero.Axis | str] = {
    "flat": "batch",
    "hybrid": zero.Axis("batch", (2, 4)),
    "phases": zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
}
FLAT = ("accumulated", "masked", "stateless")
CASES: list[Any] = [pytest.param(name, "flat", marks=() if name in FLAT else pytest.mark.wide) for name in OPTIMIZERS]
CASES += [("factored", "hybrid"), pytest.param("factored", "phases", marks=pytest.mark.wide)]
CASES += [pytest.param("adamw", groups, marks=pytest.mark.slow) for groups in ("hybrid", "phases")]


@pytest.mark.parametrize(("name", "groups"), CASES)
def test_state_round_trip(name: str, groups: str) -> None:
    """State is saved and restored in the form of the unsharded program."""
    plain, right = OPTIMIZERS[name]
    tx, params = zero.shard_optimizer(right, GROUPS[groups]), make_params()
    sharded_params = replicate(params, 8)
    state = jax.pmap(tx.init, axis_name="batch")(sharded_params)
    step = stepper(tx)
    for i in range(3):
        sharded_params, state = step(sharded_params, state, replicate(grads_at(i), 8))
    whole = zero.to_host(state)

    expected, expected_params = tx.unsharded.init(params), params
    unsharded = plain.gradient_transformation() if isinstance(plain, optax.MultiSteps) else plain
    update = jax.jit(lambda g, s, p: unsharded.update(g, s, p))
    for i in range(3):
        updates, expected = update(grads_at(i), expected, expected_params)
        expected_params = optax.apply_updates(expected_params, updates)
    assert structure(whole) == structure(expected)
    for found, right in zip(jax.tree.leaves(whole), jax.tree.leaves(expected), strict=True):
        assert isinstance(found, np.ndarray) and found.dtype == right.dtype
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-7)

    back = zero.to_devices(whole, like=tx.init(params))
    assert structure(back) == structure(state)
    for found, right in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert found.sharding == right.sharding  # or the step would be compiled again
    again, _ = step(sharded_params, back, replicate(grads_at(3), 8))
    right_on, _ = step(sharded_params, state, replicate(grads_at(3), 8))
    jax.tree.map(np.testing.assert_array_equal, again, right_on)
    jax.tree.map(np.testing.assert_array_equal, zero.to_host(back), whole)


def kinds_of(tx: Any) -> set[Any]:
    """Shapes and dtypes in a state, and the kinds of nodes above leaves, such as a tuple of named tuples of dicts."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(tx.init, optax_transforms.PARAMS))
    return {kind for path, x in leaves for kind in (str(x), tuple(type(key) for key in path))}


@pytest.mark.parametrize(
    "is_whole",
    [pytest.param(False, marks=pytest.mark.wide), pytest.param(True, marks=pytest.mark.slow)],
    ids=["kinds", "all"],
)
def test_round_trip_of_every_transform(is_whole: bool) -> None:
    """The state of every transform is saved and restored bit for bit.

    As `init` makes it: that of all transforms of optax, in one program, and of those of zero; by default of one for
    each shape and dtype, and for each kind of node.
    """
    params = optax_transforms.PARAMS
    warned = {name for name, why in optax_transforms.UNUSABLE.items() if "warning" in why or "each example" in why}
    made = {name: make() for name, make in optax_transforms.TRANSFORMS.items() if name not in warned}
    made |= {
        "muon": zero.across_shards(optax.contrib.muon(0.1)),
        "zero.quantized.adamw": zero.quantized.adamw(0.1),
    }
    if not is_whole:
        seen, every = set[Any](), made
        made = {}
        for name, tx in reversed(every.items()):
            if not kinds_of(tx) <= seen:
                seen, made = seen | kinds_of(tx), made | {name: tx}
        assert "named_chain" in made  # whose dicts hold named tuples
    # Where the state of a transform depends on sums, as in a norm of the parameters, this lets it communicate.
    sharded = {name: zero.shard_optimizer(zero.across_shards(tx), "batch") for name, tx in made.items()}
    states = jax.pmap(lambda p: {name: tx.init(p) for name, tx in sharded.items()}, "batch")(replicate(params, 8))
    wanted = jax.jit(lambda p: {name: tx.init(p) for name, tx in made.items()})(params)
    for name, expected in wanted.items():
        whole = zero.to_host(states[name])
        assert structure(whole) == structure(expected), name
        back = zero.to_devices(whole, like=sharded[name].init(params))
        assert structure(back) == structure(states[name]), name
        again = zero.to_host(back)
        leaves = [jax.tree.leaves(tree) for tree in (whole, again)]
        pairs = [pair for tree in leaves for pair in zip(tree, jax.tree.leaves(expected), strict=True)]
        for found, right in pairs:
            assert found.dtype == right.dtype, name
            is_key = jnp.issubdtype(found.dtype, jax.dtypes.prng_key)
            got, bits = (np.asarray(jax.random.key_data(x) if is_key else x) for x in (found, right))
            np.testing.assert_array_equal(got, bits, err_msg=name)


class Device(NamedTuple):
    process_index: int
    number: int


def test_memory_of_whole_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device holds more than its share while state is made whole.

    Of two processes with four devices each: a quarter of a leaf, by what the compiler says.
    """
    program = whole_state._gather_program
    made: list[Any] = []
    monkeypatch.setattr(whole_state, "_gather_program", lambda name, groups, _: made.append((name, groups)))
    for axis in (zero.Axis("batch", (1, 8)), zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7))):
        whole_state._exchange(axis, tuple(Device(i // 4, i) for i in range(8)))
        leaf = jax.ShapeDtypeStruct((8, 256, 1024), np.float32)  # one slice per device
        compiled = program(*made[-1], tuple(jax.devices())).lower(leaf).compile().memory_analysis()
        assert compiled.output_size_in_bytes == 8 * 256 * 1024 * 4 / 4
        assert compiled.temp_size_in_bytes <= 256 * 1024 * 4


@pytest.mark.parametrize("devices", [1, 3])
def test_other_number_of_devices(devices: int) -> None:
    """State moves to another number of devices."""
    tx, params = zero.shard_optimizer(optax.adam(0.1), "batch"), make_params()
    _, state = stepper(tx)(
        replicate(params, 8), jax.pmap(tx.init, "batch")(replicate(params, 8)), replicate(grads_at(0), 8)
    )
    whole = zero.to_host(state)
    few = jax.devices()[:devices]
    moved = zero.to_devices(whole, like=tx.init(params), devices=few)
    assert moved.slices[0].mu["w"].sharding.device_set == set(few)
    jax.tree.map(np.testing.assert_array_equal, zero.to_host(moved, devices=few), whole)


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any, Any, Any]:
    tx, params = zero.shard_optimizer(optax.adam(0.1), "batch"), make_params()
    step = stepper(tx)
    state = jax.pmap(tx.init, axis_name="batch")(replicate(params, 8))
    _, state = step(replicate(params, 8), state, replicate(grads_at(0), 8))
    return tx, params, step, state


@pytest.mark.parametrize(
    "take",
    [
        jax_utils.unreplicate,
        lambda state: jax.tree.map(lambda x: x[0], state),
        lambda state: jax.tree.map(lambda x: np.asarray(x)[3], state),
        lambda state: jax.tree.map(lambda x: x.addressable_shards[0].data[0], state),
        lambda state: jax.pmap(lambda s: s, "batch", out_axes=None)(state),
        lambda state: jax.pmap(lambda s: {"state": (s, 1)}, "batch", out_axes=None)(state),
    ],
    ids=["unreplicate", "x[0]", "numpy", "shard", "out_axes", "nested"],
)
def test_taking_one_slice_is_refused(take: Any, trained: Any) -> None:
    """Taking one slice is refused where it happens."""
    with pytest.raises(ValueError, match=r"one device's slice .* zero.to_host\(state\)"):
        take(trained[3])


def test_slices_that_stay_together_pass(trained: Any) -> None:
    _, params, step, state = trained
    assert jax.tree.map(lambda x: x.nbytes, state).shard == 32
    assert all(jax.tree.leaves(jax.tree.map(lambda x: jnp.isfinite(x).all(), state)))  # a scalar, but no slice number
    on_host = jax.device_get(state)
    restored = serialization.from_bytes(state, serialization.to_bytes(on_host))
    for same in (on_host, restored, jax.tree.map(lambda x: x + 0, state)):
        again, _ = step(replicate(params, 8), same, replicate(grads_at(1), 8))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(again))
    jax.eval_shape(lambda s: jax.tree.map(lambda x: x[0], s), state)


def test_foreign_slice(trained: Any) -> None:
    """A foreign slice makes updates NaN and is named on the host."""
    _, params, step, state = trained
    leaves, treedef = jax.tree.flatten(state)
    copies = jax.tree.unflatten(treedef, [np.broadcast_to(x[0], x.shape) for x in leaves])
    wrong, after = step(replicate(params, 8), copies, replicate(grads_at(1), 8))
    right, _ = step(replicate(params, 8), state, replicate(grads_at(1), 8))
    own = np.asarray(right["w"]).reshape(8, 13, 8, 3)[:, :, 0]  # the slice of device 0, which was its own
    found = np.asarray(wrong["w"]).reshape(8, 13, 8, 3)
    np.testing.assert_array_equal(found[:, :, 0], own)
    assert np.isnan(found[:, :, 1:]).all()
    np.testing.assert_array_equal(wrong["few"], right["few"])  # whole on every device: no slice of it is foreign
    with pytest.raises(ValueError, match=r"holds slice 0, not its own, 1\. .*zero.to_devices\(whole, like=state\)"):
        zero.to_host(after)
    other = zero.shard_optimizer(optax.adam(0.1), zero.Axis("batch", (1, 2, 4), (0, 2, 4, 6, 1, 3, 5, 7)))
    wrong, _ = stepper(other)(replicate(params, 8), state, replicate(grads_at(1), 8))
    assert np.isnan(wrong["w"]).any()


def test_mistakes_on_the_host_are_named(trained: Any) -> None:
    tx, params, _, state = trained
    with pytest.raises(ValueError, match=r"leaf 0/count: expected what pmap returns, one row on each device, .* on 1"):
        zero.to_host(jax.tree.map(jnp.asarray, optax.adam(0.1).init(params)))
    with pytest.raises(ValueError, match=r"without its origin: take one that tx\.init"):
        zero.to_host(zero.ShardedState(state.slices, state.shard))
    with pytest.raises(ValueError, match="sharded already"):
        zero.to_devices(state)
    plain = optax.adam(0.1).init(params)
    with pytest.raises(ValueError, match=r"leaf 0/count: expected the whole int32\[\].*take one of copies"):
        zero.to_devices(jax_utils.replicate(plain), like=tx.init(params))
    narrow = jax.tree.map(lambda x: np.asarray(x, np.float16) if x.dtype == np.float32 else x, plain)
    with pytest.raises(ValueError, match=r"leaf 0/mu/few: expected the whole float32\[3\].* got float16\[3\]"):
        zero.to_devices(narrow, like=tx.init(params))
    padded = jax.tree.map(lambda x: np.pad(x, (0, 7)) if x.shape == (9,) else x, plain)
    with pytest.raises(
        ValueError, match=r"leaf 0/mu/odd: expected the whole float32\[9\], without padding, got .*\[16\]"
    ):
        zero.to_devices(padded, like=tx.init(params))


def test_keys_and_numbers_in_state() -> None:
    """Random keys and Python numbers in the state are saved and restored."""

    def init(params: Any) -> Any:
        return {"key": jax.random.key(7), "rate": 0.5, "mu": params}

    tx = zero.shard_optimizer(optax.GradientTransformation(init, lambda g, s, p=None: (g, s)), "batch")
    params = make_params()
    state = zero.to_devices(init(params), like=tx.init(params))
    assert state.slices["key"].shape == (8,) and state.slices["rate"].dtype == np.float32
    whole = zero.to_host(state)
    assert whole["key"] == jax.random.key(7)
    np.testing.assert_array_equal(whole["mu"]["w"], params["w"])


def test_round_trip_of_averages() -> None:
    """Averages of parameters are saved whole and restored."""
    params = make_params()
    layout = zero.make_layout(params, 8)

    @partial(jax.pmap, axis_name="batch")
    def average(params: Any, ema: Any) -> Any:
        ema = optax.incremental_update(zero.shard(params, layout, "batch"), ema, 0.25)
        return ema, zero.gather(ema, layout, "batch")

    ema = zero.to_devices(jax.tree.map(np.zeros_like, params), layout, "batch")
    ema, whole = average(replicate(params, 8), ema)
    for name, x in zero.to_host(ema, layout, "batch").items():
        np.testing.assert_array_equal(x, np.float32(0.25) * params[name])
        np.testing.assert_array_equal(whole[name][5], x)
    with pytest.raises(ValueError, match=r"one device's slice, 1/N of it: save what zero\.to_host returns"):
        zero.to_devices(jax.tree.map(lambda x: x[0], ema), layout, "batch")


@pytest.mark.parametrize("sum_or_mean", ["sum", "mean"])
def test_clipping_between_reduction_and_update(sum_or_mean: str) -> None:
    """Gradients are clipped and logged between reduction and update."""
    params = make_params()
    layout = zero.make_layout(params, 8)
    tx = zero.shard_optimizer(optax.adam(0.1), "batch", reduction="scattered")
    scatter = {"sum": zero.scatter_sum, "mean": zero.scatter_mean}[sum_or_mean]
    rng = np.random.default_rng(5)
    grads = {name: rng.integers(-8, 9, (8, *shape)).astype(np.float32) for name, shape in SHAPES.items()}

    def sharded(params: Any, grads: Any) -> Any:
        slices = scatter(grads, layout, "batch")
        norm = zero.global_norm(slices, layout, "batch")
        slices = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / norm), slices)
        updates, _ = tx.update(zero.local(slices), tx.init(params), params)
        return updates, norm

    def plain(params: Any, grads: Any) -> Any:
        grads = {"sum": lax.psum, "mean": lax.pmean}[sum_or_mean](grads, "batch")
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / norm), grads)
        adam = optax.adam(0.1)
        return adam.update(grads, adam.init(params), params)[0], norm

    found, found_norm = jax.pmap(sharded, "batch")(replicate(params, 8), grads)
    expected, norm = jax.pmap(plain, "batch")(replicate(params, 8), grads)
    np.testing.assert_allclose(found_norm, norm, rtol=1e-6)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)

    text = jax.pmap(sharded, "batch").lower(replicate(params, 8), grads).compile().as_text()
    # Of the leaves that are whole and of the scalar norm; the rest is scattered once and gathered once.
    reduced = [line for line in text.splitlines() if " all-reduce(" in line or " all-reduce-start(" in line]
    assert all("[13,24]" not in line and "f32[9]" not in line for line in reduced), reduced
    assert text.count(" reduce-scatter(") == 1, text.count(" reduce-scatter(")
    with pytest.raises(ValueError, match="update needs params where gradients are slices"):
        jax.pmap(lambda p: tx.update(zero.local(p), tx.init(p)), "batch")(replicate(params, 8))


def test_scan_with_donated_state() -> None:
    """Steps run in a scan with donated state."""
    tx, params = zero.shard_optimizer(optax.adam(0.1), "batch"), make_params()
    grads = jax.tree.map(lambda *xs: np.stack(xs), *(grads_at(i) for i in range(4)))

    @partial(jax.pmap, axis_name="batch", donate_argnums=(0, 1))
    def scanned(params: Any, state: Any, grads: Any) -> Any:
        def one(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(zero.local(grads), state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(one, (params, state), grads)[0]

    placed = jax.pmap(lambda p: p, "batch")(replicate(params, 8))
    state = jax.pmap(tx.init, "batch")(placed)
    held = state
    found, after = scanned(placed, state, replicate(grads, 8))
    assert all(x.is_deleted() for x in jax.tree.leaves(held))
    step, p, s = stepper(tx), replicate(params, 8), jax.pmap(tx.init, "batch")(replicate(params, 8))
    for i in range(4):
        p, s = step(p, s, replicate(grads_at(i), 8))
    for name in SHAPES:
        np.testing.assert_allclose(found[name], p[name], rtol=1e-6, atol=1e-7)
    assert after.shard.ravel().tolist() == list(range(8))  # an even number of updates


def test_parameters_with_in_axes_none() -> None:
    """Parameters may be passed to pmap with in_axes=None."""
    tx, params = zero.shard_optimizer(optax.adam(0.1), "batch"), make_params()

    @partial(jax.pmap, axis_name="batch", in_axes=(None, 0, 0), out_axes=(None, 0))
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(zero.local(grads), state, params)
        return optax.apply_updates(params, updates), state

    state = zero.to_devices(optax.adam(0.1).init(params), like=tx.init(params))
    found, state = step(params, state, replicate(grads_at(0), 8))
    found, state = step(found, state, replicate(grads_at(1), 8))
    adam = optax.adam(0.1)
    p: Any = params
    plain = adam.init(p)
    for i in range(2):
        updates, plain = jax.jit(adam.update)(grads_at(i), plain, p)
        p = optax.apply_updates(p, updates)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], p[name], rtol=1e-5)


REDUCTIONS = {
    "mean": ("mean", lambda loss: loss, lambda grads: lax.pmean(grads, "batch")),
    "sum of losses scaled beforehand": ("sum", lambda loss: loss / 8, lambda grads: lax.psum(grads, "batch")),
    "weighted by counts": (
        "sum",
        lambda loss: loss * (n := lax.axis_index("batch") + 1) / lax.psum(n, "batch"),
        lambda grads: lax.psum(grads, "batch"),
    ),
    "averaged inside the loss": (
        "mean",
        lambda loss: lax.pmean(loss, "batch"),
        lambda grads: lax.pmean(grads, "batch"),
    ),
    "summed inside the loss": (
        "mean",
        lambda loss: lax.psum(loss, "batch") / 8,
        lambda grads: lax.pmean(grads, "batch"),
    ),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_documented_reductions(name: str) -> None:
    """Each reduction computes what the documentation says.

    Of docs/how-to/pmap-programs.md: sharded and plain agree, and are the gradient of the loss over all examples.
    """
    reduction, of_loss, reduce = REDUCTIONS[name]
    tx = zero.shard_optimizer(optax.sgd(1.0), "batch", reduction=reduction)  # type: ignore[arg-type]
    x = np.random.default_rng(0).integers(-8, 9, (8, 11)).astype(np.float32)
    w = np.ones((8, 11), np.float32)

    def step(w: jax.Array, x: jax.Array) -> Any:
        grads = jax.grad(lambda w: of_loss(jnp.vdot(w, x)))(w)
        return tx.update(zero.local(grads), tx.init(w), w)[0], reduce(grads)

    updates, expected = jax.pmap(step, "batch")(w, x)
    np.testing.assert_allclose(updates, -expected, rtol=1e-6, atol=1e-6)
    weights = np.arange(1, 9) / 36 if "counts" in name else np.full(8, 1 / 8)
    np.testing.assert_allclose(expected[0], weights.astype(np.float32) @ x, rtol=1e-5, atol=1e-5)
