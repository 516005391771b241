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

from zero.models.experts import Mixture
from zero.models.part import STACK


def init_router_bias(config: Mixture, key: jax.Array) -> Any:
    """The bias of a new model, zeros `(L, E)`."""
    return {STACK: {"experts": {"bias": jnp.zeros((config.scanned_layers, config.experts or 0))}}}


def update_router_bias(config: Mixture, bias: Any, found: Any, key: jax.Array) -> Any:
    """The bias after a step in which `found` tokens, of all devices, had each expert.

    >>> config = Mixture(8, 16, 2, 4, 0.0, 1, experts=3, router_bias_rate=0.5, mlp_bias=False)
    >>> counts = {"blocks": {"experts": {"bias": jnp.asarray([[4.0, 1.0, 1.0]])}}}
    >>> update_router_bias(config, init_router_bias(config, None), counts, None)["blocks"]["experts"]["bias"].tolist()
    [[-0.5, 0.5, 0.5]]
    """

    def moved(bias_LE: jax.Array, counts_LE: jax.Array) -> jax.Array:
        return bias_LE + (config.router_bias_rate or 0.0) * jnp.sign(counts_LE.mean(-1, keepdims=True) - counts_LE)

    return jax.tree.map(moved, bias, found)
