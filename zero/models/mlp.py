"""The MLP of a layer: its keys and activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from zero.base.keys import key, one_of
from zero.models.axes import named
from zero.models.part import Sizes


class Activation(NamedTuple):
    """Hidden values of an MLP.

    Attributes:
      of_input: of the product of an MLP without a gate; None if it needs one.
      of_gate: of the product that is the gate, and of the other one.
      scalars: initial values of the scalars that each layer learns, by name. Both functions take them, float32, as
        further arguments.
    """

    of_input: Callable[..., jax.Array] | None
    of_gate: Callable[..., jax.Array]
    scalars: Mapping[str, float] = MappingProxyType({})


def _multiplied(function: Callable[..., jax.Array], scalars: Mapping[str, float] = MappingProxyType({})) -> Activation:
    """The activation of the gate times the input (arXiv 2002.05202)."""
    return Activation(function, lambda gate, x, *learned: function(gate, *learned) * x, scalars)


def _squared_relu(x: jax.Array) -> jax.Array:
    """Source: Primer, arXiv 2109.08668, section 3."""
    return jnp.square(nn.relu(x))


def _clamped_swiglu(gate: jax.Array, x: jax.Array) -> jax.Array:
    """Source: gpt-oss, arXiv 2508.10925."""
    gate = jnp.minimum(gate, 7)
    x = jnp.clip(x, -7, 7)
    return gate * nn.sigmoid(1.702 * gate) * (x + 1)


# Constants of xIELU, which folders of transformers hold as tensors: the slope at 0, and the largest exponent.
XIELU_BETA, XIELU_EPSILON = 0.5, -1e-6
_XIELU_START = 0.8  # of both slopes


def _xielu(x: jax.Array, positive: jax.Array, negative: jax.Array) -> jax.Array:
    """A parabola above 0, an exponential curve below; the softplus of both scalars keeps their slopes above 0 and beta.

    In float32, because the gradient of a scalar is a sum over all hidden values.

    Source: arXiv 2411.13010.
    """
    x32 = x.astype(jnp.float32)
    above = nn.softplus(positive) * x32 * x32
    below = (XIELU_BETA + nn.softplus(negative)) * (jnp.expm1(jnp.minimum(x32, XIELU_EPSILON)) - x32)
    return (jnp.where(x32 > 0, above, below) + XIELU_BETA * x32).astype(x.dtype)


def _inverse_softplus(value: float) -> float:
    return math.log(math.expm1(value))


ACTIVATIONS = {
    "gelu": _multiplied(lambda x: nn.gelu(x, approximate=True)),
    "gelu_exact": _multiplied(lambda x: nn.gelu(x, approximate=False)),
    "relu": _multiplied(nn.relu),
    "squared_relu": _multiplied(_squared_relu),
    "selu": _multiplied(nn.selu),
    "silu": _multiplied(nn.silu),
    "clamped_swiglu": Activation(None, _clamped_swiglu),
    "xielu": _multiplied(
        _xielu,
        {
            "positive": _inverse_softplus(_XIELU_START),
            "negative": _inverse_softplus(_XIELU_START - XIELU_BETA),
        },
    ),
}


@dataclass(frozen=True)
class MLP(Sizes):
    """The keys of an MLP."""

    activation: str = key(
        "gelu",
        one_of(*ACTIVATIONS),
        "gelu (by tanh), gelu_exact, relu, squared_relu, selu, silu, xielu, whose two slopes each layer learns, or "
        "with gated: true clamped_swiglu, silu of slope 1.702 times a second product plus 1, both cut at 7",
    )
    gated: bool = key(
        False, None, "the activation multiplies a second product, as in SwiGLU: activation silu, gated true"
    )
    mlp_bias: bool = key(True, None, "biases of the MLP; with experts, of each of them and of the router")

    def mistakes(self) -> Iterator[str]:
        """An activation that needs a gate."""
        if not self.gated and ACTIVATIONS[self.activation].of_input is None:
            yield f"activation: {self.activation} needs gated: true"


class Scalars(nn.Module):
    """The scalars that an activation learns, float32 `()` in the order of its entry; parameters of `(1,)`."""

    config: MLP

    @nn.compact
    def __call__(self) -> tuple[jax.Array, ...]:
        starts = ACTIVATIONS[self.config.activation].scalars
        leaves = [
            self.param(name, named(nn.initializers.constant(start), "scalar"), (1,)) for name, start in starts.items()
        ]
        return tuple(leaf.astype(jnp.float32)[0] for leaf in leaves)


def hidden_values(config: MLP, x: jax.Array, gate: jax.Array | None, scalars: tuple[jax.Array, ...] = ()) -> jax.Array:
    """The hidden values of an MLP, from its products and `Scalars`; `gate` is None if it has none."""
    activation = ACTIVATIONS[config.activation]
    if gate is not None:
        return activation.of_gate(gate, x, *scalars)
    assert activation.of_input is not None  # a rule of the keys
    return activation.of_input(x, *scalars)
