"""Whole steps whose products are computed in 8 bits: sharded against one device, in groups, and what they learn."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zero
from tests.training.divisible_models import DIVISIBLE, MODELS
from tests.training.small_gpt import CLIP, PLAIN, Run, first_params, named, reference, run_on, setup, tokens
from zero.models.products import EIGHT_BITS, FORMS, PRODUCTS
from zero.partition.layout import LeafLayout

SOME = (("int8", 3), ("int8_all", 8), ("float8", 1))
CELLS = [
    pytest.param(*cell, marks=() if cell in SOME else pytest.mark.wide)
    for cell in itertools.product(EIGHT_BITS, (1, 3, 8))
]


def assert_equal_but_for_rounding(got: Run, expected: Run) -> None:
    """Two runs whose operands differ in their last bits, so that a few of them are rounded to the next number.

    This sees a layer that is wrong; the product itself is compared closely in `test_sharded_weights`.
    """
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-4)
    np.testing.assert_allclose(got.metrics["gradient_norm"], expected.metrics["gradient_norm"], rtol=3e-3)


@pytest.mark.parametrize(("name", "devices"), CELLS)
def test_sharded_weights(name: str, devices: int) -> None:
    """A product with gathered shards, on each device's own rows, is that of all rows with the whole weights."""
    x, w, grad = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((24, 5, 40), (40, 24), (24, 5, 24)))
    )
    layout = zero.make_layout({"w": w}, devices)

    def step(x: jax.Array, grad: jax.Array) -> Any:
        product = zero.fully_shard(lambda params, x: PRODUCTS[name](x, params["w"]), layout, "i")
        y, pull_back = jax.vjp(product, zero.shard({"w": w}, layout, "i"), x)
        to_shards, to_inputs = pull_back(grad)
        return y, to_inputs, zero.gather(to_shards, layout, "i")["w"]

    def rows(x: jax.Array) -> jax.Array:
        return x.reshape(devices, -1, *x.shape[1:])

    y, to_inputs, to_weights = jax.pmap(step, "i", devices=jax.devices()[:devices])(rows(x), rows(grad))
    whole, pull_back = jax.vjp(PRODUCTS[name], x, w)
    expected = pull_back(grad)
    np.testing.assert_allclose(y.reshape(whole.shape), whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(to_inputs.reshape(x.shape), expected[0], rtol=1e-6, atol=1e-6)
    # The gradient of weights, where it is rounded, has scales over the rows of one device.
    limit = 1e-5 if name == "int8" else 0.1
    assert np.linalg.norm(np.asarray(to_weights[0]) - np.asarray(expected[1])) < limit * np.linalg.norm(expected[1])


@pytest.mark.parametrize(("name", "devices"), CELLS)
def test_gathered_in_8_bits(name: str, devices: int) -> None:
    """Weights that are rounded before they are gathered give the same bits: split along inputs, outputs, or padded."""
    shapes = {"inputs": (24, 10), "outputs": (10, 24), "padded": (25, 11), "bias": (24,)}
    params = {key: jax.random.normal(jax.random.key(i), shape) for i, (key, shape) in enumerate(shapes.items())}
    x, grad = (jax.random.normal(jax.random.key(i), (8 * 3, 5, 24)) for i in (7, 8))
    layout = zero.make_layout(params, devices)
    dtypes: dict[str, str] = {}

    def function(params: Any, x: jax.Array) -> Any:
        dtypes.update({key: str(getattr(w, "numbers", w).dtype) for key, w in params.items()})
        product = PRODUCTS[name]
        hidden = product(x, params["inputs"])
        y = product(hidden, params["outputs"]) + params["bias"].reshape(1, 1, -1)
        return y + product(jnp.pad(x, ((0, 0), (0, 0), (0, 1))), params["padded"]).sum(-1, keepdims=True)

    def with_padding(leaf: LeafLayout, shard: jax.Array) -> jax.Array:
        """Large values in the padding, as updates may leave there."""
        for split in leaf.splits:
            of_padding = split.positions(lax.axis_index("i")) >= split.size
            shard = jnp.where(lax.broadcast_in_dim(of_padding, shard.shape, (split.dim,)), 1e3, shard)
        return shard

    def step(rounding: Any, x: jax.Array, grad: jax.Array) -> Any:
        sharded = zero.fully_shard(function, layout, "i", rounding=rounding)
        y, pull_back = jax.vjp(sharded, layout.map(with_padding, zero.shard(params, layout, "i")), x)
        return y, *pull_back(grad)

    def results(rounding: Any) -> Any:
        run = jax.pmap(partial(step, rounding), "i", devices=jax.devices()[:devices])
        return run(*(a.reshape(devices, -1, *a.shape[1:]) for a in (x, grad)))

    plain = results(None)
    assert set(dtypes.values()) == {"float32"}
    sent = results(lambda leaf: FORMS[name].values if len(leaf.shape) == 2 else None)
    assert dtypes["inputs"] == str(jnp.dtype(FORMS[name].values.dtype)) and dtypes["bias"] == "float32"
    jax.tree.map(np.testing.assert_array_equal, sent, plain)


@pytest.mark.parametrize(
    ("devices", "stage", "gathers_rounded"),
    [
        (8, 3, True),
        pytest.param(8, 3, False, marks=pytest.mark.wide),
        *(pytest.param(*case, False, marks=pytest.mark.slow) for case in [(1, 3), (3, 1), (8, 0), (8, 2)]),
    ],
)
def test_int8_equals_one_device(devices: int, stage: int, gathers_rounded: bool) -> None:
    """Scales are those of rows and of whole weights, so that no result depends on the number of devices.

    Nor on whether weights are rounded before they are gathered.
    """
    got = run_on(setup(devices, stage, config=PLAIN, product_dtype="int8", gathers_rounded=gathers_rounded))
    expected = reference(PLAIN, product_dtype="int8")
    assert_equal_but_for_rounding(got, expected)
    start = named(first_params(PLAIN))
    for name, x in expected.params.items():
        if not name.endswith("/key/bias"):
            assert np.linalg.norm(got.params[name] - x) < 0.05 * np.linalg.norm(x - start[name]), name


def test_bad_weights_make_their_column_bad() -> None:
    """A weight that is not finite on one device leaves no output of its column finite, so that the step is skipped."""
    w = jax.random.normal(jax.random.key(0), (24, 10))
    layout = zero.make_layout({"w": w}, 8)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        sharded = zero.fully_shard(
            lambda params, x: PRODUCTS["int8"](x, params["w"]), layout, "i", rounding=lambda leaf: FORMS["int8"].values
        )
        return sharded(zero.shard({"w": w}, layout, "i"), x)

    run = jax.pmap(product, "i", in_axes=(0, None))
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        y = np.asarray(run(jnp.ones((8, 1, 1, 24)), w.at[5, 3].set(bad)))
        assert not np.isfinite(y[..., 3]).any() and np.isfinite(np.delete(y, 3, -1)).all()


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(8, marks=pytest.mark.wide),
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"dtype": jnp.bfloat16, "remat": "full"}, marks=pytest.mark.slow)], ids=str
)
def test_steps_that_gather_in_8_bits(devices: int, options: dict[str, Any]) -> None:
    """Whole steps are the same bits as where weights are rounded after they are gathered."""
    expected = run_on(setup(devices, 3, product_dtype="int8", **options))
    got = run_on(setup(devices, 3, product_dtype="int8", gathers_rounded=True, **options))
    np.testing.assert_array_equal(got.metrics["loss"], expected.metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, got.params, expected.params)


