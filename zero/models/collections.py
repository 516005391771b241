"""Variables of a model beside its parameters: whole on every device, and moved by a rule of their own, by no optimizer.

In a training step the "gradient" of a collection, summed over micro-batches and devices, is what its rule needs to
know about the global batch. A new kind of such variables is a file with three functions and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from zero.models.codebook import init_codebook, update_codebook, with_commitment
from zero.models.config import GPTConfig
from zero.models.gated_unit import CODEBOOK


class Collection(NamedTuple):
    """Pure functions of the variables of one collection.

    Attributes:
      init: from a random key to those of a new model.
      prepare: `(variables, positions)` to what the model computes with in a step over so many positions.
      update: `(variables, their gradients, random key)` to the variables after the step.
    """

    init: Callable[[jax.Array], Any]
    prepare: Callable[[Any, int], Any]
    update: Callable[[Any, Any, jax.Array], Any]


def collections_of(config: GPTConfig) -> dict[str, Collection]:
    """The collections of a model, by the name that Flax knows them by."""
    if not config.has_codebook:
        return {}
    return {CODEBOOK: Collection(partial(init_codebook, config), with_commitment, update_codebook)}
