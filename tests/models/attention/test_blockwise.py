"""Attention block by block against attention with the whole matrix of scores, and its masks, work and memory."""

import dataclasses
import itertools
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
from tests.helpers.attention import EVERYTHING, ROWS, starts_of
from zero.inference.generate import generate
from zero.models.attention.block_pairs import Blocks, dropped_block
from zero.models.attention.blockwise import blockwise_attention, blockwise_from
from zero.models.attention.dense import attention_by_queries, dense_attention
from zero.models.attention.scores import Form, Terms
from zero.models.config import GPTConfig
from zero.models.gpt import GPT, init_cache
from zero.partition.model_parallel import WHOLE
from zero.training.flops import matmul_flops
from zero.training.inference import Sampling
from zero.training.programs import make_inference
from zero.training.sharded_gpt import ShardedGPT

CONFIG = GPTConfig(embedding_dim=42, vocab_size=101, num_head=3, block_size=64, dropout=0.0, N=2, vocab_chunks=3)


def arrays(count: int, *shape: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    return list(jax.random.normal(jax.random.key(0), (count, *shape)).astype(dtype))


def output_and_gradients(attend: Callable[..., jax.Array], *inputs_and_weights: Any) -> list[np.ndarray]:
    """Of queries, keys, values and maybe a bias; the last of the arguments are the gradients of the output."""

    def run(weights: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        out, pull_back = jax.vjp(attend, *inputs)
        return (out, *pull_back(weights))

    *inputs, weights = inputs_and_weights
    return [np.asarray(x, np.float32) for x in jax.jit(run)(weights, *inputs)]


@settings(deadline=None, max_examples=1)  # another one at each call
@example(positions=37, block=8, groups=3, shared=1, width=5, form=Form(has_alibi=True, dropout_rate=0.3), segments=1)
@example(positions=32, block=8, groups=2, shared=1, width=4, form=Form(), segments=0)
@example(positions=37, block=4, groups=2, shared=3, width=5, form=EVERYTHING, segments=2)
@given(
    positions=st.integers(1, 40),
    block=st.integers(1, 48),
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    width=st.integers(1, 8),
    form=st.builds(
        Form,
        has_alibi=st.booleans(),
        window=st.sampled_from([0, 1, 5, 16, 100]),
        divisor=st.sampled_from([None, 1.0]),
        cap=st.sampled_from([None, 1.5]),
        has_extra_logit=st.booleans(),
        dropout_rate=st.sampled_from([0.0, 0.3]),
        row_group=st.just(WHOLE),
    ),
    segments=st.integers(0, 5),
)
def test_equals_dense_attention(
    positions: int, block: int, groups: int, shared: int, width: int, form: Form, segments: int
) -> None:
    """Outputs and gradients are those of dense attention."""
    k, v = arrays(2, ROWS, positions, groups, width)
    q, weights = arrays(2, ROWS, positions, groups * shared, width)
    bias = jax.random.normal(jax.random.key(2), (32, groups * shared))

    def attend(function: Callable[..., jax.Array], **options: Any) -> Callable[..., jax.Array]:
        terms = Terms(keys_B=jax.random.split(jax.random.key(1), ROWS), starts_BT=starts_of(segments, positions))

        def attended(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
            bias_CH = None if form.has_alibi else bias
            return function(q, k, v, form=form, terms=terms._replace(bias_CH=bias_CH), **options)

        return attended

    expected = output_and_gradients(attend(dense_attention), q, k, v, bias, weights)
    got = output_and_gradients(attend(blockwise_attention, block=max(block, positions // 6)), q, k, v, bias, weights)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)


def by_hand(q: Any, k: Any, v: Any, bias: Any, form: Form, starts: Any = None) -> np.ndarray:
    """Attention in float64, one row, head and query after the other."""
    q, k, v, bias = (np.asarray(x, np.float64) for x in (q, k, v, bias))
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        g = h // (q.shape[2] // k.shape[2])
        first = max(0, t - form.window + 1) if form.window else 0
        if starts is not None:
            first = max(first, starts[b, t])
        scores = []
        for s in range(first, t + 1):
            score = q[b, t, h] @ k[b, s, g] / (form.divisor or np.sqrt(q.shape[-1]))
            scores.append(form.cap * np.tanh(score / form.cap) if form.cap else score)
            distance = t - s
            bucket = distance if distance < 16 else min(31, 16 + int(np.log(distance / 16) / np.log(8) * 16))
            scores[-1] += bias[bucket, h]
        weights = np.exp(scores)
        out[b, t, h] = weights @ v[b, first : t + 1, g] / (weights.sum() + form.has_extra_logit)
    return out


CHANGES: list[dict[str, Any]] = [{}, {"window": 0}, {"cap": None}, {"has_extra_logit": False}, {"divisor": None}]


@pytest.mark.parametrize(
    ("change", "segments"),
    [
        pytest.param(change, segments, marks=pytest.mark.wide if change and not segments else ())
        for change, segments in itertools.product(CHANGES, (0, 1))
    ],
)
def test_dense_attention_equals_reference(change: dict[str, Any], segments: int) -> None:
    """Dense attention equals an implementation written by hand."""
    form = EVERYTHING._replace(dropout_rate=0.0, **change)
    (q,), (k, v) = arrays(1, ROWS, 141, 6, 5), arrays(2, ROWS, 141, 2, 5)
    bias, starts = jax.random.normal(jax.random.key(2), (32, 6)), starts_of(segments, 141)
    got = dense_attention(q, k, v, form=form, terms=Terms(bias, starts_BT=starts))
    np.testing.assert_allclose(got, by_hand(q, k, v, bias, form, starts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [0, 11])
def test_learned_further_logits(window: int) -> None:
    """A logit per head: outputs and gradients, its own too, are those of a softmax with one more column."""
    form, starts = Form(window=window, divisor=2.0, has_extra_logit=True), starts_of(2, 41)
    (q, weights), (k, v) = arrays(2, ROWS, 41, 6, 5), arrays(2, ROWS, 41, 2, 5)
    sinks = 3 * jax.random.normal(jax.random.key(2), (6,))
    assert starts is not None
    t, s = jnp.arange(41)[None, :, None], jnp.arange(41)[None, None]
    seen = (s <= t) & (s > t - (window or 41)) & (s >= starts[:, :, None])

    def with_a_column(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        k, v = (x.repeat(3, axis=2) for x in (k, v))
        scores = jnp.where(seen[:, None], jnp.einsum("BTHK,BSHK->BHTS", q, k) / 2, -jnp.inf)
        column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        probabilities = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1))[..., :-1]
        return jnp.einsum("BHTS,BSHK->BTHK", probabilities, v)

    expected = output_and_gradients(with_a_column, q, k, v, sinks, weights)
    for attend in (dense_attention, partial(blockwise_attention, block=8)):
        got = output_and_gradients(
            lambda q, k, v, sinks, attend=attend: attend(
                q, k, v, form=form, terms=Terms(sinks_H=sinks, starts_BT=starts)
            ),
            *(q, k, v, sinks, weights),
        )
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)


def test_local_attention_cost() -> None:
    """The cost of local attention is proportional to its window."""

    def cost(context: int, window: int) -> tuple[int, int]:
        def loss(*qkv: jax.Array) -> jax.Array:
            return blockwise_attention(*qkv, form=Form(window=window), block=64).sum()

        shapes = [jax.ShapeDtypeStruct((1, context, 2, 16), jnp.float32)] * 3
        analysis: Any = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile().memory_analysis()
        flops = matmul_flops(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*shapes).jaxpr)
        return flops, int(analysis.temp_size_in_bytes)

    (flops, held), (flops_of_all, held_of_all) = cost(2048, 256), cost(2048, 0)
    assert held <= held_of_all
    # 5 blocks of keys for each of 32 blocks of queries, but for those of the first four.
    assert flops * (32 * 33 // 2) == flops_of_all * (32 * 5 - 10)
    assert cost(4096, 256)[0] < 2.1 * flops


def test_scores_that_overflow_exp() -> None:
    """Scores that would overflow an exponential do not change the result."""
    q, k, v, weights = arrays(4, ROWS, 33, 2, 4)
    expected = output_and_gradients(partial(dense_attention, form=Form()), 50 * q, 3 * k, v, weights)
    got = output_and_gradients(partial(blockwise_attention, form=Form(), block=8), 50 * q, 3 * k, v, weights)
    for x, y in zip(got, expected, strict=True):
        assert np.isfinite(y).all()
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("has_alibi", [False, True])
@pytest.mark.parametrize("position", [0, 7, 15])
def test_queries_with_a_longer_cache(position: int, has_alibi: bool) -> None:
    """Queries that start at a position see the keys of a longer cache."""
    (q,), (k, v) = arrays(1, ROWS, 9, 2, 4), arrays(2, ROWS, 24, 2, 4)
    k, v = (x.at[:, position + 9 :].set(1e3) for x in (k, v))  # what is not filled yet
    expected = dense_attention(q, k, v, position, form=Form(has_alibi=has_alibi))
    blockwise = jax.jit(partial(blockwise_attention, form=Form(has_alibi=has_alibi), block=5))
    np.testing.assert_allclose(blockwise(q, k, v, position), expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_error() -> None:
    """In bfloat16 the result is as near to float32 as that of dense attention."""
    inputs = arrays(4, ROWS, 50, 3, 16)
    exact = output_and_gradients(partial(dense_attention, form=Form(has_alibi=True)), *inputs)
    rounded = [x.astype(jnp.bfloat16) for x in inputs]
    dense = output_and_gradients(partial(dense_attention, form=Form(has_alibi=True)), *rounded)
    blockwise = output_and_gradients(partial(blockwise_attention, form=Form(has_alibi=True), block=16), *rounded)
    attended = blockwise_attention(*rounded[:3], form=Form(has_alibi=True))
    assert attended.dtype == jnp.bfloat16
    for x, y, reference in zip(blockwise, dense, exact, strict=True):
        assert np.linalg.norm(x - reference) < 1.5 * np.linalg.norm(y - reference) < 0.03 * np.linalg.norm(reference)


@pytest.mark.parametrize("block", [5, 16, 64])
def test_same_dropout_as_dense(block: int) -> None:
    """Dropout masks are those of dense attention."""
    positions = 37
    (q,) = arrays(1, ROWS, positions, 3, positions)
    v = jnp.broadcast_to(jnp.eye(positions)[None, :, None], q.shape)  # the output is the matrix of probabilities
    terms = Terms(keys_B=jax.random.split(jax.random.key(5), ROWS))
    options: dict[str, Any] = {"form": Form(dropout_rate=0.4), "terms": terms}
    dense = np.asarray(dense_attention(0 * q, 0 * q, v, **options))
    blockwise = np.asarray(blockwise_attention(0 * q, 0 * q, v, block=block, **options))
    np.testing.assert_array_equal(blockwise == 0, dense == 0)
    past = np.tri(positions, dtype=bool)[None, :, None]
    assert abs((dense == 0)[np.broadcast_to(past, dense.shape)].mean() - 0.4) < 0.05


def test_random_counters_have_64_bits() -> None:
    """Counters of random bits have 64 bits."""
    # A block of a matrix that nobody holds: within one of its rows, entries pass 2^32.
    positions, size, rate = 2**17 + 3, 4, 0.5
    blocks = Blocks(Form(dropout_rate=rate), positions, positions, size)
    key_data = jax.random.key_data(jax.random.split(jax.random.key(2), 1))
    row, column = divmod(2**32, positions)
    i, j = row // size, column // size
    t, s = (size * block + jnp.arange(size) for block in (i, j))
    kept = dropped_block(blocks, jnp.ones((1, 1, size, size)), key_data, t, s) != 0
    entries = [(i * size + t) * positions + j * size + s for t in range(size) for s in range(size)]
    assert min(entries) < 2**32 <= max(entries)
    words = np.asarray([entry >> 32 for entry in entries] + [entry % 2**32 for entry in entries], np.uint32)
    first, second = np.split(np.asarray(threefry_2x32(key_data[0], jnp.asarray(words))), 2)
    np.testing.assert_array_equal(np.asarray(kept).ravel(), ((first ^ second) >> 9) * 2.0**-23 < rate)
    assert 0 < kept.mean() < 1


def test_other_random_bits_are_refused() -> None:
    """Dropout with other random bits is refused."""
    q, k, v = arrays(3, ROWS, 4, 1, 2)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), ROWS)
    with pytest.raises(ValueError, match="threefry"):
        blockwise_attention(q, k, v, form=Form(has_alibi=True, dropout_rate=0.1), terms=Terms(keys_B=keys))


def test_blocks_above_the_diagonal_are_skipped() -> None:
    def flops(attend: Callable[..., jax.Array]) -> int:
        def loss(*qkv: jax.Array) -> jax.Array:
            return attend(*qkv, form=Form(has_alibi=True)).sum()

        return matmul_flops(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays(3, 1, 1024, 1, 8)).jaxpr)

    # 36 of 64 pairs of blocks; 2 products forward and 4 backward, and the scores once more.
    assert flops(partial(blockwise_attention, block=128)) * 64 * 6 == flops(dense_attention) * 36 * 7


def test_blocks_of_queries_are_dense_attention() -> None:
    """Outputs and gradients, with every option but dropout, and blocks that do not divide the rows."""
    (q, weights), (k, v) = arrays(2, ROWS, 37, 6, 5), arrays(2, ROWS, 37, 2, 5)
    bias = jax.random.normal(jax.random.key(2), (32, 6))
    form = EVERYTHING._replace(dropout_rate=0.0)

    def attend(function: Callable[..., jax.Array], **options: Any) -> Callable[..., jax.Array]:
        starts_BT = starts_of(2, 37)
        return lambda q, k, v, bias: function(q, k, v, form=form, terms=Terms(bias, starts_BT=starts_BT), **options)

    got = output_and_gradients(attend(attention_by_queries, block=8), q, k, v, bias, weights)
    for x, y in zip(got, output_and_gradients(attend(dense_attention), q, k, v, bias, weights), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)


@pytest.mark.wide  # the next but one has them
def test_a_model_takes_queries_in_blocks() -> None:
    """It multiplies fewer queries and keys for the same losses; with dropout, whose mask is one, all of them."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 101, (2, 33)))

    params = jax.jit(GPT(CONFIG).init)(jax.random.key(0), tokens, tokens)
    keys = jax.random.split(jax.random.key(1), 2)

    def losses_of(rate: float, block: int | None) -> Callable[[Any], Any]:
        model = GPT(dataclasses.replace(CONFIG, attention_dropout=rate), query_block=block)
        return lambda params: model.apply(params, tokens, tokens, keys)

    def flops_of(rate: float, block: int | None) -> int:
        return matmul_flops(jax.make_jaxpr(losses_of(rate, block))(params).jaxpr)

    losses, expected = (jax.jit(losses_of(0.0, block))(params) for block in (8, None))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    flops, flops_of_all = flops_of(0.0, 8), flops_of(0.0, None)
    # Keys of 4 blocks of 8 queries and of the last query, in two layers; a product of queries and one with values.
    fewer = 33 * 33 - (8 * (8 + 16 + 24 + 32) + 33)
    assert flops_of_all - flops == 2 * 2 * 2 * 2 * 42 * fewer
    assert flops_of(0.3, 8) == flops_of_all
    assert flops_of(0.0, 20) == flops_of_all  # rows shorter than two blocks


def test_memory_is_linear_in_the_context() -> None:
    @cache
    def temporaries(attend: Callable[..., jax.Array], context: int) -> int:
        def loss(*qkv: jax.Array) -> jax.Array:
            return attend(*qkv, form=Form(has_alibi=True)).sum()

        shapes = [jax.ShapeDtypeStruct((1, context, 4, 32), jnp.float32)] * 3
        analysis: Any = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    assert temporaries(blockwise_attention, 2048) < 2.05 * temporaries(blockwise_attention, 1024)
    assert temporaries(dense_attention, 2048) > 3.9 * temporaries(dense_attention, 1024)
    assert temporaries(blockwise_attention, 2048) < temporaries(dense_attention, 2048) / 8


@pytest.mark.parametrize(
    ("remat", "has_segments"),
    [
        pytest.param("full", True, marks=pytest.mark.wide),
        *(pytest.param(remat, False, marks=pytest.mark.slow) for remat in ("full", "dots", "none")),
    ],
)
def test_memory_is_linear_in_context(remat: str, has_segments: bool) -> None:
    """The memory of a model is linear in the context.

    Also where layers are scanned: nothing that all layers have in common is computed ahead for all pairs.
    """

    def temporaries(context: int) -> int:
        config = dataclasses.replace(CONFIG, embedding_dim=8, num_head=4, block_size=context)
        model = GPT(config, remat=remat, blockwise_from=2)
        tokens = jax.ShapeDtypeStruct((1, context), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            losses: Any = model.apply(params, tokens, tokens, None, tokens if has_segments else None)
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

    monkeypatch.setattr("zero.models.self_attention.blockwise_attention", attend)
    yield contexts


def test_a_model_reads_a_prompt_in_blocks(small_blocks: list[int]) -> None:
    """Logits of a prompt that is read in two pieces, and of the token after it, are those of dense attention."""
    tokens = np.random.default_rng(3).integers(0, 101, (2, 24), np.int32)
    params = jax.jit(partial(GPT(CONFIG).init, method="hidden"))(jax.random.key(0), tokens, None)
    params = jax.tree.map(lambda x: 8 * x, params)  # far from uniform
    expected: Any = jax.jit(partial(GPT(CONFIG).apply, method="hidden"))(params, tokens, None)[0]
    hidden: Any = jax.jit(partial(GPT(CONFIG, blockwise_from=2).apply, method="hidden"))
    assert not small_blocks
    cache = init_cache(CONFIG, 2, 24, jnp.float32)
    for piece in (slice(0, 12), slice(12, 23), slice(23, 24)):
        got, cache = hidden(params, tokens[:, piece], None, cache, piece.start)
        np.testing.assert_allclose(got, expected[:, piece], rtol=1e-4, atol=5e-4)  # of numbers up to 20
    assert set(small_blocks) == {12, 11}  # to read the prompt, not to decode


@pytest.mark.parametrize(
    "has_alibi",
    [pytest.param(True, marks=pytest.mark.wide), pytest.param(False, marks=pytest.mark.slow)],
    ids=["alibi", "learned"],
)
def test_same_greedy_text_as_dense(has_alibi: bool, small_blocks: list[int]) -> None:
    """Greedy text is that of dense attention."""
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
