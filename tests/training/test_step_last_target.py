"""Rows with one token more than positions: that token is the target of the last position, which is trained."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero
from tests.training.small_gpt import CONFIG, ROWS, advance, first_params, setup
from zero.models.gpt import GPT
from zero.training.sharded_gpt import ShardedGPT

LEARNED = dataclasses.replace(CONFIG, dropout=0.0, alibi_attn=False)
T = LEARNED.block_size


def rows(step: int) -> np.ndarray:
    """`(rows, T + 1)`, some of them padded."""
    tokens = np.random.default_rng(step).integers(0, LEARNED.vocab_size, (ROWS, T + 1), np.int32)
    tokens[np.arange(T + 1) >= np.linspace(2, 3 * T, ROWS).astype(int)[:, None]] = -1
    return tokens


CONTEXT = zero.Axis("zero", (1, 4), context=2)


@pytest.mark.wide  # tests/run/test_train_last_target.py has the rows
@pytest.mark.parametrize("axis", [None, pytest.param(CONTEXT, marks=pytest.mark.slow)], ids=["plain", "context-groups"])
def test_last_position_is_trained(axis: zero.Axis | None) -> None:
    """A step with T + 1 tokens per row is that of the model on T inputs and T targets, on one device."""
    on = setup(2 if axis is None else 4, 3, config=LEARNED, last_target=True, axis=axis)
    state, (metrics,) = advance(on, on.start(), range(1), rows)
    tokens = rows(0)

    def loss(params: Any) -> jax.Array:
        losses: Any = GPT(LEARNED).apply({"params": params}, jnp.maximum(tokens[:, :-1], 0), tokens[:, 1:])
        return jnp.sum(losses * (tokens[:, 1:] >= 0)) / np.sum(tokens[:, 1:] >= 0)

    value, grads = jax.jit(jax.value_and_grad(loss))(first_params(LEARNED))
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert float(jnp.abs(grads["positions"]["table"][-1]).max()) > 0
    table = on.whole(state, on.layout)["params/positions/table"]
    assert (table[-1] != np.asarray(first_params(LEARNED)["positions"]["table"][-1])).any()


@pytest.mark.parametrize("last_target", [False, True])
def test_positions_and_targets_of_rows(last_target: bool) -> None:
    model = ShardedGPT(LEARNED, zero.Axis("zero", (1, 1)), 0, last_target=last_target)
    tokens = jnp.asarray([[5, ~6, 7, 8]])
    inputs, targets, _ = model.inputs(tokens)
    if last_target:
        assert inputs.tolist() == [[5, 6, 7]] and targets.tolist() == [[~6, 7, 8]]
    else:
        assert inputs.tolist() == [[5, 6, 7, 8]] and targets.tolist() == [[~6, 7, 8, -1]]
    assert model.positions_in(tokens) == inputs.shape[1]
