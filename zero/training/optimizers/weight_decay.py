"""Weight decay: which leaves it applies to, and how it is joined to an optimizer without a learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero.models.adapters import MATRICES
from zero.models.config import HEAD, VOCABULARY
from zero.partition.layout import PyTree

Multipliers = Callable[[PyTree], PyTree]  # from parameters, or a part of them, to a float for each leaf


def decayed(params: PyTree) -> PyTree:
    """Which leaves weight decay applies to: matrices, vocabulary and head, not norms, biases or positions."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in MATRICES or path[0].key in (VOCABULARY, HEAD), params
    )


def _decayed_in_gpt_neo(params: PyTree) -> PyTree:
    """All leaves but biases and the norms of layers: positions and the last norm too (`optimizers.py` of GPT-Neo)."""
    outside = (VOCABULARY, HEAD, "positions", "norm")
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in MATRICES or path[0].key in outside, params)


# Which leaves weight decay applies to, by the values of `optimizer.decay_on`.
DECAYED: Mapping[str, Callable[[PyTree], PyTree]] = MappingProxyType(
    {"matrices": decayed, "gpt_neo": _decayed_in_gpt_neo}
)


def decoupled(
    tx: optax.GradientTransformation,
    weight_decay: float,
    decay: str = "rate",
    multipliers: Multipliers | None = None,
    mask: Callable[[PyTree], PyTree] = decayed,
) -> optax.GradientTransformation:
    """`tx`, with updates multiplied leaf by leaf, and weight decay, which is multiplied only if it is coupled.

    Multiplied, decay vanishes as the width grows, and learning rates no longer transfer (Kosson et al., arXiv
    2510.19093).
    """
    decays = (
        _constant_decay(weight_decay, mask) if decay == "constant" else optax.add_decayed_weights(weight_decay, mask)
    )
    if multipliers is None:
        return optax.chain(tx, decays)
    multiply = by_leaf(jnp.multiply, multipliers)
    if decay == "coupled":
        return optax.chain(tx, decays, multiply)
    return optax.chain(tx, multiply, decays)


def _constant_decay(weight_decay: float, mask: Callable[[PyTree], PyTree]) -> optax.GradientTransformationExtraArgs:
    """Constant weight decay: divided by the learning rate, because the step multiplies it by that rate."""

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, rate: jax.Array, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        share = jnp.where(rate > 0, weight_decay / rate, 0)
        decayed_updates = jax.tree.map(lambda u, p, d: u + share * p if d else u, updates, params, mask(params))
        return decayed_updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def by_leaf(
    operation: Callable[[jax.Array, float], jax.Array], multipliers: Multipliers
) -> optax.GradientTransformation:
    """Updates changed by an operation with the multiplier of their leaf."""
    return optax.stateless(lambda updates, _: jax.tree.map(operation, updates, multipliers(updates)))
