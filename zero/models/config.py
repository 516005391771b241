"""The configuration of a model: all parts in one record, with the keys that users write.

Each key is declared by the part whose code reads it (`zero.models.part`):

  Sizes            part.py                    what all parts share
  Parametrization  parametrization.py         muP; with Initial, the initial weights
  Vocabulary       vocabulary.py              embeddings and logits
  Norms            norms.py
  Residual         elements.py                the residual stream, and dropout on it
  Positions        positions/__init__.py      with Rotary and Sinusoidal, each in the file of its kind
  Attention        attention_keys.py
  Latent           latent_keys.py
  Delta            delta_keys.py
  Linear           linear_keys.py
  MLP, Mixture     mlp.py, experts.py         the second of experts
  Router           router.py
  Transformer      mixer.py                   these together
  MtpKeys          mtp_keys.py                a further layer, for multi-token prediction
  MtpRules         mtp.py                     its rules
  ScoreKeys        score_head.py              a head that scores texts
  GatedUnits       gated_unit.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from zero.base.keys import key, one_of
from zero.models.gated_unit import GatedUnits
from zero.models.mixer import Transformer
from zero.models.mixers import ALONE, MIXERS, Alone
from zero.models.mtp import MtpRules
from zero.models.part import FIRST, HEAD, STACK, STACKS, TRANSFORMER, VOCABULARY
from zero.models.score_head import ScoreKeys

__all__ = ["FIRST", "HEAD", "STACK", "STACKS", "VOCABULARY", "GPTConfig", "default_values"]


@dataclass(frozen=True)
class GPTConfig(Transformer, MtpRules, ScoreKeys, GatedUnits):
    """One model: the kind of its layers, and the keys of all parts; an entry of `conf/model_config.yaml`."""

    layer: str = key(
        TRANSFORMER,
        one_of(TRANSFORMER, *ALONE),
        "transformer, or gated_units: two gated attention units, each with a single head whose keys are "
        "vector-quantized; attention in linear time, sampling with a state of constant size. Family vq; of the keys "
        "above, only the keys of norms, embedding, vocabulary and dropout apply (docs/decisions/vq.md)",
    )

    def mistakes(self) -> Iterator[str]:
        """Keys that the layers of this model do not have, and that are not at their defaults."""
        of_layers = [name for name in MIXERS if name not in ALONE]
        for name in self.mixers:
            if name not in of_layers:
                yield f"mixers must name {' or '.join(of_layers)}, got {name!r}"
        for name, alone in ALONE.items():
            yield from alone.mistakes(self, name == self.layer)
        defaults = default_values()
        own = _keys_of(self.layer)
        for name, default in defaults.items():
            value = getattr(self, name)
            if name not in own and value != default:
                yield f"layer: {self.layer} needs {name}: {str(default).lower()}, got {str(value).lower()}"

    @property
    def mixer_pattern(self) -> tuple[str, ...]:
        """The entries of `zero.models.mixers.MIXERS` that the layers of a repeating pattern have."""
        return self.mixers if self.layer == TRANSFORMER else (self.layer,)

    @property
    def alone(self) -> Alone | None:
        """The mixer that makes whole layers of this model; None for transformer layers."""
        return ALONE.get(self.layer)

    @property
    def has_dropout(self) -> bool:
        """Whether training needs dropout keys."""
        others = (self.distance_dropout, self.layer_dropout)
        return max(self.embedding_dropout, self.attention_drop_rate, self.residual_drop_rate, *others) > 0

    @property
    def has_codebook(self) -> bool:
        """Whether the model has a codebook, which the optimizer does not update."""
        return self.alone is not None and self.codes > 0

    @property
    def has_memory(self) -> bool:
        """Whether the model remembers the parts of a row that it has read, in a constant number of bytes."""
        return all(MIXERS[name].memory is not None for name in self.mixer_pattern)


@cache
def _keys_of(layer: str) -> frozenset[str]:
    """The keys that models with this `layer` have."""
    if layer in ALONE:
        return ALONE[layer].own_keys | ALONE[layer].other_keys
    return frozenset(default_values()) - {key for alone in ALONE.values() for key in alone.own_keys}


@cache
def default_values() -> dict[str, Any]:
    """The value of each key that is not given, in a model without muP; `dataclasses.MISSING` for those without one."""
    return {field.name: field.default for field in fields(GPTConfig)} | {"attention_scale": "sqrt", "init": "gpt2"}
