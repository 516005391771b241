"""The model in use, on shards of eight devices, against the whole model on one."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from zero.models.gpt import GPT, GPTConfig
from zero.training.programs import make_programs
from zero.training.step import ShardedGPT, adamw

CONFIG = GPTConfig(embedding_dim=42, vocab_size=101, num_head=3, block_size=12, dropout=0.5, N=2, vocab_chunks=3)
PROMPT = np.array([5, 100, 7], np.int32)
LENGTH, TEMPERATURE = 8, 0.8


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class Setup(NamedTuple):
    whole: Any
    shards: Any
    programs: Any


@cache
def setup() -> Setup:
    """Parameters that are far from uniform, whole and on shards."""
    model = ShardedGPT(CONFIG, zero.Axis("zero", (1, 8)), 3)
    programs = make_programs(
        model,
        adamw(0.1),
        learning_rate=lambda step: jnp.float32(0),
        seed=0,
        micro_batches=1,
        max_gradient_norm=None,
        sample_tokens=LENGTH,
        temperature=TEMPERATURE,
    )
    rng = np.random.default_rng(0)
    shapes = model.layout.shapes()
    whole = jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.2).astype(np.float32), shapes)
    shards = jax.pmap(lambda _: zero.shard(whole, model.layout, model.axis), "zero")(jnp.zeros(8))
    return Setup(whole, shards, programs)


def draw(seed: int) -> np.ndarray:
    return np.asarray(setup().programs.sample(setup().shards, PROMPT, np.int32(seed)))


def test_text_is_drawn_from_the_seed_alone_and_differs_between_devices() -> None:
    texts = draw(3)
    assert texts.shape == (8, LENGTH) and texts.dtype == np.int32
    assert texts.min() >= 0 and texts.max() < CONFIG.vocab_size
    np.testing.assert_array_equal(draw(3), texts)
    assert len({*map(bytes, texts), *map(bytes, draw(4))}) == 16


def test_text_drawn_with_a_cache_is_the_text_drawn_without() -> None:
    """Token for token: what is drawn at a position follows from a whole forward pass over everything before it."""
    texts = draw(3)
    sequences = np.concatenate([np.tile(PROMPT, (8, 1)), texts], axis=1)
    hidden, _ = jax.jit(partial(GPT(CONFIG).apply, method="hidden"))({"params": setup().whole}, sequences, None)
    table = setup().whole["vocabulary"]["table"].reshape(-1, CONFIG.embedding_dim)[: CONFIG.vocab_size]
    logits = np.asarray(hidden) @ table.T
    for device in range(8):
        key = jax.random.fold_in(jax.random.key(3), device)
        for position in range(len(PROMPT), len(PROMPT) + LENGTH):
            drawn = jax.random.categorical(
                jax.random.fold_in(key, position), logits[device, position - 1] / TEMPERATURE
            )
            assert drawn == sequences[device, position]


def test_evaluation_is_without_dropout_and_counts_what_is_scored() -> None:
    rows = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (16, 12), np.int32)
    rows[np.arange(12) >= np.arange(16)[:, None]] = -1  # rows of 0 to 12 tokens
    summed, scored = setup().programs.evaluate(setup().shards, rows.reshape(8, 2, 12))
    targets = np.concatenate([rows[:, 1:], np.full((16, 1), -1, np.int32)], axis=1)
    losses = jax.jit(GPT(CONFIG).apply)({"params": setup().whole}, np.maximum(rows, 0), targets)
    assert scored.item() == sum(max(0, min(row, 12) - 1) for row in range(16))
    np.testing.assert_allclose(summed.item(), np.sum(losses, where=targets >= 0), rtol=1e-5)
