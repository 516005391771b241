"""What the backward pass of a stack of layers stores and recomputes."""

import jax
import jax.numpy as jnp
import pytest

from zero.models.config import GPTConfig
from zero.models.gpt import GPT, variable_shapes
from zero.models.stack import REMAT
from zero.training.flops import matmul_flops

CONFIG = GPTConfig(embedding_dim=32, vocab_size=64, num_head=2, block_size=64, dropout=0.0, N=4)


@pytest.mark.parametrize("blockwise_from", [None, 2])
def test_each_policy_recomputes_less(blockwise_from: int | None) -> None:
    """From each policy to the next, what is stored in addition is not computed again."""
    tokens = jnp.zeros((2, 32), jnp.int32)

    def flops(remat: str) -> int:
        gpt = GPT(CONFIG, remat=remat, blockwise_from=blockwise_from)
        gradient = jax.grad(lambda variables: jnp.sum(jnp.asarray(gpt.apply(variables, tokens, tokens))))
        return matmul_flops(jax.make_jaxpr(gradient)(variable_shapes(CONFIG)).jaxpr)

    counted = {remat: flops(remat) for remat in REMAT}
    per_layer = 2 * 2 * 32 * 32 * 32 * CONFIG.N  # one product of (2 x 32, 32) and (32, 32) in every layer
    assert counted["full"] - counted["attention"] == per_layer * (1 if blockwise_from is None else 2)
    assert counted["attention"] - counted["projections"] == 4 * per_layer
    assert counted["projections"] - counted["dots"] == 4 * per_layer
    assert list(counted.values()) == sorted(counted.values(), reverse=True)
