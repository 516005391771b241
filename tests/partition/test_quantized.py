"""Quantized optimizers: the codes, their rounding, and that nothing depends on how arrays are cut."""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from zero.partition import quantized
from zero.partition.quantized import AdamCode, scale_by_adam, scale_by_lion, to_bfloat16

# Nothing divides by 3 or 8 but the last dimension of "tall", which is split there: 4099 is prime.
SHAPES = {"tall": (3, 4099), "wide": (13, 512), "cube": (5, 7, 120), "vector": (4101,), "small": (13, 24), "scalar": ()}
STEPS = 4
DTYPES = {"int8": jnp.int8, "bfloat16": jnp.bfloat16, "float32": jnp.float32}
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": partial(zero.quantized.adamw, 0.01, 0.9, 0.95, weight_decay=0.1),
    "lion": partial(zero.quantized.lion, 0.01, weight_decay=0.1),
}


def make_params(dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32).astype(dtype) for name, shape in SHAPES.items()}


def gradients(step: int) -> Any:
    """Of scales from 1e-6 to 1, zero in places."""
    rng = np.random.default_rng(step + 1)

    def one(name: str, shape: tuple[int, ...]) -> np.ndarray:
        scale = 10 ** np.random.default_rng(len(name)).uniform(-6, 0, shape)
        return np.asarray(rng.normal(size=shape) * scale * (rng.random(shape) < 0.9), np.float32)

    return {name: one(name, shape) for name, shape in SHAPES.items()}


def optimizer(name: str, dtype: str) -> optax.GradientTransformation:
    return optax.chain(OPTIMIZERS[name](state_dtype=DTYPES[dtype]), zero.quantized.round_stochastically())


@cache
def unsharded(name: str, dtype: str, params_dtype: Any) -> tuple[Any, Any]:
    """One program per step, as on slices: XLA rounds by what it fuses."""
    tx, params = optimizer(name, dtype), make_params(params_dtype)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(STEPS):
        params, state = step(params, state, gradients(number))
    return params, state


def sharded(tx: optax.GradientTransformation, devices: int, params: Any) -> tuple[Any, Any]:
    """Parameters and state after training on slices, put together on the host; padding is zero."""
    used = jax.devices()[:devices]
    layout = zero.make_layout(params, devices)
    state_layout = zero.derive_layout(tx.init, layout)
    on = zero.on_shards(tx, layout, "batch")
    pmap = partial(jax.pmap, axis_name="batch", devices=used)
    shards = pmap(lambda _: zero.shard(params, layout, "batch"))(np.ones(devices))
    state = pmap(on.init)(shards)

    @pmap
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = on.update(zero.shard(grads, layout, "batch"), state, params)
        return optax.apply_updates(params, updates), state

    for number in range(STEPS):
        grads = jax.tree.map(lambda g: np.stack([g] * devices), gradients(number))
        shards, state = step(shards, state, grads)

    def whole(leaf: zero.groups.LeafLayout, x: jax.Array) -> np.ndarray:
        parts = list(np.asarray(x))
        padded = np.concatenate(parts, leaf.splits[0].dim) if leaf.splits else parts[0]
        cut = padded[tuple(slice(size) for size in leaf.shape)]
        assert np.count_nonzero(padded) == np.count_nonzero(cut), leaf.name
        return cut

    return layout.map(whole, shards), state_layout.map(whole, state)


FORMS = {
    ("adamw", "int8", np.float32): 3,
    ("adamw", "bfloat16", jnp.bfloat16): 8,
    ("adamw", "int8", jnp.bfloat16): 8,
    ("lion", "int8", jnp.bfloat16): 3,
}  # and the number of devices of the quick form
WIDE = [("adamw", "int8", np.float32), ("adamw", "bfloat16", jnp.bfloat16)]


@pytest.mark.parametrize(
    ("name", "dtype", "params_dtype", "devices"),
    [
        pytest.param(
            *(*form, devices),
            marks=pytest.mark.slow if devices != quick else pytest.mark.wide if form in WIDE else (),
        )
        for form, quick in FORMS.items()
        for devices in (1, 3, 8)
    ],
)
def test_slices_equal_whole(name: str, dtype: str, params_dtype: Any, devices: int) -> None:
    """Quantized state of slices equals slices of the quantized whole, bit for bit."""
    got = sharded(optimizer(name, dtype), devices, make_params(params_dtype))
    expected = unsharded(name, dtype, params_dtype)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y, err_msg=str(path))