@pytest.mark.wide  # tests/models/test_products.py has the products
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_products_are_rounded(name: str) -> None:
    """Gradients differ from those of exact products, and only a little."""
    exact, rounded = (
        np.asarray(reference(PLAIN, product_dtype=one).metrics["gradient_norm"]) for one in ("auto", name)
    )
    difference = np.abs(rounded / exact - 1).max()
    assert 1e-5 < difference < 1e-2  # most of the norm is of the vocabulary, which is not rounded


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        pytest.param("tensor", {}, marks=pytest.mark.wide),
        pytest.param("context", {"blockwise_from": 2}, marks=pytest.mark.slow),
        pytest.param(
            "plain", {"fused_update": True, "skip_bad_steps": False, "max_norm": None}, marks=pytest.mark.slow
        ),
        pytest.param("plain", {"remat": "mlp_in+projections"}, marks=pytest.mark.slow),
        pytest.param("plain", {"micro_batches": 3}, marks=pytest.mark.slow),
        pytest.param("plain", {"micro_batches": 3, "gathers_rounded": True}, marks=pytest.mark.slow),
        pytest.param("context", {"blockwise_from": 2, "gathers_rounded": True}, marks=pytest.mark.slow),
        pytest.param(
            "plain",
            {"fused_update": True, "skip_bad_steps": False, "max_norm": None, "gathers_rounded": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_groups_and_policies(devices: str, options: dict[str, Any]) -> None:
    """Each is the step of one device; in a tensor group a part of a row has a scale of its own."""
    axes = {
        "tensor": zero.Axis.with_tensor_groups("zero", 8, 4),
        "context": zero.Axis("zero", (1, 8), context=2),
        "plain": zero.Axis("zero", (1, 8)),
    }
    config = dataclasses.replace(MODELS["llama"], dropout=0.0)
    data = partial(tokens, context=DIVISIBLE.block_size)
    clip = optax.identity() if "max_norm" in options else CLIP
    exact, expected = (reference(config, clip, data=data, product_dtype=one) for one in ("auto", "int8"))
    got = run_on(setup(8, 3, config=config, product_dtype="int8", axis=axes[devices], **options), data=data)
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=2e-3)
    np.testing.assert_allclose(got.metrics["gradient_norm"], expected.metrics["gradient_norm"], rtol=2e-2)
    errors = np.abs(np.divide(got.metrics["loss"], exact.metrics["loss"]) - 1)
    assert errors.max() > 1e-5  # below 1e-6 where nothing is rounded


@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("devices", [3, 8])
def test_tied_and_gated_model(devices: int, name: str) -> None:
    """The vocabulary, whose matrix is used twice, is not rounded, and a gate is rounded as the other matrices are."""
    config = dataclasses.replace(MODELS["llama"], dropout=0.0, tied=True)
    data = partial(tokens, context=DIVISIBLE.block_size)
    got = run_on(setup(devices, 3, config=config, product_dtype=name), data=data)
    expected = reference(config, data=data, product_dtype=name)
    assert not any(leaf.startswith("head") for leaf in got.params)
    np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-3)
    limit = 6e-2 if name == "float8" else 2e-2  # 3 bits of a mantissa, with scales over the rows of a device
    np.testing.assert_allclose(got.metrics["gradient_norm"], expected.metrics["gradient_norm"], rtol=limit)
