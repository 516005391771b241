"""Activations with learned scalars."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.mlp import ACTIVATIONS, MLP, Scalars, hidden_values

CONFIG = MLP(8, 9, 2, 16, 0.0, 1, activation="xielu")


def by_hand(x: np.ndarray, positive: float, negative: float) -> dict[str, Any]:
    """xIELU of arXiv 2411.13010 in float64: the values, and their derivatives with respect to each argument."""
    alpha_p, alpha_n = np.log1p(np.exp(positive)), 0.5 + np.log1p(np.exp(negative))
    slope_p, slope_n = (1 / (1 + np.exp(-scalar)) for scalar in (positive, negative))  # of softplus
    is_above = x > 0
    below = np.expm1(np.minimum(x, 0)) - x
    return {
        "values": np.where(is_above, alpha_p * x**2, alpha_n * below) + 0.5 * x,
        "x": np.where(is_above, 2 * alpha_p * x, alpha_n * np.expm1(np.minimum(x, 0))) + 0.5,
        "positive": np.where(is_above, x**2, 0) * slope_p,
        "negative": np.where(is_above, 0, below) * slope_n,
    }


@pytest.mark.parametrize("scalars", [(0.2, -1.1), (170.0, 40.0), (-8.0, -8.0)], ids=str)
def test_xielu_and_its_gradients(scalars: tuple[float, float]) -> None:
    """Of values whose exponential overflows too, and of the scalars that Apertus learned in its first layers."""
    x = np.concatenate([np.linspace(-6, 6, 40), [-120.0, 100.0]])
    weights = np.random.default_rng(0).normal(size=x.shape)
    expected = by_hand(x, *scalars)

    def total(x: jax.Array, *scalars: jax.Array) -> jax.Array:
        return jnp.sum(hidden_values(CONFIG, x, None, scalars) * weights.astype(np.float32))

    arguments = [jnp.float32(value) for value in (x, *scalars)]
    values = hidden_values(CONFIG, arguments[0], None, tuple(arguments[1:]))
    np.testing.assert_allclose(values, expected["values"], 1e-5)
    of_x, of_positive, of_negative = jax.grad(total, (0, 1, 2))(*arguments)
    np.testing.assert_allclose(of_x, weights * expected["x"], 1e-4)
    np.testing.assert_allclose(of_positive, np.sum(weights * expected["positive"]), 1e-4)
    np.testing.assert_allclose(of_negative, np.sum(weights * expected["negative"]), 1e-4)


def test_scalars_of_a_layer() -> None:
    """They start at the paper's slopes of 0.8; an activation without scalars has no parameters."""
    variables = Scalars(CONFIG).init(jax.random.key(0))["params"]
    assert {name: x.shape for name, x in variables.items()} == {"positive": (1,), "negative": (1,)}
    slopes = [np.log1p(np.exp(variables[name][0])) + below for name, below in (("positive", 0), ("negative", 0.5))]
    np.testing.assert_allclose(slopes, 0.8, rtol=1e-6)
    assert not Scalars(dataclasses.replace(CONFIG, activation="gelu")).init(jax.random.key(0))
    assert [name for name, activation in ACTIVATIONS.items() if activation.scalars] == ["xielu"]


def test_gradient_of_a_scalar_sums_in_float32() -> None:
    """A sum over hidden values in bfloat16 would end where a further term is less than half of its last digit."""
    x = jnp.full((2, 64, 128), 0.1, jnp.bfloat16)

    def total(positive: jax.Array) -> jax.Array:
        return hidden_values(CONFIG, x, None, (positive, jnp.float32(0))).sum(dtype=jnp.float32)

    expected = np.sum(by_hand(np.asarray(x, np.float64), 0.2, 0.0)["positive"])
    np.testing.assert_allclose(jax.grad(total)(jnp.float32(0.2)), expected, rtol=1e-3)


def test_experts_need_another_activation() -> None:
    sizes: dict[str, Any] = {**FAMILIES["apertus"], "rotary_scaling": None, "experts": 4}
    with pytest.raises(ValueError, match="experts need an activation without learned scalars, got xielu"):
        GPTConfig(8, 9, 2, 16, 0.0, 1, **sizes)
