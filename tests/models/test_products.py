"""Products in 8 bits against the formula in float64, their errors, and what of a layer they compute."""

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from zero.models.config import GPTConfig
from zero.models.elements import contraction
from zero.models.families import FAMILIES
from zero.models.gpt import GPT, variable_shapes
from zero.models.products import E4M3, E5M2, EIGHT_BITS, INT8, PRODUCTS, Form, quantized

X, W, G = (
    np.asarray(jax.random.normal(jax.random.key(i), shape))
    for i, shape in enumerate(((2, 6, 40), (40, 24), (2, 6, 24)))
)


def rounded(form: Form, x: np.ndarray, axis: int) -> np.ndarray:
    """A matrix of float64, rounded to the numbers of a form, with a scale for each line along `axis`."""
    scale = np.abs(x).max(axis, keepdims=True) / form.largest
    if form is INT8:
        return np.round(x / scale) * scale
    return (x / scale).astype(form.dtype).astype(np.float64) * scale


def by_formula(name: str, x: np.ndarray, w: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The product of matrices and its gradients in float64, each operand rounded as the form says."""
    values, of_grad = {"int8": (INT8, INT8), "int8_all": (INT8, INT8), "float8": (E4M3, E5M2)}[name]
    x, w, g = (a.astype(np.float64) for a in (x, w, g))
    w_rounded = rounded(values, w, 0)
    scale = np.abs(w).max(0) / values.largest  # is in the gradient before that is rounded
    to_inputs = rounded(of_grad, g * scale, 1) @ (w_rounded / scale).T
    scale_x = np.abs(x).max(1, keepdims=True) / values.largest
    to_weights = {
        "int8": lambda: x.T @ g,
        # The numbers of the forward pass again: the scales of positions are in the gradient before that is rounded.
        "int8_all": lambda: (rounded(values, x, 1) / scale_x).T @ rounded(of_grad, g * scale_x, 0),
        "float8": lambda: rounded(values, x, 0).T @ rounded(of_grad, g, 0),
    }[name]()
    return rounded(values, x, 1) @ w_rounded, to_inputs, to_weights


def computed(name: str, x: np.ndarray, w: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    y, pull_back = jax.vjp(PRODUCTS[name], jnp.asarray(x), jnp.asarray(w))
    to_inputs, to_weights = pull_back(jnp.asarray(g))
    return np.asarray(y), np.asarray(to_inputs), np.asarray(to_weights)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_formula(name: str) -> None:
    """The product and both gradients are those of the formula."""
    y, dx, dw = by_formula(name, X.reshape(12, 40), W, G.reshape(12, 24))
    expected = y.reshape(2, 6, 24), dx.reshape(2, 6, 40), dw
    for got, exact in zip(computed(name, X, W, G), expected, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


def test_errors_of_int8() -> None:
    """No element is off by more than half a step of each of its operands."""
    y, dx, dw = (got.astype(np.float64) for got in computed("int8", X, W, G))
    x, w, g = (np.abs(a.astype(np.float64)) for a in (X, W, G))
    step_x, step_w = x.max(-1, keepdims=True) / 127, w.max(0) / 127
    limit = x @ np.broadcast_to(step_w / 2, w.shape) + step_x / 2 * w.sum(0) + 40 * step_x * step_w / 4
    assert (np.abs(y - X.astype(np.float64) @ W) <= 1.0001 * limit).all()
    step_g = (g * step_w).max(-1, keepdims=True) / 127
    limit = (g * step_w / 2).sum(-1, keepdims=True) + step_g / 2 * (w / step_w + 0.5).sum(1)
    assert (np.abs(dx - G.astype(np.float64) @ W.T) <= 1.0001 * limit).all()
    assert np.linalg.norm(dx - G @ W.T) < 0.012 * np.linalg.norm(dx)
    np.testing.assert_array_equal(dw, jax.vjp(contraction, X, W)[1](G)[1])  # is not rounded


@pytest.mark.parametrize(
    ("name", "limits"),
    [("int8", (0.01, 0.012, 1e-6)), ("int8_all", (0.01, 0.012, 0.016)), ("float8", (0.04, 0.07, 0.06))],
)
def test_relative_errors(name: str, limits: tuple[float, ...]) -> None:
    """Errors are those of the forms: 1/127 and 1/16 of a value, and 1/8 of a gradient in float8."""
    exact = jax.vjp(contraction, jnp.asarray(X), jnp.asarray(W))
    for got, plain, limit in zip(computed(name, X, W, G), (exact[0], *exact[1](G)), limits, strict=True):
        assert np.linalg.norm(got - plain) < limit * np.linalg.norm(plain)
        assert name == "int8" or np.linalg.norm(got - plain) > 0.2 * limit * np.linalg.norm(plain)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_outliers_stay_in_their_row(name: str) -> None:
    """A large input makes only its own row coarse, and a large weight only its column."""
    plain = computed(name, X, W, G)
    x, w = X.copy(), W.copy()
    x[1, 2, 3] = 1e4
    others = np.ones((2, 6), bool)
    others[1, 2] = False
    np.testing.assert_array_equal(computed(name, x, W, G)[0][others], plain[0][others])
    w[3, 4] = 1e4
    np.testing.assert_array_equal(np.delete(computed(name, X, w, G)[0], 4, -1), np.delete(plain[0], 4, -1))


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    """A row with a value that is not finite has no finite output, so that the step is skipped; other rows have."""
    x, g = X.copy(), G.copy()
    x[0, 1, 2] = g[1, 4, 5] = bad
    y, dx, dw = computed(name, x, W, g)
    of_rows = np.isfinite(y).sum(-1)
    assert of_rows[0, 1] == 0 and (np.delete(of_rows.ravel(), 1) == 24).all()
    of_rows = np.isfinite(dx).sum(-1)
    assert of_rows[1, 4] == 0 and (np.delete(of_rows.ravel(), 10) == 40).all()
    assert not np.isfinite(dw).all()


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("factor", [0.0, 1e-35, 1e-15, 1e15])
def test_magnitudes(name: str, factor: float) -> None:
    """Scales follow the magnitude; rows of zeros, and numbers with no finite reciprocal, give no NaN."""
    y, dx, dw = computed(name, X * np.float32(factor), W, G * np.float32(factor))
    assert all(np.isfinite(got).all() for got in (y, dx, dw))
    if factor in (1e-15, 1e15):
        plain = computed(name, X, W, G)
        np.testing.assert_allclose(y / factor, plain[0], rtol=2e-2, atol=2e-2)
        np.testing.assert_allclose(dx / factor, plain[1], rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "int8" else pytest.mark.wide) for name in PRODUCTS]
)
def test_two_dimensions(name: str) -> None:
    """Heads and their width are contracted, or computed, as one dimension."""
    of_matrix = computed(name, X, W, G)
    of_heads = computed(name, X.reshape(2, 6, 5, 8), W.reshape(5, 8, 4, 6), G.reshape(2, 6, 4, 6))
    for got, flat in zip(of_heads, of_matrix, strict=True):
        np.testing.assert_allclose(got.reshape(flat.shape), flat, rtol=1e-6, atol=1e-6)


def products_of(jaxpr: Any) -> Counter[tuple[str, str]]:
    """The dtypes of the operands of all products of a jaxpr."""
    count: Counter[tuple[str, str]] = Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            x, y = (str(variable.aval.dtype) for variable in eqn.invars)
            count[x, y] += 1
        for inner in jaxprs_in_params(eqn.params):
            count += products_of(inner)
    return count


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bfloat16", {("bfloat16", "bfloat16"): 3}),
        ("int8", {("int8", "int8"): 2, ("float32", "float32"): 1}),
        ("int8_all", {("int8", "int8"): 3}),
        (
            "float8",
            {
                ("float8_e4m3fn", "float8_e4m3fn"): 1,
                ("float8_e5m2", "float8_e4m3fn"): 1,
                ("float8_e4m3fn", "float8_e5m2"): 1,
            },
        ),
    ],
)
def test_dtypes_of_operands(name: str, expected: dict[tuple[str, str], int]) -> None:
    """Each of the three products multiplies what its form says."""

    def all_three(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        y, pull_back = jax.vjp(PRODUCTS[name], x, w)
        return y, pull_back(g)

    assert products_of(jax.make_jaxpr(all_three)(X, W, G).jaxpr) == expected


def test_dtype_of_results() -> None:
    """Results have the dtype of the inputs, also in bfloat16."""
    for product in PRODUCTS.values():
        x, w = jnp.zeros((1, 2, 4), jnp.bfloat16), jnp.zeros((4, 3), jnp.bfloat16)
        y, pull_back = jax.vjp(product, x, w)
        assert {y.dtype, *(grad.dtype for grad in pull_back(y))} == {jnp.dtype(jnp.bfloat16)}


def test_range_of_sums() -> None:
    """A row whose sum could leave int32 is refused: 133,144 products of 127 x 127 do not."""
    product = partial(jax.eval_shape, PRODUCTS["int8"])
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    assert product(shape((1, 1, 133_144)), shape((133_144, 1))).shape == (1, 1, 1)
    with pytest.raises(ValueError, match="the sum of 133145 products"):
        product(shape((1, 1, 133_145)), shape((133_145, 1)))


def test_quantized_numbers_use_the_whole_range() -> None:
    for form in (INT8, E4M3, E5M2):
        numbers, scales = quantized(jnp.asarray(W), form, (0,))
        assert (jnp.max(jnp.abs(numbers.astype(jnp.float32)), axis=0) == form.largest).all()
        assert scales.shape == (1, 24)


LLAMA = GPTConfig(
    **{
        "embedding_dim": 16,
        "vocab_size": 20,
        "num_head": 2,
        "block_size": 8,
        "dropout": 0.0,
        "N": 2,
        **FAMILIES["llama"],
    }
)


@pytest.mark.parametrize(
    "config",
    [LLAMA, pytest.param(GPTConfig(16, 20, num_head=2, block_size=8, dropout=0.0, N=2), marks=pytest.mark.wide)],
    ids=str,
)
def test_products_of_a_layer(config: GPTConfig) -> None:
    """The projections of attention and the MLP are computed in 8 bits; scores, vocabulary and norms are not."""
    tokens = jnp.zeros((1, 8), jnp.int32)

    def products(name: str) -> Counter[tuple[str, str]]:
        model = GPT(config, product=PRODUCTS[name])
        return products_of(jax.make_jaxpr(model.apply)(variable_shapes(config), tokens, tokens).jaxpr)

    of_layer = 7 if config.gated else 6
    plain = products("auto")
    assert products("int8") == {
        ("int8", "int8"): of_layer,
        ("float32", "float32"): plain["float32", "float32"] - of_layer,
    }
