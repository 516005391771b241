"""The kinds of mixers, which mix the positions of a transformer layer: an entry for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from zero.models.gated_delta import (
    DeltaCache,
    GatedDelta,
    empty_delta_cache,
    further_of_delta,
    heads_of_delta,
    numbers_of_delta,
    operations_of_delta,
    weights_of_delta,
)
from zero.models.latent_attention import (
    LatentAttention,
    LatentCache,
    empty_latents,
    numbers_of_latents,
    weights_of_latents,
)
from zero.models.latent_keys import HEADS, LATENT
from zero.models.mixer import Mixer, Transformer
from zero.models.part import ATTENTION, DELTA
from zero.models.self_attention import (
    Cache,
    SelfAttention,
    empty_cache,
    further_of_heads,
    heads_of_attention,
    numbers_of_heads,
    operations_of_heads,
    weights_of_heads,
)

# The cache of each kind of mixer, one entry per layer that has it.
Caches = dict[str, Cache | LatentCache | DeltaCache]


class MixerKind(NamedTuple):
    """A kind of mixers.

    Attributes:
      module: its class, or a function that takes the same arguments.
      numbers: from the configuration to how many numbers of a position a layer has of each of the kinds ATTENTION and
        PROJECTIONS of `zero.models.stack.KINDS`, on one device.
      further: from the configuration to how many numbers of a position a layer computes beyond 34 bytes per channel
        (`zero.training.activations.activation_bytes`).
      weights: from the configuration to the number of weights of the products whose results are of kind PROJECTIONS.
      operations: from the configuration and the length of a row to the operations between its positions.
      share: the part of the peak that XLA for TPU reaches in these operations.
      cache: an empty one, from the configuration, the number of layers with this mixer, and what
        `zero.models.gpt.init_cache` takes beside the configuration.
      heads: from the configuration to the keys of its numbers of heads, which tensor groups divide.
      swaps_heads: whether context groups have to divide these numbers too, to swap positions for heads.
      is_stored_first: whether its outputs are stored before an MLP's, as computing them again takes longer per byte.
    """

    module: Callable[..., Mixer]
    cache: Callable[..., Any]
    numbers: Callable[[Any], dict[str, int]]
    further: Callable[[Any], int]
    weights: Callable[[Any], int]
    operations: Callable[[Any, int], float]
    share: float
    heads: Callable[[Any], dict[str, int]]
    swaps_heads: bool = False
    is_stored_first: bool = False


# The shares of dense attention and of the delta rule (docs/decisions/attention.md, benchmarks/measured/delta-rule.md).
_DENSE_SHARE = 0.15
_DELTA_SHARE = 0.02
# A kind of softmax attention: all have the same scores, of the same heads.
_of_scores = partial(
    MixerKind,
    further=further_of_heads,
    operations=operations_of_heads,
    share=_DENSE_SHARE,
    heads=heads_of_attention,
)
# Softmax attention, by what makes the keys and values of a model (`Latent.source_of_keys`).
ATTENTIONS = {
    HEADS: _of_scores(
        module=SelfAttention,
        cache=empty_cache,
        numbers=numbers_of_heads,
        weights=weights_of_heads,
    ),
    LATENT: _of_scores(
        module=LatentAttention,
        cache=empty_latents,
        numbers=numbers_of_latents,
        weights=weights_of_latents,
    ),
}


def _attention(*, config: Transformer, **options: Any) -> Mixer:
    return ATTENTIONS[config.source_of_keys].module(config=config, **options)


def _cache_of_attention(config: Transformer, *arguments: Any) -> Any:
    return ATTENTIONS[config.source_of_keys].cache(config, *arguments)


def _numbers_of_attention(config: Transformer) -> dict[str, int]:
    return ATTENTIONS[config.source_of_keys].numbers(config)


def _weights_of_attention(config: Transformer) -> int:
    return ATTENTIONS[config.source_of_keys].weights(config)


MIXERS = {
    ATTENTION: _of_scores(
        module=_attention,
        cache=_cache_of_attention,
        numbers=_numbers_of_attention,
        weights=_weights_of_attention,
    ),
    DELTA: MixerKind(
        module=GatedDelta,
        cache=empty_delta_cache,
        numbers=numbers_of_delta,
        further=further_of_delta,
        weights=weights_of_delta,
        operations=operations_of_delta,
        share=_DELTA_SHARE,
        heads=heads_of_delta,
        swaps_heads=True,
        is_stored_first=True,
    ),
}


def numbers_per_layer(config: Transformer) -> dict[str, int]:
    """The `numbers` of the mixers of a model, averaged over its layers."""
    counts = [MIXERS[name].numbers(config) for name in config.mixers]
    return {kind: sum(count[kind] for count in counts) // len(counts) for kind in counts[0]}


def weights_per_layer(config: Transformer) -> float:
    """The `weights` of the mixers of a model, averaged over its layers."""
    return sum(MIXERS[name].weights(config) for name in config.mixers) / len(config.mixers)
