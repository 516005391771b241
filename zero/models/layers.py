"""The layers of a model, and their caches, by the mixers that they have."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import DTypeLike

from zero.models.layer import Layer
from zero.models.mixers import MIXERS, Caches
from zero.models.part import FIRST, MTP_BLOCKS
from zero.models.transformer_layer import DenseLayer, MtpLayer, Period, TransformerLayer
from zero.partition.model_parallel import ModelParallel

_BESIDE = {FIRST: DenseLayer, MTP_BLOCKS: MtpLayer}  # layers before and after the stack, by the name of theirs


def layer_of_stack(config: Any, name: str) -> type[Layer]:
    """The class of an entry of a stack of layers, of `zero.models.part.STACKS`; all take the same arguments."""
    if config.alone is not None:
        layer: Any = MIXERS[config.layer].module
        assert issubclass(layer, Layer)  # the mixer makes whole layers
        return layer
    if name in _BESIDE:
        return _BESIDE[name]
    return TransformerLayer if config.period == 1 else Period


def empty_caches(
    config: Any, rows: int, positions: int, dtype: DTypeLike, row_group: ModelParallel, known: jax.Array | int
) -> Caches:
    """An empty cache of each mixer of a model, by name; arguments as for `zero.models.gpt.init_cache`."""
    pattern = config.mixer_pattern
    counts = {name: config.N // len(pattern) * pattern.count(name) for name in sorted({*pattern})}
    return {
        name: MIXERS[name].cache(config, count, rows, positions, dtype, row_group, known)
        for name, count in counts.items()
    }
