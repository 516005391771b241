"""Operations of the model against the formula that a person would write down."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from zero.models.config import GPTConfig
from zero.models.gpt import GPT
from zero.training.flops import matmul_flops, model_flops


@pytest.mark.parametrize("chunks", [1, 3])
def test_model_flops_are_three_forward_passes(chunks: int) -> None:
    rows, context, width, layers, vocabulary = 2, 16, 24, 3, 33
    config = GPTConfig(width, vocabulary, 4, context, 0.1, layers, vocab_chunks=chunks)
    dense = 2 * rows * context * 12 * width**2  # query, key, value, output, and two of four times the width
    attention = 2 * 2 * rows * context**2 * width
    assert vocabulary % chunks == 0
    logits = 2 * rows * context * width * vocabulary
    assert model_flops(config, rows, context) == 3 * (layers * (dense + attention) + logits)


def test_model_flops_of_grouped_local_and_gated_layers() -> None:
    rows, context, width, layers, vocabulary = 2, 16, 24, 4, 33
    config = GPTConfig(
        width, vocabulary, 6, context, 0.0, layers, alibi_attn=False, positions="t5", kv_heads=2, head_dim=5,
        mlp_dim=40, gated=True, windows=(0, 3), tied=False,
    )  # fmt: skip
    dense = 2 * rows * context * width * (2 * 30 + 2 * 10 + 3 * 40)  # query and output, key and value, the MLP
    attention = 2 * 2 * rows * context * 30 * (context + 3) // 2
    logits = 2 * rows * context * width * vocabulary
    assert model_flops(config, rows, context) == 3 * (layers * (dense + attention) + logits)


def test_of_the_branches_of_a_condition_the_most_expensive_one_counts() -> None:
    def either(x: jax.Array) -> Any:
        return jax.lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x @ x, x)

    assert matmul_flops(jax.make_jaxpr(either)(jnp.ones((3, 3))).jaxpr) == 2 * 2 * 27


def test_rematerialisation_is_counted_in_a_step_but_not_in_the_model() -> None:
    config = GPTConfig(24, 33, 4, 16, 0.0, 3)
    tokens = jnp.zeros((2, 16), jnp.int32)
    model = GPT(config, remat="full")
    params = model.init(jax.random.key(0), tokens, tokens)

    def loss(params: Any) -> jax.Array:
        losses: Any = model.apply(params, tokens, tokens)
        return losses.sum()

    step = jax.make_jaxpr(jax.grad(loss))(params)
    assert matmul_flops(step.jaxpr) > 1.2 * model_flops(config, 2, 16)
