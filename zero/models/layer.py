"""What all kinds of layers have in common."""

from __future__ import annotations

import flax.linen as nn
from jax.typing import DTypeLike

from zero.model_parallel import ALONE, WHOLE, ExpertParallel, ModelParallel
from zero.models.config import GPTConfig


class Layer(nn.Module):
    """An entry of the stack of layers. The residual stream and a cache flow through it.

    Attributes:
      config: the model.
      dtype: of activations and matrix products.
      blockwise_from: the number of query positions from which attention is blockwise; None for never.
      window: how many positions a query sees, itself included; 0 for all. None: by the number of the layer when it
        runs, for callers that scan single layers.
      cut: which heads and which part of the MLP's width this device computes, and which positions of the stream it has.
      group: the devices among which experts are divided.
      kernel: for attention, of `kernel_of`; None for none.
    """

    config: GPTConfig
    dtype: DTypeLike
    blockwise_from: int | None = None
    window: int | None = None
    cut: ModelParallel = WHOLE
    group: ExpertParallel = ALONE
    kernel: str | None = None
