"""The balance loss of experts beside that of transformers."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero.models.config import GPTConfig
from zero.models.experts import Experts

CONFIG = GPTConfig(
    embedding_dim=6, vocab_size=31, num_head=2, block_size=24, dropout=0.0, N=1, mlp_dim=7, mlp_bias=False,
    experts=5, experts_per_token=2, normalize_router=True, balance_loss=1.0, router_z_loss=0.0,
)  # fmt: skip


def test_balance_loss_of_transformers() -> None:
    """A coefficient has the weight that it has in transformers."""
    import torch
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    h = np.random.default_rng(0).normal(size=(1, 13, CONFIG.embedding_dim)).astype(np.float32)

    def experts_of(config: GPTConfig) -> Any:
        return Experts(config, jnp.float32)

    p: Any = jax.jit(partial(experts_of(CONFIG).init, drops=True))(jax.random.key(0), h, 0)
    logits = torch.tensor(h[0] @ np.asarray(p["params"]["router"]["kernel"]))
    expected = float(load_balancing_loss_func((logits,), 5, 2))
    for layers in (1, 4):  # one of four layers that are added up
        _, routing = experts_of(dataclasses.replace(CONFIG, N=layers)).apply(p, h, 0, drops=True)
        np.testing.assert_allclose(layers * routing.penalty_B[0], expected, rtol=1e-5)
