"""What mixes the positions of a transformer layer: an entry for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from zero.models.mixer import Mixer
from zero.models.self_attention import Cache, SelfAttention, empty_cache

# The cache of each kind of mixer, one entry per layer that has it.
Caches = dict[str, Cache]


class MixerKind(NamedTuple):
    """A kind of mixers.

    Attributes:
      module: its class.
      cache: an empty one, from the configuration, the number of layers with this mixer, and what
        `zero.models.gpt.init_cache` takes beside the configuration.
    """

    module: type[Mixer]
    cache: Callable[..., Any]


ATTENTION = "attention"
MIXERS = {ATTENTION: MixerKind(SelfAttention, empty_cache)}
