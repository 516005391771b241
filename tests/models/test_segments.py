"""Documents packed into one row, each a segment, against the documents alone."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.models.attention.blockwise import blockwise_attention
from zero.models.config import GPTConfig
from zero.models.gpt import GPT
from zero.models.positions.rotary import cosines_and_sines, rotate, rotation_of

LENGTHS = (7, 1, 12, 3, 14)
POSITIONS = sum(LENGTHS)
CONFIG = GPTConfig(embedding_dim=42, vocab_size=101, num_head=3, block_size=POSITIONS, dropout=0.0, N=2)
KINDS: dict[str, dict[str, Any]] = {
    "alibi": {"alibi_attn": True},
    "learned": {"positions": "learned"},
    "rotary": {"positions": "rotary", "kv_heads": 1, "embedding_dim": 48},
    "t5": {"positions": "t5", "extra_logit": True},
    "windows": {"positions": "learned", "windows": (5, 0)},
    "latent": {
        "positions": "rotary", "qkv_bias": False, "head_dim": 14, "rotary_dim": 6, "latent_dim": 10, "value_dim": 9,
    },
}  # fmt: skip


def model_and_params(kind: str, blockwise_from: int | None = None, **options: Any) -> tuple[GPT, Any]:
    """A model whose every parameter is large enough to matter."""
    config = dataclasses.replace(CONFIG, **{"alibi_attn": False, **KINDS[kind]})
    model = GPT(config, blockwise_from=blockwise_from, **options)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    shapes = jax.eval_shape(partial(model.init, method="hidden"), jax.random.key(0), tokens, None)
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.3).astype(np.float32), shapes)


def packed() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, targets and starts of two rows of the same documents, in two orders."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, CONFIG.vocab_size, (2, length), np.int32) for length in LENGTHS]
    tokens, targets, starts = [], [], []
    for order in (documents, documents[::-1]):
        starts.append(np.repeat(np.cumsum([0, *(d.shape[1] for d in order)])[:-1], [d.shape[1] for d in order]))
        tokens.append(np.concatenate([d[0] for d in order]))
        targets.append(np.concatenate([d[1] for d in order]))
    return np.stack(tokens), np.stack(targets), np.stack(starts).astype(np.int32)


# Each kind, and each way to attend to biases of scores and to windows.
CASES = [("latent", "dense"), ("t5", "dense"), ("windows", "blockwise")]


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        pytest.param(*case, marks=() if case in CASES else pytest.mark.wide)
        for case in itertools.product(KINDS, ("dense", "blockwise"))
    ],
)
def test_packed_losses(kind: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of packed documents equal those of each document by itself."""
    monkeypatch.setattr("zero.models.self_attention.blockwise_attention", partial(blockwise_attention, block=5))
    model, params = model_and_params(kind, 5 if attention == "blockwise" else None)
    tokens, targets, starts = packed()
    apply = jax.jit(lambda *args: model.apply(params, *args))
    got = np.asarray(apply(tokens, targets, None, starts))
    for row in range(2):
        for start in np.unique(starts[row]):
            own = slice(start, start + np.count_nonzero(starts[row] == start))
            # Behind the document is what it must not see, so that all lengths share a program.
            alone, goals = (np.zeros((2, POSITIONS), np.int32) for _ in range(2))
            alone[:, : own.stop - own.start] = tokens[row, own]
            goals[:, : own.stop - own.start] = targets[row, own]
            losses = np.asarray(apply(alone, goals))[0, : own.stop - own.start]
            np.testing.assert_allclose(got[row, own], losses, rtol=1e-5, atol=1e-5)
    whole = np.asarray(apply(tokens, targets))
    assert abs(whole - got)[starts > 0].mean() > 0.01  # without segments they are others


# Of dense attention; the losses of every kind are compared by default.
@pytest.mark.parametrize(
    "kind",
    [
        "t5",
        pytest.param("windows", marks=pytest.mark.wide),
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("alibi", "learned", "rotary", "latent")),
    ],
)
def test_packed_gradients(kind: str) -> None:
    """Gradients of packed documents are the sum of those of each document by itself."""
    model, params = model_and_params(kind)
    tokens, targets, starts = (x[:1] for x in packed())

    @jax.jit
    def grads(params: Any, tokens: Any, targets: Any, starts: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            losses: Any = model.apply(params, tokens, targets, None, starts)
            return jnp.sum(jnp.where(targets >= 0, losses, 0))

        return jax.grad(loss)(params)

    expected: Any = jax.tree.map(np.zeros_like, params)
    for start in np.unique(starts):
        length = np.count_nonzero(starts == start)
        alone, goals = np.zeros((1, POSITIONS), np.int32), np.full((1, POSITIONS), -1, np.int32)
        alone[:, :length] = tokens[:, start : start + length]
        goals[:, :length] = targets[:, start : start + length]
        expected = jax.tree.map(np.add, expected, grads(params, alone, goals, np.zeros_like(alone)))
    got = grads(params, tokens, targets, starts)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max() + 1e-6)


def test_rotary_positions_in_segments() -> None:
    """Rotary positions count from the start of a segment.

    Only differences count, but angles at high positions are rounded: a far segment would lose the last bits.
    """
    rotation = rotation_of(dataclasses.replace(CONFIG, alibi_attn=False, positions="rotary"), 0, 0)
    x = jax.random.normal(jax.random.key(0), (1, 6, 3, 14))
    far, starts = 100_000, jnp.full((1, 6), 100_000)
    near = rotate(x, *cosines_and_sines(6, 0, rotation))
    np.testing.assert_array_equal(rotate(x, *cosines_and_sines(6, far, rotation, starts)), near)
    assert not np.array_equal(rotate(x, *cosines_and_sines(6, far, rotation, starts - 1)), near)
