"""Attention block by block against attention with the whole matrix of scores, and its masks, work and memory."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

import zero
from zero.models import attention, gpt
from zero.models.attention import blockwise_attention, blockwise_from, dense_attention
from zero.models.gpt import GPT, GPTConfig
from zero.runtime.inference.generate import generate
from zero.training.flops import matmul_flops
from zero.training.inference import Sampling
from zero.training.programs import make_inference
from zero.training.step import ShardedGPT

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS = 2
CONFIG = GPTConfig(embedding_dim=42, vocab_size=101, num_head=3, block_size=64, dropout=0.0, N=2, vocab_chunks=3)


def arrays(count: int, *shape: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    return list(jax.random.normal(jax.random.key(0), (count, *shape)).astype(dtype))


def output_and_gradients(attend: Callable[..., jax.Array], q: Any, k: Any, v: Any, weights: Any) -> list[np.ndarray]:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(attend, q, k, v)
        return (out, *pull_back(weights))

    return [np.asarray(x, np.float32) for x in jax.jit(run)(q, k, v, weights)]


@settings(deadline=None, max_examples=8)
@example(positions=37, block=8, heads=3, width=5, has_alibi=True, rate=0.3)
@example(positions=32, block=8, heads=2, width=4, has_alibi=False, rate=0.0)
@given(
    positions=st.integers(1, 40),
    block=st.integers(1, 48),
    heads=st.integers(1, 3),
    width=st.integers(1, 8),
    has_alibi=st.booleans(),
    rate=st.sampled_from([0.0, 0.3]),
)
def test_outputs_and_gradients_are_those_of_dense_attention(
    positions: int, block: int, heads: int, width: int, has_alibi: bool, rate: float
) -> None:
    q, k, v, weights = arrays(4, ROWS, positions, heads, width)
    options: dict[str, Any] = {"has_alibi": has_alibi, "dropout_rate": rate}
    options["keys_B"] = jax.random.split(jax.random.key(1), ROWS)
    expected = output_and_gradients(partial(dense_attention, **options), q, k, v, weights)
    got = output_and_gradients(
        partial(blockwise_attention, block=max(block, positions // 6), **options), q, k, v, weights
    )
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_scores_that_overflow_an_exponential_do_not_matter() -> None:
    q, k, v, weights = arrays(4, ROWS, 33, 2, 4)
    expected = output_and_gradients(partial(dense_attention, has_alibi=False), 50 * q, 3 * k, v, weights)
    got = output_and_gradients(partial(blockwise_attention, has_alibi=False, block=8), 50 * q, 3 * k, v, weights)
    for x, y in zip(got, expected, strict=True):
        assert np.isfinite(y).all()
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("has_alibi", [False, True])
@pytest.mark.parametrize("position", [0, 7, 15])
def test_queries_from_a_position_on_see_a_longer_cache(position: int, has_alibi: bool) -> None:
    (q,), (k, v) = arrays(1, ROWS, 9, 2, 4), arrays(2, ROWS, 24, 2, 4)
    k, v = (x.at[:, position + 9 :].set(1e3) for x in (k, v))  # what is not filled yet
    expected = dense_attention(q, k, v, position, has_alibi=has_alibi)
    blockwise = jax.jit(partial(blockwise_attention, has_alibi=has_alibi, block=5))
    np.testing.assert_allclose(blockwise(q, k, v, position), expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_as_near_to_float32_as_dense_attention() -> None:
    inputs = arrays(4, ROWS, 50, 3, 16)
    exact = output_and_gradients(partial(dense_attention, has_alibi=True), *inputs)
    rounded = [x.astype(jnp.bfloat16) for x in inputs]
    dense = output_and_gradients(partial(dense_attention, has_alibi=True), *rounded)
    blockwise = output_and_gradients(partial(blockwise_attention, has_alibi=True, block=16), *rounded)
    attended = blockwise_attention(*rounded[:3], has_alibi=True)
    assert attended.dtype == jnp.bfloat16
    for x, y, reference in zip(blockwise, dense, exact, strict=True):
        assert np.linalg.norm(x - reference) < 1.5 * np.linalg.norm(y - reference) < 0.03 * np.linalg.norm(reference)


@pytest.mark.parametrize("block", [5, 16, 64])
def test_dropout_masks_are_those_of_dense_attention(block: int) -> None:
    positions = 37
    (q,) = arrays(1, ROWS, positions, 3, positions)
    v = jnp.broadcast_to(jnp.eye(positions)[None, :, None], q.shape)  # the output is the matrix of probabilities
    options: dict[str, Any] = {"has_alibi": False, "dropout_rate": 0.4}
    options["keys_B"] = jax.random.split(jax.random.key(5), ROWS)
    dense = np.asarray(dense_attention(0 * q, 0 * q, v, **options))
    blockwise = np.asarray(blockwise_attention(0 * q, 0 * q, v, block=block, **options))
    np.testing.assert_array_equal(blockwise == 0, dense == 0)
    past = np.tri(positions, dtype=bool)[None, :, None]
    assert abs((dense == 0)[np.broadcast_to(past, dense.shape)].mean() - 0.4) < 0.05


def test_counters_of_random_bits_have_64_bits() -> None:
    # A block of a matrix that nobody holds: within one of its rows, entries pass 2^32.
    positions, block, rate = 2**17 + 3, 4, 0.5
    form = attention._Form(positions, positions, block, False, rate)
    key_data = jax.random.key_data(jax.random.split(jax.random.key(2), 1))
    row, column = divmod(2**32, positions)
    i, j = row // block, column // block
    kept = attention._dropped(form, jnp.ones((1, 1, block, block)), key_data, jnp.asarray([i, j])) != 0
    entries = [(i * block + t) * positions + j * block + s for t in range(block) for s in range(block)]
    assert min(entries) < 2**32 <= max(entries)
    words = np.asarray([entry >> 32 for entry in entries] + [entry % 2**32 for entry in entries], np.uint32)
    first, second = np.split(np.asarray(threefry_2x32(key_data[0], jnp.asarray(words))), 2)
    np.testing.assert_array_equal(np.asarray(kept).ravel(), ((first ^ second) >> 9) * 2.0**-23 < rate)
    assert 0 < kept.mean() < 1


def test_dropout_with_other_random_bits_is_refused() -> None:
    q, k, v = arrays(3, ROWS, 4, 1, 2)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), ROWS)
    with pytest.raises(ValueError, match="threefry"):
        blockwise_attention(q, k, v, has_alibi=True, dropout_rate=0.1, keys_B=keys)


def test_blocks_above_the_diagonal_are_skipped() -> None:
    def flops(attend: Callable[..., jax.Array]) -> int:
        def loss(*qkv: jax.Array) -> jax.Array:
            return attend(*qkv, has_alibi=True).sum()

        return matmul_flops(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays(3, 1, 1024, 1, 8)).jaxpr)

    # 36 of 64 pairs of blocks; 2 products forward and 4 backward, and the scores once more.
    assert flops(partial(blockwise_attention, block=128)) * 64 * 6 == flops(dense_attention) * 36 * 7


def test_memory_is_linear_in_the_context() -> None:
    @cache
    def temporaries(attend: Callable[..., jax.Array], context: int) -> int:
        def loss(*qkv: jax.Array) -> jax.Array:
            return attend(*qkv, has_alibi=True).sum()

        shapes = [jax.ShapeDtypeStruct((1, context, 4, 32), jnp.float32)] * 3
        analysis: Any = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    assert temporaries(blockwise_attention, 2048) < 2.05 * temporaries(blockwise_attention, 1024)
    assert temporaries(dense_attention, 2048) > 3.9 * temporaries(dense_attention, 1024)
    assert temporaries(blockwise_attention, 2048) < temporaries(dense_attention, 2048) / 8


@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_memory_of_a_model_is_linear_in_the_context(remat: str) -> None:
    """Also where layers are scanned: nothing that all layers have in common is computed ahead for all pairs."""

    def temporaries(context: int) -> int:
        config = dataclasses.replace(CONFIG, embedding_dim=8, num_head=4, block_size=context)
        model = GPT(config, remat=remat, blockwise_from=2)
        tokens = jax.ShapeDtypeStruct((1, context), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            losses: Any = model.apply(params, tokens, tokens)
            return losses.sum()

        analysis: Any = jax.jit(jax.grad(loss)).lower(params, tokens).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    assert temporaries(2048) < 2.05 * temporaries(1024)


@pytest.mark.parametrize(
    ("choice", "platform", "first"),
    [("dense", "cpu", None), ("blockwise", "tpu", 2), ("auto", "cpu", 512), ("auto", "tpu", 4096)],
)
def test_choice_is_by_context_and_platform(choice: str, platform: str, first: int | None) -> None:
    assert blockwise_from(choice, platform) == first


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Blocks of 5 in the model; the queries of each attention that was computed so."""
    contexts: list[int] = []

    def attend(q: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        contexts.append(q.shape[1])
        return blockwise_attention(q, *args, block=5, **kwargs)

    monkeypatch.setattr(gpt, "blockwise_attention", attend)
    yield contexts


@pytest.mark.parametrize("has_alibi", [True, False], ids=["alibi", "learned"])
def test_greedy_text_is_that_of_dense_attention(has_alibi: bool, small_blocks: list[int]) -> None:
    config = dataclasses.replace(CONFIG, alibi_attn=has_alibi)
    prompt = np.random.default_rng(3).integers(0, 101, 23, np.int32)

    def text(blockwise: int | None) -> np.ndarray:
        model = ShardedGPT(config, zero.Axis("zero", (1, 1)), 0, blockwise_from=blockwise)
        rng = np.random.default_rng(0)
        params = jax.tree.map(
            lambda x: rng.normal(size=(1, *x.shape), scale=0.2).astype(np.float32), model.layout.shapes()
        )
        return list(generate(make_inference(model, Sampling(temperature=0)), params, [prompt], 24, seed=0, chunk=24))[
            -1
        ]

    expected = text(None)
    assert not small_blocks
    np.testing.assert_array_equal(text(2), expected)
    assert small_blocks and min(small_blocks) > 1  # to read the prompt, not to decode
