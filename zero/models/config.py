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
  MLP, Mixture     mlp.py, experts.py         the second of experts
  Router           router.py
  Transformer      mixer.py                   these together
  Depth            predictor_keys.py          a further layer, which looks ahead
  Predictor        predictor.py               its rules
  GatedUnits       gated_unit.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from zero.models.gated_unit import GatedUnits
from zero.models.layers import LAYERS, LayerKind
from zero.models.mixer import Transformer
from zero.models.mixers import MIXERS
from zero.models.part import BOTH, FIRST, GATED_UNITS, HEAD, STACK, STACKS, TRANSFORMER, VOCABULARY, key, one_of
from zero.models.predictor import Predictor

__all__ = ["FIRST", "HEAD", "STACK", "STACKS", "VOCABULARY", "GPTConfig", "default_values"]


@dataclass(frozen=True)
class GPTConfig(Transformer, Predictor, GatedUnits):
    """One model: the kind of its layers, and the keys of all parts; an entry of `conf/model_config.yaml`."""

    layer: str = key(
        TRANSFORMER,
        one_of(*LAYERS),
        "transformer, or gated_units: two gated attention units, each with a single head whose keys are "
        "vector-quantized; attention in linear time, sampling with a state of constant size. Family vq; of the keys "
        "above, only the keys of norms, embedding, vocabulary and dropout apply (docs/decisions/vq.md)",
        layers=BOTH,
    )

    def mistakes(self) -> Iterator[str]:
        """Keys that the layers of this model do not have, and that are not at their defaults."""
        for name in self.mixers:
            if name not in MIXERS:
                yield f"mixers must name {' or '.join(MIXERS)}, got {name!r}"
        if self.layer == GATED_UNITS:
            if self.alibi_attn or self.positions not in ("none", "sinusoidal") or self.num_head != 1:
                yield "layer: gated_units needs num_head: 1, alibi_attn: false and positions: none"
        elif self.norm == "rms_biased":
            yield "norm: rms_biased needs layer: gated_units"
        defaults = default_values()
        for field in fields(self):
            value = getattr(self, field.name)
            default = defaults[field.name]
            if self.layer not in field.metadata["layers"] and value != default:
                yield f"layer: {self.layer} needs {field.name}: {str(default).lower()}, got {str(value).lower()}"

    @property
    def kind_of_layers(self) -> LayerKind:
        """The entry of `layer`."""
        return LAYERS[self.layer]

    @property
    def has_dropout(self) -> bool:
        """Whether training needs dropout keys."""
        of_units = (self.distance_dropout, self.layer_dropout)
        return max(self.embedding_dropout, self.attention_drop_rate, self.residual_drop_rate, *of_units) > 0

    @property
    def has_codebook(self) -> bool:
        """Whether the model has a codebook, which the optimizer does not update."""
        return self.layer == GATED_UNITS and self.codes > 0

    @property
    def has_memory(self) -> bool:
        """Whether the model remembers the parts of a row that it has read, in a constant number of bytes."""
        return self.layer == GATED_UNITS


@cache
def default_values() -> dict[str, Any]:
    """The value of each key that is not given, in a model without muP; `dataclasses.MISSING` for those without one."""
    return {field.name: field.default for field in fields(GPTConfig)} | {"attention_scale": "sqrt", "init": "gpt2"}
