"""The kinds of layers: an entry for each, and a file that has its layer and the part of the keys that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from zero.models.gated_layer import GatedLayer, RecurrentState, init_recurrent
from zero.models.gated_unit import GatedUnits
from zero.models.layer import Layer
from zero.models.mixer import Transformer
from zero.models.mixers import MIXERS, Caches
from zero.models.part import FIRST, GATED_UNITS, PREDICTOR, STACK, TRANSFORMER
from zero.models.transformer_layer import DenseLayer, FurtherLayer, Period, TransformerLayer
from zero.partition.model_parallel import ModelParallel

AnyCache = Caches | RecurrentState


class LayerKind(NamedTuple):
    """A kind of layers; all modules take the same arguments.

    Attributes:
      module: from a configuration to the class of an entry of the stack of layers.
      cache: an empty cache; arguments as for `zero.models.gpt.init_cache`.
      beside: the classes of layers before and after the stack, by the name of theirs; empty if this kind has none.
    """

    module: Callable[[Any], type[Layer]]
    cache: Callable[[Any, int, int, DTypeLike, ModelParallel, jax.Array | int], AnyCache]
    beside: Mapping[str, type[Layer]] = MappingProxyType({})

    def of_stack(self, name: str, config: Any) -> type[Layer]:
        """The class of an entry of a stack of layers, of `zero.models.part.STACKS`."""
        if name == STACK:
            return self.module(config)
        return self.beside[name]


def _transformer_layer(config: Transformer) -> type[Layer]:
    return TransformerLayer if config.period == 1 else Period


def _caches(
    config: Transformer, rows: int, positions: int, dtype: DTypeLike, cut: ModelParallel, known: jax.Array | int
) -> Caches:
    periods = config.N // len(config.mixers)
    counts = {name: periods * config.mixers.count(name) for name in sorted({*config.mixers})}
    return {
        name: MIXERS[name].cache(config, count, rows, positions, dtype, cut, known) for name, count in counts.items()
    }


def _gated_layer(config: GatedUnits) -> type[Layer]:
    return GatedLayer


def _memory(
    config: GatedUnits, rows: int, positions: int, dtype: DTypeLike, cut: ModelParallel, known: jax.Array | int
) -> RecurrentState:
    return init_recurrent(config, rows, known, dtype, cut)


# By the key `layer`.
LAYERS = {
    TRANSFORMER: LayerKind(_transformer_layer, _caches, {FIRST: DenseLayer, PREDICTOR: FurtherLayer}),
    GATED_UNITS: LayerKind(_gated_layer, _memory),
}
