"""The gated delta rule: attention in linear time, whose state has a constant size.

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T,    o_t = S_t^T q_t

The state maps keys to values. Each position decays the state by `a_t`, and moves the state's value for its key toward
its own value by the fraction `b_t`. Training computes chunks with a few products each; sampling computes one position
at a time.

Source: Gated Delta Networks, arXiv 2412.06464, equation 10 and section 3.3.

Shapes are named by suffix:
  B rows, T positions of a row, N chunks, C positions of a chunk, X queries and keys of a chunk, H heads,
  K width of keys, V width of values
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64

# Sums over keys lose digits in the lower precisions that TPUs choose by default.
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class Inputs(NamedTuple):
    """The inputs of each position.

    Attributes:
      q_BTHK, k_BTHK: queries and keys, of unit length; queries with their scale.
      v_BTHV: values.
      decay_BTH: log(a), at most 0, float32.
      rate_BTH: b, in [0, 1], float32.
    """

    q_BTHK: jax.Array
    k_BTHK: jax.Array
    v_BTHV: jax.Array
    decay_BTH: jax.Array
    rate_BTH: jax.Array


def delta_rule(
    inputs: Inputs, state_BHKV: jax.Array | None = None, starts_BT: jax.Array | None = None, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """The outputs `(B, T, H, V)` and the state after the last position `(B, H, K, V)`, both float32.

    Args:
      inputs: of all positions.
      state_BHKV: the state before the first position; None for zeros.
      starts_BT: the column where the segment of each position starts; a segment begins with a state of zeros. None for
        one segment per row, which continues the given state.
      chunk: positions computed at a time.

    >>> one = jnp.ones((1, 3, 1, 1))
    >>> halved = Inputs(one, one, one, jnp.full((1, 3, 1), jnp.log(0.5)), jnp.full((1, 3, 1), 0.5))
    >>> delta_rule(halved)[0].ravel()  # 0.5, then 0.25 + 0.5 * (1 - 0.25), ...
    Array([0.5    , 0.625  , 0.65625], dtype=float32)
    """
    rows, positions, heads, width = inputs.k_BTHK.shape
    if state_BHKV is None:
        state_BHKV = jnp.zeros((rows, heads, width, inputs.v_BTHV.shape[-1]), jnp.float32)
    chunk = min(chunk, positions)
    added = -positions % chunk
    # Padding at the end has neither rate nor decay, so it leaves the state unchanged.
    padded = (jnp.pad(x, [(0, 0), (0, added)] + [(0, 0)] * (x.ndim - 2)) for x in inputs)
    # Positions next to heads, once for all chunks: otherwise XLA for TPU transposes the matrices of each chunk.
    chunks = tuple(jnp.moveaxis(_in_chunks(x.astype(jnp.float32), chunk), 3, 2) for x in padded)
    if starts_BT is None:
        marks_NBC = None
    else:
        marks_NBC = _in_chunks(jnp.pad(starts_BT, ((0, 0), (0, added)), mode="edge"), chunk)
    firsts_N = jnp.arange(0, positions + added, chunk)

    # The backward pass recomputes a chunk's inner matrices, so it only needs the states between chunks.
    through_chunk = jax.checkpoint(_through_chunk, prevent_cse=False)
    last_BHKV, out_NBHCV = lax.scan(through_chunk, state_BHKV, (chunks, marks_NBC, firsts_N))
    out_BTHV = jnp.moveaxis(out_NBHCV, (0, 2), (1, 3)).reshape(rows, positions + added, heads, -1)
    return out_BTHV[:, :positions], last_BHKV


def _in_chunks(x_BT: jax.Array, chunk: int) -> jax.Array:
    rows = x_BT.shape[0]
    return jnp.moveaxis(x_BT.reshape(rows, -1, chunk, *x_BT.shape[2:]), 1, 0)


def _through_chunk(
    state_BHKV: jax.Array, xs: tuple[tuple[jax.Array, ...], jax.Array | None, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The state after a chunk, and the outputs of its positions `(B, H, C, V)`.

    Position i writes `k_i u_i^T`, where u_i depends on the earlier ones: `(I + A) U = b (V - decayed S^T K)`, with a
    strictly lower triangular A. Queries and keys are multiplied as one matrix, whose first C rows are the queries.
    """
    (q_BHCK, k_BHCK, v_BHCV, decay_BHC, rate_BHC), starts_BC, first = xs
    size = q_BHCK.shape[2]
    total_BHC = jnp.cumsum(decay_BHC, axis=-1)
    sees_CC = jnp.tril(jnp.ones((size, size), bool))
    if starts_BC is None:
        sees_BHCC = sees_CC[None, None]
        continues_BHC1 = jnp.ones((1, 1, size, 1), bool)
    else:
        sees_BHCC = (sees_CC[None] & (starts_BC[:, :, None] == starts_BC[:, None, :]))[:, None]
        continues_BHC1 = (starts_BC < first)[:, None, :, None]
    # If a position does not see another one, the difference may be positive and its exponential infinite.
    between_BHCC = total_BHC[..., :, None] - total_BHC[..., None, :]
    decay_BHCC = jnp.where(sees_BHCC, jnp.exp(jnp.where(sees_BHCC, between_BHCC, 0.0)), 0.0)
    since_BHC1 = jnp.where(continues_BHC1, jnp.exp(total_BHC)[..., None], 0.0)

    both_BHXK = jnp.concatenate([q_BHCK, k_BHCK], axis=2)
    of_keys_BHXC = _einsum("bhxk,bhck->bhxc", both_BHXK, k_BHCK)
    of_state_BHXV = _einsum("bhxk,bhkv->bhxv", both_BHXK, state_BHKV)

    overlap_BHCC = rate_BHC[..., None] * decay_BHCC * of_keys_BHXC[:, :, size:]
    error_BHCV = rate_BHC[..., None] * (v_BHCV - since_BHC1 * of_state_BHXV[:, :, size:])
    written_BHCV = lax.linalg.triangular_solve(
        jnp.tril(overlap_BHCC, -1), error_BHCV, left_side=True, lower=True, unit_diagonal=True
    )

    scores_BHCC = decay_BHCC * of_keys_BHXC[:, :, :size]
    out_BHCV = since_BHC1 * of_state_BHXV[:, :, :size] + _einsum("bhij,bhjv->bhiv", scores_BHCC, written_BHCV)
    k_at_end_BHCK = decay_BHCC[..., -1, :, None] * k_BHCK
    state_BHKV = since_BHC1[..., -1:, :] * state_BHKV + _einsum("bhck,bhcv->bhkv", k_at_end_BHCK, written_BHCV)
    return state_BHKV, out_BHCV


def delta_step(inputs: Inputs, state_BHKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `delta_rule` for a single position per row, without products of positions with each other.

    >>> one = jnp.ones((1, 1, 1, 1))
    >>> half = Inputs(one, one, one, jnp.full((1, 1, 1), jnp.log(0.5)), jnp.full((1, 1, 1), 0.5))
    >>> delta_step(half, jnp.full((1, 1, 1, 1), 0.5))[0].item()
    0.625
    """
    q_BHK, k_BHK, v_BHV, decay_BH, rate_BH = (x[:, 0].astype(jnp.float32) for x in inputs)
    state_BHKV = jnp.exp(decay_BH)[..., None, None] * state_BHKV
    error_BHV = rate_BH[..., None] * (v_BHV - _einsum("bhk,bhkv->bhv", k_BHK, state_BHKV))
    state_BHKV = state_BHKV + k_BHK[..., :, None] * error_BHV[..., None, :]
    return _einsum("bhk,bhkv->bhv", q_BHK, state_BHKV)[:, None], state_BHKV
