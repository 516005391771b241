"""The keys of linear attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp

from zero.base.keys import key, one_of, positive
from zero.models.parametrization import Parametrization
from zero.models.part import LINEAR, changed_keys

# The features of a query or key, which are not negative, by the names of `linear_features`.
FEATURES: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {"elu": lambda x: jax.nn.elu(x) + 1, "relu": jax.nn.relu, "squared_relu": lambda x: jnp.square(jax.nn.relu(x))}
)


@dataclass(frozen=True)
class Linear(Parametrization):
    """The keys of layers whose mixer is linear."""

    linear_features: str = key(
        "elu", one_of(*FEATURES), "features of the queries and keys of the mixer linear: elu is elu(x) + 1"
    )
    linear_epsilon: float = key(1e-6, positive(), "added to the sum of weights that its outputs are divided by")

    def mistakes(self) -> Iterator[str]:
        """Keys of a mixer that no layer has, and models that it does not have."""
        yield from self.unread(changed_keys(self, Linear), LINEAR)
        if LINEAR in self.mixers and self.is_mup:
            yield f"{LINEAR} in mixers needs parametrization: standard, got {self.parametrization}"
