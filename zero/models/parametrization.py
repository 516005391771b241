"""Initial weights and learning rates as functions of the width: as in GPT-2, or by muP.

The maximal update parametrization (muP) for Adam and Lion, with w = width / base width:

  leaf                             initial standard deviation    learning rate
  embedding, learned positions     1                             1
  matrices of layers               fan-in^-1/2                   1 / w
  head                             width^-1                      1 / w
  gains and biases                 (1 and 0)                     1

Products of queries and keys are divided by the head dimension. A tied table would need the first and the third line.
Source: Yang et al., Tensor Programs V, arXiv 2203.03466, table 3 and definition 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax

from zero.models.config import HEAD, STACK, GPTConfig

_RESIDUAL_OUTPUTS = ("attention_out", "mlp_out")
_GPT2_STDDEV = 0.02


def kernel_init(config: GPTConfig, name: str) -> nn.initializers.Initializer:
    """The initializer of the matrix `(fan-in, fan-out)` of this name in a layer."""
    if config.zero_init and name in ("query", *_RESIDUAL_OUTPUTS):
        return nn.initializers.zeros
    if config.parametrization == "mup":
        return nn.initializers.variance_scaling(1.0, "fan_in", "normal")
    # GPT-2: each of the 2 N residual outputs adds variance, so their initial weights are smaller.
    return nn.initializers.normal(_GPT2_STDDEV / (math.sqrt(2 * config.N) if name in _RESIDUAL_OUTPUTS else 1))


def table_stddev(config: GPTConfig, name: str) -> float:
    """The initial standard deviation of the table of vocabulary, positions or head.

    >>> config = GPTConfig(128, 256, 2, 64, 0.0, 2, parametrization="mup", mup_base_width=32, tied=False)
    >>> [table_stddev(config, name) for name in ("vocabulary", "positions", "head")]
    [1.0, 1.0, 0.0078125]
    """
    if config.parametrization == "mup":
        return 1 / config.embedding_dim if name == HEAD else 1.0
    return 1.0 if config.scale_output and name != "positions" else _GPT2_STDDEV


def multipliers_of(config: GPTConfig) -> Callable[[Any], Any] | None:
    """`rate_multipliers` of this model; None if all leaves have the same learning rate."""
    return partial(rate_multipliers, config) if config.parametrization == "mup" else None


def rate_multipliers(config: GPTConfig, params: Any) -> Any:
    """The multiplier of each leaf's learning rate: a tree of floats, from any subtree of parameters or shards.

    >>> config = GPTConfig(128, 256, 2, 64, 0.0, 2, parametrization="mup", mup_base_width=32, tied=False)
    >>> rate_multipliers(config, {"blocks": {"query": {"kernel": 0, "bias": 0}}, "head": {"table": 0}})
    {'blocks': {'query': {'bias': 1.0, 'kernel': 0.25}}, 'head': {'table': 0.25}}
    """
    base = config.embedding_dim if config.mup_base_width is None else config.mup_base_width

    def of(path: tuple[Any, ...], _: Any) -> float:
        is_scaled = path[0].key == HEAD or (path[0].key == STACK and path[-1].key == "kernel")
        return base / config.embedding_dim if is_scaled else 1.0

    return jax.tree_util.tree_map_with_path(of, params)
