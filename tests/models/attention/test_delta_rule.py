"""The gated delta rule in chunks, and a position at a time, against its formula in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero.models.attention.delta_rule import Inputs, delta_rule, delta_step

ROWS, HEADS, KEYS, VALUES = 2, 3, 5, 4


def random_inputs(positions: int, seed: int = 0) -> Inputs:
    random = np.random.default_rng(seed)

    def unit(shape: tuple[int, ...]) -> np.ndarray:
        x = random.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    keys = ROWS, positions, HEADS, KEYS
    values = random.normal(size=(ROWS, positions, HEADS, VALUES))
    decay = -random.exponential(size=(ROWS, positions, HEADS))
    rate = random.uniform(size=(ROWS, positions, HEADS))
    return Inputs(*map(jnp.float32, (unit(keys), unit(keys), values, decay, rate)))


def by_formula(inputs: Inputs, state: np.ndarray, starts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Equation 10 of arXiv 2412.06464, read from left to right."""
    q, k, v, decay, rate = (np.asarray(x, np.float64) for x in inputs)
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    last = np.zeros_like(state)
    for row, head in np.ndindex(q.shape[0], q.shape[2]):
        s = state[row, head].T  # (values, keys), as in the paper
        for t in range(q.shape[1]):
            if starts is not None and starts[row, t] == t:
                s = np.zeros_like(s)
            key = k[row, t, head][:, None]
            b = rate[row, t, head]
            s = s @ (np.exp(decay[row, t, head]) * (np.eye(len(key)) - b * key @ key.T))
            s = s + b * v[row, t, head][:, None] @ key.T
            out[row, t, head] = s @ q[row, t, head]
        last[row, head] = s.T
    return out, last


STARTS = np.array([[0] * 4 + [4] * 9 + [13] * 6, [0] * 8 + [8] * 8 + [16] * 3])


@pytest.mark.parametrize("positions, chunk", [(1, 64), (19, 64), (19, 8), (16, 4), (19, 1)])
@pytest.mark.parametrize("are_packed", [False, True])
def test_equals_the_formula(positions: int, chunk: int, are_packed: bool) -> None:
    """At the edges of chunks and of segments, and with a state from before."""
    inputs = random_inputs(positions)
    starts = STARTS[:, :positions] if are_packed else None
    state = np.random.default_rng(1).normal(size=(ROWS, HEADS, KEYS, VALUES))
    out, last = delta_rule(inputs, jnp.float32(state), starts if starts is None else jnp.asarray(starts), chunk)
    expected = by_formula(inputs, state, starts)
    np.testing.assert_allclose(out, expected[0], atol=2e-6)
    np.testing.assert_allclose(last, expected[1], atol=2e-6)


def test_a_position_at_a_time_equals_chunks() -> None:
    """And a row in two calls equals the row in one."""
    inputs = random_inputs(9)
    state = jnp.zeros((ROWS, HEADS, KEYS, VALUES))
    outs = []
    for t in range(9):
        out, state = delta_step(jax.tree.map(lambda x, t=t: x[:, t : t + 1], inputs), state)
        outs.append(out)
    whole, last = delta_rule(inputs, chunk=4)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, atol=1e-6)
    np.testing.assert_allclose(state, last, atol=1e-6)
    begun, half = delta_rule(jax.tree.map(lambda x: x[:, :5], inputs), chunk=4)
    ended, end = delta_rule(jax.tree.map(lambda x: x[:, 5:], inputs), half, chunk=4)
    np.testing.assert_allclose(jnp.concatenate([begun, ended], axis=1), whole, atol=1e-6)
    np.testing.assert_allclose(end, last, atol=1e-6)


def test_gradients_are_those_of_single_steps() -> None:
    """Also where a decay between segments would be infinite, backward."""
    inputs = random_inputs(19)._replace(decay_BTH=jnp.full((ROWS, 19, HEADS), -30.0))
    starts = jnp.asarray(STARTS)

    def chunked(inputs: Inputs) -> jax.Array:
        return jnp.sum(jnp.sin(delta_rule(inputs, starts_BT=starts, chunk=8)[0]))

    def stepwise(inputs: Inputs) -> jax.Array:
        state = jnp.zeros((ROWS, HEADS, KEYS, VALUES))
        total = jnp.float32(0)
        for t in range(19):
            state = jnp.where((starts[:, t] == t)[:, None, None, None], 0.0, state)
            out, state = delta_step(jax.tree.map(lambda x, t=t: x[:, t : t + 1], inputs), state)
            total = total + jnp.sum(jnp.sin(out))
        return total

    for mild in (inputs, random_inputs(19)):
        gradients, expected = jax.jit(jax.grad(chunked))(mild), jax.jit(jax.grad(stepwise))(mild)
        jax.tree.map(partial(np.testing.assert_allclose, atol=3e-6), gradients, expected)
