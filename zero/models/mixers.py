"""The kinds of mixers, which mix the positions of a transformer layer: an entry for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from zero.models.gated_delta import (
    DeltaCache,
    GatedDelta,
    empty_delta_cache,
    flops_of_delta,
    heads_of_delta,
    projection_weights_of_delta,
    stored_floats_of_delta,
    transient_floats_of_delta,
)
from zero.models.gated_layer import (
    OTHER_KEYS,
    OWN_KEYS,
    GatedLayer,
    RecurrentState,
    empty_units,
    heads_of_units,
    memory_of_parts,
    mistakes_of_units,
)
from zero.models.latent_attention import (
    LatentAttention,
    LatentCache,
    empty_latents,
    projection_weights_of_latents,
    stored_floats_of_latents,
)
from zero.models.latent_keys import HEADS, LATENT
from zero.models.linear_attention import (
    LinearAttention,
    LinearCache,
    empty_linear_cache,
    flops_of_linear,
    stored_floats_of_linear,
    transient_floats_of_linear,
)
from zero.models.mixer import Mixer, Transformer
from zero.models.part import ATTENTION, DELTA, GATED_UNITS, LINEAR
from zero.models.self_attention import (
    Cache,
    SelfAttention,
    empty_cache,
    flops_of_heads,
    heads_of_attention,
    projection_weights_of_heads,
    stored_floats_of_heads,
    transient_floats_of_heads,
)

# The cache of each kind of mixer, one entry per layer that has it.
Caches = dict[str, Cache | LatentCache | DeltaCache | LinearCache | RecurrentState]


class Alone(NamedTuple):
    """A mixer that has no MLP beside it, and makes whole layers: the key `layer` of a model names it.

    Attributes:
      noun: what messages call it.
      own_keys: those that only its models have.
      other_keys: those that they share with models of other layers.
      mistakes: `(configuration, whether it makes the layers)` to broken rules between keys.
    """

    noun: str
    own_keys: frozenset[str]
    other_keys: frozenset[str]
    mistakes: Callable[[Any, bool], Iterator[str]]


class MixerKind(NamedTuple):
    """A kind of mixers.

    Attributes:
      module: its class, or a function that takes the same arguments; the class of its layers if it makes whole ones.
      stored_floats: floats per token that the backward pass stores, by kind of activation (ATTENTION_OUTPUT,
        ATTENTION_SUMS and PROJECTIONS of `zero.models.stack`), on one device; from the configuration.
      transient_floats: floats per token that a layer computes beyond 34 bytes per channel
        (`zero.training.activations.activation_bytes`); from the configuration.
      projection_weights: the number of weights of the products whose results are of kind PROJECTIONS; from the
        configuration.
      flops: from the configuration and the length of a row to the operations between its positions.
      peak_fraction: the part of the peak that XLA for TPU reaches in these operations.
      cache: an empty one, from the configuration, the number of layers with this mixer, and what
        `zero.models.gpt.init_cache` takes beside the configuration.
      heads: from the configuration to the keys of its numbers of heads, which tensor groups divide.
      swaps_heads: whether context groups have to divide these numbers too, to swap positions for heads.
      is_stored_first: whether its outputs are stored before an MLP's, as computing them again takes longer per byte.
      alone: what it is if it makes whole layers; None: a part of a transformer layer.
      memory: what it remembers before the first part of rows that come in parts, `(L, ...)`: from the configuration,
        the number of rows, the dtype and the group that shares them; None: it needs whole rows.
    """

    module: Callable[..., Any]
    cache: Callable[..., Any]
    stored_floats: Callable[[Any], dict[str, int]]
    transient_floats: Callable[[Any], int]
    projection_weights: Callable[[Any], int]
    flops: Callable[[Any, int], float]
    peak_fraction: float
    heads: Callable[[Any], dict[str, int]]
    swaps_heads: bool = False
    is_stored_first: bool = False
    alone: Alone | None = None
    memory: Callable[..., Any] | None = None


# The shares of dense attention and of the delta rule (docs/decisions/attention.md, benchmarks/measured/delta-rule.md).
# Linear attention, which is not measured, has the products of the second one and no triangular matrices.
_DENSE_FRACTION = 0.15
_DELTA_FRACTION = 0.02
# A kind of softmax attention: all have the same scores, of the same heads.
_scored = partial(
    MixerKind,
    transient_floats=transient_floats_of_heads,
    flops=flops_of_heads,
    peak_fraction=_DENSE_FRACTION,
    heads=heads_of_attention,
)
# Softmax attention, by what makes the keys and values of a model (`Latent.source_of_keys`).
ATTENTIONS = {
    HEADS: _scored(
        module=SelfAttention,
        cache=empty_cache,
        stored_floats=stored_floats_of_heads,
        projection_weights=projection_weights_of_heads,
    ),
    LATENT: _scored(
        module=LatentAttention,
        cache=empty_latents,
        stored_floats=stored_floats_of_latents,
        projection_weights=projection_weights_of_latents,
    ),
}


def _attention(*, config: Transformer, **options: Any) -> Mixer:
    mixer: Mixer = ATTENTIONS[config.source_of_keys].module(config=config, **options)
    return mixer


def _cache_of_attention(config: Transformer, *arguments: Any) -> Any:
    return ATTENTIONS[config.source_of_keys].cache(config, *arguments)


def _stored_floats_of_attention(config: Transformer) -> dict[str, int]:
    return ATTENTIONS[config.source_of_keys].stored_floats(config)


def _projection_weights_of_attention(config: Transformer) -> int:
    return ATTENTIONS[config.source_of_keys].projection_weights(config)


MIXERS = {
    ATTENTION: _scored(
        module=_attention,
        cache=_cache_of_attention,
        stored_floats=_stored_floats_of_attention,
        projection_weights=_projection_weights_of_attention,
    ),
    DELTA: MixerKind(
        module=GatedDelta,
        cache=empty_delta_cache,
        stored_floats=stored_floats_of_delta,
        transient_floats=transient_floats_of_delta,
        projection_weights=projection_weights_of_delta,
        flops=flops_of_delta,
        peak_fraction=_DELTA_FRACTION,
        heads=heads_of_delta,
        swaps_heads=True,
        is_stored_first=True,
    ),
    # Its costs are estimated as those of attention.
    GATED_UNITS: _scored(
        module=GatedLayer,
        cache=empty_units,
        stored_floats=_stored_floats_of_attention,
        projection_weights=_projection_weights_of_attention,
        heads=heads_of_units,
        alone=Alone("gated units", OWN_KEYS, OTHER_KEYS, mistakes_of_units),
        memory=memory_of_parts,
    ),
    LINEAR: MixerKind(
        module=LinearAttention,
        cache=empty_linear_cache,
        stored_floats=stored_floats_of_linear,
        transient_floats=transient_floats_of_linear,
        projection_weights=projection_weights_of_heads,
        flops=flops_of_linear,
        peak_fraction=_DELTA_FRACTION,
        heads=heads_of_attention,
        swaps_heads=True,
    ),
}
ALONE = {name: kind.alone for name, kind in MIXERS.items() if kind.alone is not None}


def numbers_per_layer(config: Transformer) -> dict[str, int]:
    """The `numbers` of the mixers of a model, averaged over its layers."""
    counts = [MIXERS[name].stored_floats(config) for name in config.mixers]
    kinds = dict.fromkeys(kind for count in counts for kind in count)
    return {kind: sum(count.get(kind, 0) for count in counts) // len(counts) for kind in kinds}


def weights_per_layer(config: Transformer) -> float:
    """The `weights` of the mixers of a model, averaged over its layers."""
    return sum(MIXERS[name].projection_weights(config) for name in config.mixers) / len(config.mixers)
