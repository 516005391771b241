"""Variables of a model beside its parameters: replicated, and updated by a rule of their own instead of the optimizer.

In a training step the "gradient" of a collection, summed over micro-batches and devices, is the input of its rule. A
new kind of variables is a file with three functions and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from zero.models.codebook import codebook_metrics, init_codebook, update_codebook, with_commitment
from zero.models.config import GPTConfig
from zero.models.gated_unit import CODEBOOK


class Collection(NamedTuple):
    """Pure functions of the variables of one collection.

    Attributes:
      init: from a random key to the variables of a new model.
      prepare: `(variables, positions)` to the variables that the model reads in a step over that many positions.
      update: `(variables, their gradients, random key)` to the variables after the step.
      metrics: from the variables of a step to scalars to log.
    """

    init: Callable[[jax.Array], Any]
    prepare: Callable[[Any, int], Any]
    update: Callable[[Any, Any, jax.Array], Any]
    metrics: Callable[[Any], dict[str, jax.Array]]


def collections_of(config: GPTConfig) -> dict[str, Collection]:
    """The collections of a model, by their name in Flax."""
    if not config.has_codebook:
        return {}
    init, prepare, update = (partial(rule, config) for rule in (init_codebook, with_commitment, update_codebook))
    return {CODEBOOK: Collection(init, prepare, update, codebook_metrics)}
