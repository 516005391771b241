"""Initial weights and learning rates as functions of the width: as in GPT-2, or by muP.

The maximal update parametrization (muP) for Adam and Lion, with w = width / base width:

  leaf                             initial standard deviation    learning rate
  embedding, learned positions     1                             1
  matrices of layers               fan-in^-1/2                   1 / w
  head                             width^-1                      1 / w
  gains and biases                 (1 and 0)                     1

Absolute muP is the same with a base width of 1, and 1 / fan-in for mlp_out: learning rates are those of width 1.
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
# By `init`, the deviations of the tables of vocabulary and positions. With `scale_output` the vocabulary of gpt2 has 1.
_TABLES = {"gpt2": (_GPT2_STDDEV, _GPT2_STDDEV), "gpt_neo": (0.02, 0.01), "fan_in": (1.0, 1.0), "lingvo": (1.0, 1.0)}


def _gpt2(config: GPTConfig, name: str) -> nn.initializers.Initializer:
    # Each of the 2 N residual outputs adds variance, so their initial weights are smaller.
    return nn.initializers.normal(_GPT2_STDDEV / (math.sqrt(2 * config.N) if name in _RESIDUAL_OUTPUTS else 1))


def _fan_in(config: GPTConfig, name: str) -> nn.initializers.Initializer:
    return nn.initializers.variance_scaling(1.0, "fan_in", "normal")


def _with_scaled_queries(config: GPTConfig, name: str) -> nn.initializers.Initializer:
    """As by fan-in, but queries carry the scale of attention, so that scores are not divided."""
    if name == "query":
        return nn.initializers.normal(1 / math.sqrt(config.embedding_dim * config.head_width))
    return _fan_in(config, name)


def _gpt_neo(config: GPTConfig, name: str) -> nn.initializers.Initializer:
    """Attention has the weights of Mesh TensorFlow, the MLP those of GPT-2 with one sum per layer."""
    if not name.startswith("mlp_"):
        return _with_scaled_queries(config, name)
    return nn.initializers.normal(_GPT2_STDDEV / (math.sqrt(config.N) if name == "mlp_out" else 1))


def _lingvo(config: GPTConfig, name: str) -> nn.initializers.Initializer:
    """Matrices of the MLP are uniform."""
    if not name.startswith("mlp_"):
        return _with_scaled_queries(config, name)
    return nn.initializers.variance_scaling(1.0, "fan_in", "uniform")


_KERNELS = {"gpt2": _gpt2, "gpt_neo": _gpt_neo, "fan_in": _fan_in, "lingvo": _lingvo}


def kernel_init(config: GPTConfig, name: str) -> nn.initializers.Initializer:
    """The initializer of the matrix `(fan-in, fan-out)` of this name in a layer.

    Sources: GPT-2; gpt_neo: `models/layers.py` of GPT-Neo and `transformer/attention.py` of Mesh TensorFlow; fan-in:
    LeCun et al., Efficient BackProp (1998); lingvo: `gshard_builder.py` of Lingvo.
    """
    if name in config.zero_init:
        return nn.initializers.zeros
    return _KERNELS[str(config.init)](config, name)


def table_stddev(config: GPTConfig, name: str) -> float:
    """The initial standard deviation of the table of vocabulary, positions or head.

    >>> config = GPTConfig(128, 256, 2, 64, 0.0, 2, parametrization="mup", mup_base_width=32, tied=False)
    >>> [table_stddev(config, name) for name in ("vocabulary", "positions", "head")]
    [1.0, 1.0, 0.0078125]
    """
    width = config.embedding_dim
    if name == HEAD and config.head_init is not None:
        return {"mup": 1 / width, "fan_in": 1 / math.sqrt(width), "zero": 0.0}[config.head_init]
    of_tokens, of_positions = _TABLES[str(config.init)]
    if name == "positions":
        return of_positions
    if config.init == "gpt2":
        return 1.0 if config.scale_output else of_tokens
    return 1 / math.sqrt(width) if name == HEAD else of_tokens


def relative_bias_stddev(config: GPTConfig, buckets: int) -> float:
    """The initial standard deviation of the biases of T5's buckets of distance; lingvo: its `gshard_builder.py`."""
    return 1 / math.sqrt(buckets * config.num_head) if config.init == "lingvo" else _GPT2_STDDEV


def multipliers_of(config: GPTConfig) -> Callable[[Any], Any] | None:
    """`rate_multipliers` of this model; None if all leaves have the same learning rate."""
    return partial(rate_multipliers, config) if config.parametrization != "standard" else None


def rate_multipliers(config: GPTConfig, params: Any) -> Any:
    """The multiplier of each leaf's learning rate: a tree of floats, from any subtree of parameters or shards.

    >>> config = GPTConfig(128, 256, 2, 64, 0.0, 2, parametrization="mup", mup_base_width=32, tied=False)
    >>> rate_multipliers(config, {"blocks": {"query": {"kernel": 0, "bias": 0}}, "head": {"table": 0}})
    {'blocks': {'query': {'bias': 1.0, 'kernel': 0.25}}, 'head': {'table': 0.25}}
    """
    width = config.embedding_dim
    base = {"standard": width, "mup": config.mup_base_width or width, "mup_absolute": 1}[config.parametrization]

    def of(path: tuple[Any, ...], _: Any) -> float:
        if not (path[0].key == HEAD or (path[0].key == STACK and path[-1].key == "kernel")):
            return 1.0
        is_by_fan_in = config.parametrization == "mup_absolute" and path[-2].key == "mlp_out"
        return base / (config.mlp_width if is_by_fan_in else width)

    return jax.tree_util.tree_map_with_path(of, params)