def test_what_is_held_takes_a_byte() -> None:
    params = make_params()
    for name, moments in (("adamw", 2), ("lion", 1)):
        state = OPTIMIZERS[name]().init(params)
        for leaf in ("tall", "wide", "cube", "vector"):
            own = [
                x
                for path, x in jax.tree_util.tree_leaves_with_path(state)
                if jax.tree_util.keystr(path[-1:], simple=True) == leaf
            ]
            assert sum(x.nbytes for x in own) == moments * params[leaf].size
        assert {x.dtype for path, x in jax.tree_util.tree_leaves_with_path(state) if "small" in str(path)} == {
            jnp.dtype("float32")
        }


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_float32_moments_are_those_of_optax(name: str) -> None:
    ours = OPTIMIZERS[name](state_dtype=jnp.float32)
    theirs = {"adamw": optax.adamw(0.01, 0.9, 0.95, weight_decay=0.1), "lion": optax.lion(0.01, weight_decay=0.1)}[name]
    params = make_params()
    states = [ours.init(params), theirs.init(params)]
    for step in range(3):
        pairs = [jax.jit(tx.update)(gradients(step), s, params) for tx, s in zip((ours, theirs), states, strict=True)]
        states = [state for _, state in pairs]
        jax.tree.map(np.testing.assert_array_equal, pairs[0], pairs[1])


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_no_collective_and_no_whole_array(dtype: str) -> None:
    params = {name: x for name, x in make_params(jnp.bfloat16).items() if name in ("tall", "wide", "cube")}
    tx = optimizer("adamw", dtype)
    layout = zero.make_layout(params, 8)
    on = zero.on_shards(tx, layout, "batch")

    def stacked(layout: zero.Layout) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), layout.shard_shapes())

    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), stacked(layout))
    lowered = jax.pmap(on.update, "batch").lower(grads, stacked(zero.derive_layout(tx.init, layout)), stacked(layout))
    text = lowered.compile().as_text()
    assert not re.findall(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", text)
    # Positions are those of the slice: no array of the whole shape exists, not even before XLA optimizes.
    shapes = set(re.findall(r"tensor<((?:\d+x)+)", lowered.as_text()))
    for leaf in layout.leaves:
        own = "".join(f"{size}x" for size in leaf.shard_shape)
        assert own in shapes or "1x" + own in shapes
        for whole in (leaf.shape, leaf.padded_shape):
            assert "".join(f"{size}x" for size in whole) not in shapes, leaf.name


@partial(jax.jit, static_argnums=0)
def encode(code: AdamCode, *args: jax.Array) -> tuple[jax.Array, jax.Array]:
    """In one program, as in an update: single operations would be compiled one by one."""
    return code.encode(*args)


@partial(jax.jit, static_argnums=0)
def decode(code: AdamCode, *args: jax.Array) -> tuple[jax.Array, jax.Array]:
    return code.decode(*args)


@partial(jax.jit, static_argnums=(0, 1, 3))
def random_halves(shape: tuple[int, ...], leaf: str, step: jax.Array, salt: int = 0) -> tuple[jax.Array, jax.Array]:
    return quantized._random_halves(shape, leaf, step, salt=salt)


def randoms(shape: tuple[int, ...], step: int = 0) -> tuple[jax.Array, jax.Array]:
    return random_halves(shape, "leaf", jnp.int32(step))


@pytest.mark.parametrize("value", [3.3e-7, 1.7e-12, 4e-15, 2.1e3])
def test_rounding_is_right_in_the_mean(value: float) -> None:
    """Of each moment and of a bfloat16 weight: to a thousandth, where the nearest level is off by up to a tenth."""
    code, n = AdamCode.of(0.9, 0.95, 1e-8), 1 << 20
    high, low = randoms((n,))
    mean, square = (np.full(n, x, np.float32) for x in (0.3 * value**0.5, value))
    m, v = (np.asarray(x, np.float64) for x in decode(code, *encode(code, mean, square, high, low)))
    np.testing.assert_allclose(v.mean(), value, rtol=2e-3)
    assert 0.01 < v.std() / value < 0.15
    np.testing.assert_allclose(m.mean(), 0.3 * value**0.5, rtol=4e-3)  # the mean of square roots is a little less
    held = np.asarray(jax.jit(to_bfloat16)(square, high), np.float64)
    assert len(np.unique(held)) == 2
    np.testing.assert_allclose(held.mean(), value, rtol=2e-5)


def test_levels_are_kept() -> None:
    """What is read from a level is written to the same level."""
    code = AdamCode.of(0.9, 0.999, 1e-8)
    nu = np.arange(256, dtype=np.uint8)
    v = np.asarray(decode(code, np.zeros(256, np.int8), nu)[1])
    assert v[0] == 0 and (np.diff(v) > 0).all()
    assert np.sqrt(v[1]) <= 1e-8 / 32 and np.sqrt(v[255]) > 1000
    ratios = v[2:] / v[1:-1]
    assert ratios.min() > 1.19 and ratios.max() < 1.34
    nearest = np.full(255, 1 << 15, np.uint32)
    for mu in (-127, -1, 0, 1, 127):
        mus = np.full(255, mu, np.int8)
        again = encode(code, *decode(code, mus, nu[1:]), nearest, nearest)
        np.testing.assert_array_equal(again[0], mus)
        np.testing.assert_array_equal(again[1], nu[1:])


def test_stochastic_rounding_of_moments() -> None:
    """A moment that changes by less than a level per step changes in the mean.

    b2 = 0.999: the mean square decays by a thousandth per step, and levels are a quarter apart.
    """
    tx = scale_by_adam(0.9, 0.999, mask=lambda params: jax.tree.map(lambda _: True, params))

    @jax.jit
    def decayed() -> Any:
        def decay(state: Any, _: Any) -> tuple[Any, None]:
            return tx.update(jnp.zeros(20_000), state)[1], None

        state = tx.update(jnp.full(20_000, 1e-3), tx.init(jnp.ones(20_000)))[1]
        return jax.lax.scan(decay, state, length=500)[0]

    state = decayed()
    v = np.asarray(decode(AdamCode.of(0.9, 0.999, 1e-8), state.mu, state.nu)[1], np.float64)
    np.testing.assert_allclose(v.mean(), 1e-9 * 0.999**500, rtol=0.02)


def test_stochastic_rounding_of_weights() -> None:
    """Weights move by stochastic rounding where rounding to nearest would not move them."""
    params = jnp.ones(10_000, jnp.bfloat16)
    tx = optax.chain(optax.sgd(1.0), zero.quantized.round_stochastically())
    state = tx.init(params)
    moved, nearest = params, params
    update = jax.jit(tx.update)
    for _ in range(32):
        updates, state = update(np.full(10_000, -1 / 4096, np.float32), state, moved)
        moved = optax.apply_updates(moved, updates)
        nearest = optax.apply_updates(nearest, np.full(10_000, 1 / 4096, np.float32))
    np.testing.assert_allclose(jnp.mean(moved.astype(jnp.float32)), 1 + 32 / 4096, atol=2e-4)
    np.testing.assert_array_equal(nearest, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, -0.0])
