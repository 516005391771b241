"""Weight decay: which leaves it applies to, and how it is joined to an optimizer without a learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero.models.axes import Axes, map_axes
from zero.partition.layout import PyTree

# From parameters, or a part of them, to a float or a boolean for each leaf.
Multipliers = Callable[[PyTree], PyTree]
Mask = Callable[[PyTree], PyTree]


# Which parameters weight decay applies to, by the values of `optimizer.decay_on`: matrices, vocabulary and head, not
# norms, biases or positions; or as in `optimizers.py` of GPT-Neo.
DECAYED: Mapping[str, Callable[[Axes], bool]] = MappingProxyType(
    {"matrices": lambda axes: axes.is_matrix, "gpt_neo": lambda axes: axes.decays_in_gpt_neo}
)


def decayed(axes: Mapping[str, Axes], decay_on: str = "matrices") -> Mask:
    """From parameters of these axes, or a part of them, to whether weight decay applies to each leaf."""
    return partial(map_axes, DECAYED[decay_on], axes)


def decoupled(
    tx: optax.GradientTransformation,
    weight_decay: float,
    mask: Mask,
    decay: str = "rate",
    multipliers: Multipliers | None = None,
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


def _constant_decay(weight_decay: float, mask: Mask) -> optax.GradientTransformationExtraArgs:
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
