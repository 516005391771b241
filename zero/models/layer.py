"""The attributes that all kinds of layers share."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
from jax.typing import DTypeLike

from zero.models.adapters import Adapters
from zero.models.elements import Product, contraction
from zero.models.part import Sizes
from zero.partition.model_parallel import ALONE, WHOLE, ExpertParallel, ModelParallel


class Layer(nn.Module):
    """An entry of the stack of layers. The residual stream and a cache flow through it.

    Attributes:
      config: of the model; each kind of layer names the parts that it reads.
      dtype: dtype of activations and matrix products.
      blockwise_from: the number of query positions from which attention is blockwise; None for never.
      window: number of positions that a query sees, itself included; 0 for all. None: selected at run time by the
        layer number, for callers that scan single layers.
      row_group: which heads and which part of the MLP's width this device computes, and which positions of the stream
        it has.
      expert_group: the devices among which experts are divided.
      kernel: attention kernel, as `kernel_of` returns it; None for none.
      drops: whether the capacity of experts applies; False for scoring and generation.
      adapters: of the products of a layer; None for none.
      product: of inputs and weights, as for `Dense`; of a transformer's attention and MLP.
      query_block: queries that dense attention takes at a time; None for all.
      first: layers before the stack of which this is an entry.
    """

    config: Sizes
    dtype: DTypeLike
    blockwise_from: int | None = None
    window: int | None = None
    row_group: ModelParallel = WHOLE
    expert_group: ExpertParallel = ALONE
    kernel: str | None = None
    drops: bool = True
    adapters: Adapters | None = None
    product: Product = contraction
    query_block: int | None = None
    first: int = 0


_OF_FLAX = ("parent", "name")
_OPTIONS = tuple(field.name for field in dataclasses.fields(Layer) if field.name not in _OF_FLAX)


def options_of(layer: Layer) -> dict[str, Any]:
    """The attributes of `Layer`, by name, for a part of this layer."""
    return {name: getattr(layer, name) for name in _OPTIONS}