def test_special_weights_stay(value: float) -> None:
    """Weights that are NaN, infinite or zero stay so."""
    for random in (0, 0xFFFF):
        got = float(to_bfloat16(jnp.float32(value), jnp.uint32(random)))
        if abs(value) < 1:
            assert abs(got) < 2e-40 and np.signbit(got) == np.signbit(value)
        else:
            np.testing.assert_array_equal(got, value)


def test_every_nan_stays_one() -> None:
    """To the last bits, which random ones could carry into the sign and turn into zero."""
    nan = jax.lax.bitcast_convert_type(jnp.asarray([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], jnp.uint32), jnp.float32)
    assert bool(jnp.isnan(to_bfloat16(nan, jnp.uint32(0xFFFF)).astype(jnp.float32)).all())


def per_tensor(x: jax.Array, levels: int) -> jax.Array:
    """The naive code: equal steps up to the largest element, to the nearest."""
    step = jnp.max(jnp.abs(x)) / levels
    return jnp.round(x / step) * step


def test_updates_stay_bounded() -> None:
    """Updates stay bounded where one scale per tensor would divide by zero.

    Small elements beside large ones.
    """
    tx = scale_by_adam(0.9, 0.95)
    plain = optax.scale_by_adam(0.9, 0.95)
    scale = jnp.asarray(10 ** np.random.default_rng(0).uniform(-9, 5, 4096), jnp.float32)
    state, reference = tx.init(scale), plain.init(scale)
    naive = reference
    for step in range(30):
        g = scale * jnp.asarray(np.random.default_rng(step).normal(size=4096), jnp.float32)
        u, state = jax.jit(tx.update)(g, state)
        expected, reference = jax.jit(plain.update)(g, reference)
        u_naive, naive = jax.jit(plain.update)(g, naive)
        naive = naive._replace(mu=per_tensor(naive.mu, 127), nu=per_tensor(naive.nu, 255))
    error = np.asarray(jnp.abs(u - expected))
    is_inside = np.asarray(scale) < 100
    assert np.abs(u).max() < 2.5 < 50 < np.abs(u_naive).max()
    assert np.sqrt(np.mean(error[is_inside] ** 2)) < 0.2 * float(jnp.sqrt(jnp.mean(expected**2)))


