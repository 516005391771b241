"""The bias of a router, which balances experts without a loss.

After each step the bias of an expert moves by a constant: up if the expert had fewer tokens than the mean of its layer,
down if it had more. The tokens of all devices and micro-batches count.

Sources: DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al., arXiv 2408.15664, algorithm 1.

Shapes are named by suffix: E experts, L layers with experts
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from zero.models.config import GPTConfig
from zero.models.experts import Mixture
from zero.models.gpt import variable_shapes
from zero.models.router import ROUTER_BIAS


def init_router_bias(config: GPTConfig, key: jax.Array) -> Any:
    """The bias of a new model: zeros `(L, E)` for each stack of layers with experts."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variable_shapes(config)[ROUTER_BIAS])


def update_router_bias(config: Mixture, bias: Any, found: Any, key: jax.Array) -> Any:
    """The bias after a step in which `found` tokens, of all devices, had each expert.

    >>> config = Mixture(8, 16, 2, 4, 0.0, 1, experts=3, router_bias_rate=0.5, mlp_bias=False)
    >>> update_router_bias(config, jnp.zeros((1, 3)), jnp.asarray([[4.0, 1.0, 1.0]]), None).tolist()
    [[-0.5, 0.5, 0.5]]
    """

    def moved(bias_LE: jax.Array, counts_LE: jax.Array) -> jax.Array:
        return bias_LE + (config.router_bias_rate or 0.0) * jnp.sign(counts_LE.mean(-1, keepdims=True) - counts_LE)

    return jax.tree.map(moved, bias, found)
