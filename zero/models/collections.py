"""Variables of a model beside its parameters: replicated, and updated by a rule of their own instead of the optimizer.

In a training step the "gradient" of a collection, summed over micro-batches and devices, is the input of its rule. A
new kind of variables is a file with its rules, and an entry of `COLLECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from zero.models.codebook import codebook_metrics, init_codebook, update_codebook, with_commitment
from zero.models.config import GPTConfig
from zero.models.gated_unit import CODEBOOK
from zero.models.router import ROUTER_BIAS
from zero.models.router_bias import init_router_bias, update_router_bias


class Collection(NamedTuple):
    """Pure functions of the variables of one collection.

    Attributes:
      words: a description of the feature, for messages.
      init: from a random key to the variables of a new model.
      prepare: `(variables, positions)` to the variables that the model reads in a step over that many positions.
      update: `(variables, their gradients, random key)` to the variables after the step.
      metrics: from the variables of a step to scalars to log.
    """

    words: str
    init: Callable[[jax.Array], Any]
    update: Callable[[Any, Any, jax.Array], Any]
    prepare: Callable[[Any, int], Any] = lambda variables, positions: variables
    metrics: Callable[[Any], dict[str, jax.Array]] = lambda variables: {}


def _codebook(config: GPTConfig) -> Collection | None:
    if not config.has_codebook:
        return None
    init, prepare, update = (partial(rule, config) for rule in (init_codebook, with_commitment, update_codebook))
    return Collection("a codebook", init, update, prepare, codebook_metrics)


def _router_bias(config: GPTConfig) -> Collection | None:
    if not config.has_router_bias:
        return None
    return Collection("a bias of its router", partial(init_router_bias, config), partial(update_router_bias, config))


# By name in Flax; None for a model without it.
COLLECTIONS: dict[str, Callable[[GPTConfig], Collection | None]] = {CODEBOOK: _codebook, ROUTER_BIAS: _router_bias}


def collections_of(config: GPTConfig) -> dict[str, Collection]:
    """The collections of a model, by their name in Flax."""
    by_name = {name: collection(config) for name, collection in COLLECTIONS.items()}
    return {name: collection for name, collection in by_name.items() if collection is not None}