def test_random_bits() -> None:
    """Random bits differ by step, leaf and position, and look uniform."""
    shape = (64, 4096)
    bits = [np.asarray(x).reshape(-1) for x in randoms(shape)]
    bits += [np.asarray(randoms(shape, step=1)[0]).reshape(-1)]
    bits += [np.asarray(random_halves(shape, "leaf2", jnp.int32(0))[0]).reshape(-1)]
    bits += [np.asarray(random_halves(shape, "leaf", jnp.int32(0), 1)[0]).reshape(-1)]
    correlation = np.corrcoef(bits)
    assert np.abs(correlation - np.eye(len(bits))).max() < 0.01
    for x in bits:
        counts = np.bincount(x >> 8, minlength=256)
        assert ((counts - 1024) ** 2 / 1024).sum() < 350  # chi square with 255 degrees of freedom, p = 1e-4
        for shift in (1, 64, 4096):
            assert abs(np.corrcoef(x[:-shift], x[shift:])[0, 1]) < 0.01


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(ValueError, match=r"b1 \* b1 < b2, got b1=0.95 and b2=0.9"):
        zero.quantized.adamw(0.1, 0.95, 0.9)
    zero.quantized.adamw(0.1, 0.95, 0.9, state_dtype=jnp.bfloat16)
    for make in (scale_by_adam, scale_by_lion):
        with pytest.raises(ValueError, match="state_dtype must be int8, bfloat16 or float32, got float16"):
            make(state_dtype=jnp.float16)
    with pytest.raises(ValueError, match="params"):
        zero.quantized.round_stochastically().update(jnp.ones(3), quantized.RoundingState(jnp.int32(0)))


def test_integers_and_missing_gradients() -> None:
    """Leaves that are no floats, or that have no gradient, are left as they are."""
    params: Any = {"c": np.ones(5000, np.complex64), "w": np.ones((64, 64), np.float32), "none": None}
    tx, plain = scale_by_adam(), optax.scale_by_adam()
    grads = {**params, "c": params["c"] * np.complex64(1 + 1j)}
    got, expected = (jax.jit(lambda p, g, t=t: t.update(g, t.init(p))[0]["c"])(params, grads) for t in (tx, plain))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    state = jax.jit(tx.init)(params)
    updates, after = jax.jit(tx.update)({**grads, "w": None}, state)
    assert updates["w"] is None and after.nu["w"].dtype == np.uint8
    np.testing.assert_array_equal(after.mu["w"], state.mu["w"])


@cache
def adam(name: str) -> tuple[optax.GradientTransformation, Any]:
    """With moments of this dtype, and its compiled update."""
    tx = scale_by_adam(0.9, 0.95, state_dtype=DTYPES[name])
    return tx, jax.jit(tx.update)


@pytest.mark.parametrize("target", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "int8"])
def test_moments_are_converted_between_dtypes(source: str, target: str) -> None:
    params = make_params()
    (tx, update), (other, other_update) = adam(source), adam(target)
    state = tx.init(params)
    for step in range(3):
        state = update(gradients(step), state)[1]
    dtypes = jax.tree.map(lambda x: x.dtype, jax.eval_shape(other.init, params))
    got: Any = jax.jit(lambda state: quantized.convert_adam(state, dtypes, 0.9, 0.95))(state)
    assert jax.tree.map(lambda x: x.dtype, got) == dtypes
    if source == target:
        jax.tree.map(np.testing.assert_array_equal, got, state)
    u, expected = other_update(gradients(3), got)[0], update(gradients(3), state)[0]
    for name in SHAPES:
        error = np.sqrt(np.mean(np.square(u[name] - expected[name])))
        assert error <= (0.1 if "int8" in (source, target) else 0.01) * np.sqrt(np.mean(np.square(expected[name])))
