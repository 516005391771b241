"""The MLP of a layer: its keys and activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from zero.models.part import Sizes, key, one_of


class Activation(NamedTuple):
    """Hidden values of an MLP.

    Attributes:
      of_input: of the product of an MLP without a gate; None if it needs one.
      of_gate: of the product that is the gate, and of the other one.
    """

    of_input: Callable[[jax.Array], jax.Array] | None
    of_gate: Callable[[jax.Array, jax.Array], jax.Array]


def _multiplied(function: Callable[[jax.Array], jax.Array]) -> Activation:
    """The activation of the gate times the input (arXiv 2002.05202)."""
    return Activation(function, lambda gate, x: function(gate) * x)


def _squared_relu(x: jax.Array) -> jax.Array:
    """Source: Primer, arXiv 2109.08668, section 3."""
    return jnp.square(nn.relu(x))


def _clamped_swiglu(gate: jax.Array, x: jax.Array) -> jax.Array:
    """Source: gpt-oss, arXiv 2508.10925."""
    gate = jnp.minimum(gate, 7)
    x = jnp.clip(x, -7, 7)
    return gate * nn.sigmoid(1.702 * gate) * (x + 1)


ACTIVATIONS = {
    "gelu": _multiplied(lambda x: nn.gelu(x, approximate=True)),
    "gelu_exact": _multiplied(lambda x: nn.gelu(x, approximate=False)),
    "relu": _multiplied(nn.relu),
    "squared_relu": _multiplied(_squared_relu),
    "selu": _multiplied(nn.selu),
    "silu": _multiplied(nn.silu),
    "clamped_swiglu": Activation(None, _clamped_swiglu),
}


@dataclass(frozen=True)
class MLP(Sizes):
    """The keys of an MLP."""

    activation: str = key(
        "gelu",
        one_of(*ACTIVATIONS),
        "gelu (by tanh), gelu_exact, relu, squared_relu, selu, silu, or with gated: true clamped_swiglu, silu "
        "of slope 1.702 times a second product plus 1, both cut at 7",
    )
    gated: bool = key(
        False, None, "the activation multiplies a second product, as in SwiGLU: activation silu, gated true"
    )
    mlp_bias: bool = key(True, None, "biases of the MLP; with experts, of each of them and of the router")

    def mistakes(self) -> Iterator[str]:
        """An activation that needs a gate."""
        if not self.gated and ACTIVATIONS[self.activation].of_input is None:
            yield f"activation: {self.activation} needs gated: true"


def hidden_values(config: MLP, x: jax.Array, gate: jax.Array | None) -> jax.Array:
    """The hidden values of an MLP, from its products; `gate` is None if it has none."""
    activation = ACTIVATIONS[config.activation]
    if gate is not None:
        return activation.of_gate(gate, x)
    assert activation.of_input is not None  # a rule of the keys
    return activation.of_input(x)
