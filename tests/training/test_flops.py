"""Operations of the model against the formula that a person would write down."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zero.models.attention.delta_rule import CHUNK
from zero.models.config import GPTConfig
from zero.models.experts import Experts
from zero.models.gpt import GPT
from zero.models.products import PRODUCTS
from zero.training.flops import flops_by_operands, matmul_flops, model_flops


@pytest.mark.parametrize("chunks", [1, 3])
def test_model_flops_are_three_forward_passes(chunks: int) -> None:
    rows, context, width, layers, vocabulary = 2, 16, 24, 3, 33
    config = GPTConfig(width, vocabulary, 4, context, 0.1, layers, vocab_chunks=chunks)
    dense = 2 * rows * context * 12 * width**2  # query, key, value, output, and two of four times the width
    attention = 2 * 2 * rows * context**2 * width
    assert vocabulary % chunks == 0
    logits = 2 * rows * context * width * vocabulary
    assert model_flops(config, rows, context) == 3 * (layers * (dense + attention) + logits)


def test_flops_of_layer_kinds() -> None:
    """FLOPs of grouped, local and gated layers."""
    rows, context, width, layers, vocabulary = 2, 16, 24, 4, 33
    config = GPTConfig(
        width, vocabulary, 6, context, 0.0, layers, alibi_attn=False, positions="t5", kv_heads=2, head_dim=5,
        mlp_dim=40, gated=True, windows=(0, 3), tied=False,
    )  # fmt: skip
    dense = 2 * rows * context * width * (2 * 30 + 2 * 10 + 3 * 40)  # query and output, key and value, the MLP
    attention = 2 * 2 * rows * context * 30 * (context + 3) // 2
    logits = 2 * rows * context * width * vocabulary
    assert model_flops(config, rows, context) == 3 * (layers * (dense + attention) + logits)


@pytest.mark.parametrize("capacity", [None, 1.5])
def test_flops_of_experts(capacity: float | None) -> None:
    """Experts are counted with the tokens or places that they compute."""
    rows, context, width, layers, vocabulary, experts, chosen = 2, 16, 24, 4, 33, 4, 2
    config = GPTConfig(
        width, vocabulary, 4, context, 0.0, layers, mlp_dim=40, mlp_bias=False, gated=True, experts=experts,
        experts_per_token=chosen, experts_every=2, expert_capacity=capacity,
    )  # fmt: skip
    computed = rows * context * chosen if capacity is None else rows * experts * 12  # 1.5 * 16 * 2 / 4 places
    of_experts = 2 * computed * width * 3 * 40
    routed = 2 * rows * context * width * (experts + chosen)  # the router, and the sum over the chosen experts
    attention = 2 * rows * context * 4 * width**2 + 2 * 2 * rows * context**2 * width
    mlp = 2 * rows * context * width * 3 * 40
    logits = 2 * rows * context * width * vocabulary
    expected = layers * attention + layers // 2 * (mlp + of_experts + routed) + logits
    assert model_flops(config, rows, context) == 3 * expected

    def loss(params: Any, h: jax.Array) -> jax.Array:
        y, _ = Experts(config, jnp.float32).apply(params, h, 0, drops=True)
        return jnp.sum(jnp.asarray(y) ** 2)

    h = jnp.ones((rows, context, width))
    init = partial(Experts(config, jnp.float32).init, drops=True)
    params = jax.eval_shape(init, jax.random.key(0), h, 0)
    step = jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, h)
    assert matmul_flops(step.jaxpr) == pytest.approx(3 * (of_experts + routed), rel=0.02)


@pytest.mark.parametrize("experts", [{}, {"experts": 4, "experts_per_token": 2, "mlp_bias": False, "shared_dim": 16}])
def test_flops_of_a_predictor(experts: dict[str, Any]) -> None:
    """One more layer like the last one, in a window; the product that joins its inputs, and scores of its own."""
    rows, context, width, layers, vocabulary, mlp, window = 2, 16, 24, 3, 33, 40, 5
    config = GPTConfig(
        width, vocabulary, 4, context, 0.0, layers, alibi_attn=False, positions="rotary", mlp_dim=mlp,
        windows=(window,), predictor=True, **experts,
    )  # fmt: skip
    deeper = dataclasses.replace(config, N=layers + 1, predictor=False)
    join = 2 * width * width
    more = 3 * 2 * rows * context * (join + width * vocabulary)
    assert model_flops(config, rows, context) == model_flops(deeper, rows, context) + more


def test_flops_of_latent_attention() -> None:
    """Queries, keys and values are products of latent vectors, and values have a width of their own."""
    rows, context, width, layers, vocabulary, mlp = 2, 16, 24, 3, 33, 40
    heads, rotated, unrotated, values, of_latent, of_queries = 4, 2, 6, 7, 9, 10
    config = GPTConfig(
        width, vocabulary, heads, context, 0.0, layers, alibi_attn=False, positions="rotary", qkv_bias=False,
        head_dim=rotated + unrotated, rotary_dim=rotated, latent_dim=of_latent, query_latent_dim=of_queries,
        value_dim=values, mlp_dim=mlp, gated=True,
    )  # fmt: skip
    queries = width * of_queries + of_queries * heads * (rotated + unrotated)
    keys_and_values = width * (of_latent + rotated) + of_latent * heads * (unrotated + values)
    scores = context * heads * (rotated + unrotated + values)
    layer = queries + keys_and_values + scores + heads * values * width + 3 * width * mlp
    assert model_flops(config, rows, context) == 3 * 2 * rows * context * (layers * layer + width * vocabulary)


def test_flops_of_the_delta_rule() -> None:
    """Three layers with the delta rule to one with attention, and experts with a gated one beside them in each."""
    rows, context, width, vocabulary, heads, groups, keys, values = 2, 2 * CHUNK, 24, 33, 4, 2, 5, 7
    config = GPTConfig(
        width, vocabulary, 4, context, 0.0, 8, alibi_attn=False, positions="rotary", qkv_bias=False, out_bias=False,
        attention_gate=True, mixers=("delta", "delta", "delta", "attention"), delta_key_heads=groups,
        delta_value_heads=heads, delta_key_dim=keys, delta_value_dim=values, mlp_dim=40, mlp_bias=False, gated=True,
        experts=8, experts_per_token=2, shared_dim=48, shared_gate=True,
    )  # fmt: skip
    # Queries, keys, values, the gate, the rate, the decay and the output.
    projections = width * (2 * groups * keys + 3 * heads * values + 2 * heads)
    of_state = 3 * keys * values  # read for the error and for the output, and written
    of_chunk = CHUNK * (2 * keys + values)  # keys with keys, queries with keys, and scores with what was written
    delta = projections + heads * (of_state + of_chunk)
    attention = 5 * width * width + 2 * context * width  # with a gate
    experts = 2 * 3 * width * 40 + width * (8 + 2) + 3 * width * 48 + width
    expected = 6 * delta + 2 * attention + 8 * experts + width * vocabulary
    assert model_flops(config, rows, context) == 3 * 2 * rows * context * expected


def test_flops_by_operands() -> None:
    """Products are counted by what they multiply: both operands have 8 bits, in a loop as often as it runs."""
    x, w = jnp.ones((1, 4, 6)), jnp.ones((6, 8))

    def loss(name: str) -> Any:
        gradient = jax.grad(lambda x, w: PRODUCTS[name](x, w).sum(), argnums=(0, 1))
        return lambda x, w: lax.scan(lambda _, __: (gradient(x, w), None), gradient(x, w), None, length=2)[0]

    once = 2 * 4 * 6 * 8
    for name, expected in {
        "auto": {"": 9 * once},
        "int8": {"int8": 6 * once, "": 3 * once},
        "float8": {"float8": 9 * once},
    }.items():
        traced = jax.make_jaxpr(loss(name))(x, w).jaxpr
        assert flops_by_operands(traced) == expected
        assert matmul_flops(traced) == 9 * once


def test_flops_of_conditions() -> None:
    """The most expensive branch of a condition is counted."""

    def either(x: jax.Array) -> Any:
        return jax.lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x @ x, x)

    assert matmul_flops(jax.make_jaxpr(either)(jnp.ones((3, 3))).jaxpr) == 2 * 2 * 27


def test_flops_of_rematerialization() -> None:
    """Rematerialization is counted in a step but not in the model."""
    config = GPTConfig(24, 33, 4, 16, 0.0, 3)
    tokens = jnp.zeros((2, 16), jnp.int32)
    model = GPT(config, remat="full")
    params = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)

    def loss(params: Any) -> jax.Array:
        losses: Any = model.apply(params, tokens, tokens)
        return losses.sum()

    step = jax.make_jaxpr(jax.grad(loss))(params)
    assert matmul_flops(step.jaxpr) > 1.2 * model_flops(config, 2, 16)
