"""Inference on shards of eight devices against the whole model on one."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import zero
from zero.inference.generate import generate
from zero.models.config import GPTConfig
from zero.models.gpt import GPT
from zero.training.inference import Sampling, evaluate_step, filtered, penalised
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.programs import Inference, make_inference, make_programs
from zero.training.sharded_gpt import ShardedGPT

CONFIG = GPTConfig(embedding_dim=42, vocab_size=101, num_head=3, block_size=12, dropout=0.5, N=2, vocab_chunks=3)
PROMPT = np.array([5, 100, 7], np.int32)
LENGTH, TEMPERATURE = 8, 0.8


class Setup(NamedTuple):
    model: ShardedGPT
    whole: Any
    shards: Any
    programs: Any
    inference: Inference


@cache
def setup() -> Setup:
    """Parameters that are far from uniform, whole and on shards."""
    model = ShardedGPT(CONFIG, zero.Axis("zero", (1, 8)), 3)
    programs = make_programs(model, adamw(0.1, axes=model.axes), StepOptions(lambda step: jnp.float32(0)))
    rng = np.random.default_rng(0)
    shapes = model.layout.shapes()
    whole = jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.2).astype(np.float32), shapes)
    shards = jax.pmap(lambda _: zero.shard(whole, model.layout, model.axis), "zero")(jnp.zeros(8))
    return Setup(model, whole, shards, programs, make_inference(model, Sampling(temperature=TEMPERATURE)))


def draw(seed: int, prompts: list[np.ndarray] = [PROMPT] * 8, chunk: int = LENGTH) -> np.ndarray:
    return list(generate(setup().inference, setup().shards, prompts, LENGTH, seed=seed, chunk=chunk))[-1]


def logits_of(sequences: np.ndarray) -> np.ndarray:
    """Logits `(rows, positions, vocabulary)` from one whole forward pass on one device."""
    hidden, _ = jax.jit(partial(GPT(CONFIG).apply, method="hidden"))({"params": setup().whole}, sequences, None)
    table = setup().whole["vocabulary"]["table"].reshape(-1, CONFIG.embedding_dim)[: CONFIG.vocab_size]
    return np.asarray(hidden) @ table.T


def test_text_depends_on_the_seed() -> None:
    """Text depends only on the seed and differs between rows."""
    texts = draw(3)
    assert texts.shape == (8, len(PROMPT) + LENGTH) and texts.dtype == np.int32
    assert texts.min() >= 0 and texts.max() < CONFIG.vocab_size
    np.testing.assert_array_equal(draw(3, [PROMPT] * 11, chunk=3)[:8, : texts.shape[1]], texts)
    assert len({*map(bytes, texts), *map(bytes, draw(4))}) == 16


def test_text_with_a_cache() -> None:
    """Text drawn with a cache is the text drawn without one.

    Token for token: what is drawn at a position follows from a whole forward pass over everything before it.
    """
    prompts = [np.arange(1, 2 + row % 4, dtype=np.int32) for row in range(8)]  # of one to four tokens
    sequences = draw(3, prompts)
    logits = logits_of(sequences)
    for row, prompt in enumerate(prompts):
        np.testing.assert_array_equal(sequences[row, : len(prompt)], prompt)
        key = jax.random.fold_in(jax.random.key(3), row)
        for position in range(len(prompt), len(prompt) + LENGTH):
            drawn = jax.random.categorical(jax.random.fold_in(key, position), logits[row, position - 1] / TEMPERATURE)
            assert drawn == sequences[row, position]


def test_scores_equal_whole_model() -> None:
    """Scores are those of the whole model."""
    rows = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (16, 12), np.int32)
    rows[:, 1] = logits_of(rows[:, :1])[:, 0].argmax(-1)  # each row's second token is the most likely
    losses, is_greedy = setup().inference.score(setup().shards, rows.reshape(8, 2, 12))
    logits = logits_of(rows[:, :-1])
    expected = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), rows[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(is_greedy, logits.argmax(-1) == rows[:, 1:])
    assert is_greedy[:, 0].all() and not is_greedy.all()


def test_filters_keep_what_their_papers_say() -> None:
    probability = np.asarray([[0.5, 0.25, 0.15, 0.07, 0.03]], np.float32)
    logits = jnp.log(probability)
    compiled: Any = jax.jit(filtered, static_argnums=1)  # operation by operation it is dozens of programs

    def kept(**filters: Any) -> list[int]:
        return np.flatnonzero(np.isfinite(compiled(logits, Sampling(temperature=1, **filters))[0])).tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.49) == [0]
    assert kept(top_p=0.76) == [0, 1, 2]
    assert kept(top_k=3, top_p=0.99) == [0, 1, 2]
    # Information is 0.69, 1.39, 1.90, 2.66, 3.51 nats and expected to be 1.27: the second token is the typical one.
    assert kept(typical_p=0.2) == [1]
    assert kept(typical_p=0.6) == [0, 1]
    # exp(-1.27) is 0.281: the bounds are 0.05, 0.126 and 0.281; the most likely token always stays.
    assert [kept(eta=eta) for eta in (0.05, 0.2, 1.0)] == [[0, 1, 2, 3], [0, 1, 2], [0]]
    np.testing.assert_allclose(filtered(logits, Sampling(temperature=0.5)), logits * 2, rtol=1e-6)
    tokens = jnp.asarray([[3, -1, 3]])
    np.testing.assert_allclose(penalised(logits, tokens, 2.0)[0] / logits[0], [1, 1, 1, 2, 1], rtol=1e-6)
    np.testing.assert_allclose(penalised(-logits, tokens, 2.0)[0] / -logits[0], [1, 1, 1, 0.5, 1], rtol=1e-6)


def test_evaluation_has_no_dropout() -> None:
    """Evaluation has no dropout and counts the tokens that are scored."""
    rows = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (16, 12), np.int32)
    rows[np.arange(12) >= np.arange(16)[:, None]] = -1  # rows of 0 to 12 tokens
    summed, scored, _ = setup().programs.evaluate(setup().shards, rows.reshape(8, 2, 12))
    targets = np.concatenate([rows[:, 1:], np.full((16, 1), -1, np.int32)], axis=1)
    losses = jax.jit(GPT(CONFIG).apply)({"params": setup().whole}, np.maximum(rows, 0), targets)
    assert scored.item() == sum(max(0, min(row, 12) - 1) for row in range(16))
    np.testing.assert_allclose(summed.item(), np.sum(losses, where=targets >= 0), rtol=1e-5)


def test_evaluation_in_micro_batches() -> None:
    """Evaluation in micro-batches sums the same with fewer activations."""
    rows = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (8, 16, 12), np.int32)
    rows[:, ::3, 7:] = -1
    results, temporary = [], []
    for micro_batches in (1, 8):
        step = partial(evaluate_step, model=setup().model, micro_batches=micro_batches)
        program = jax.pmap(step, axis_name="zero", out_axes=None).lower(setup().shards, rows).compile()
        temporary.append(program.memory_analysis().temp_size_in_bytes)
        results.append(program(setup().shards, rows))
    assert results[0][1].item() == results[1][1].item() == 8 * (6 * 6 + 10 * 11)
    np.testing.assert_allclose(results[1][0].item(), results[0][0].item(), rtol=1e-6)
    assert temporary[1] < temporary[0] / 2


def test_prompts_share_programs() -> None:
    """Prompts whose lengths are in one bucket share their programs."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def texts(length: int) -> np.ndarray:
        prompt = np.arange(1, 1 + length, dtype=np.int32)
        return list(generate(setup().inference, setup().shards, [prompt] * 8, 2, seed=0, chunk=2))[-1]

    expected = texts(3)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for length in (2, 3, 5, 7):
            texts(length)
        np.testing.assert_array_equal(texts(3), expected)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
