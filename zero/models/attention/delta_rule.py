"""The gated delta rule: attention in linear time, whose state has a constant size.

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T,    o_t = S_t^T q_t

The state maps keys to values. Each position decays the state by `a_t`, and moves the state's value for its key toward
its own value by the fraction `b_t`. Training computes chunks with a few products each; sampling computes one position
at a time.

Source: Gated Delta Networks, arXiv 2412.06464, equation 10 and section 3.3.

Shapes are named by suffix:
  B rows, T positions of a row, N chunks, C positions of a chunk, H heads, K width of keys, V width of values
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
    chunks = Inputs(*(_in_chunks(x.astype(jnp.float32), chunk) for x in padded))
    if starts_BT is None:
        marks_NBC = None
    else:
        marks_NBC = _in_chunks(jnp.pad(starts_BT, ((0, 0), (0, added)), mode="edge"), chunk)
    firsts_N = jnp.arange(0, positions + added, chunk)

    # The backward pass recomputes a chunk's inner matrices, so it only needs the states between chunks.
    through_chunk = jax.checkpoint(_through_chunk, prevent_cse=False)
    last_BHKV, out_NBCHV = lax.scan(through_chunk, state_BHKV, (chunks, marks_NBC, firsts_N))
    out_BTHV = jnp.moveaxis(out_NBCHV, 0, 1).reshape(rows, positions + added, heads, -1)
    return out_BTHV[:, :positions], last_BHKV


def _in_chunks(x_BT: jax.Array, chunk: int) -> jax.Array:
    rows = x_BT.shape[0]
    return jnp.moveaxis(x_BT.reshape(rows, -1, chunk, *x_BT.shape[2:]), 1, 0)


def _through_chunk(
    state_BHKV: jax.Array, xs: tuple[Inputs, jax.Array | None, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The state after a chunk, and the outputs of its positions `(B, C, H, V)`.

    Position i writes `k_i u_i^T`, where u_i depends on the earlier ones: `(I + A) U = b (V - decayed S^T K)`, with a
    strictly lower triangular A.
    """
    inputs, starts_BC, first = xs
    q_BCHK, k_BCHK, v_BCHV, decay_BCH, rate_BCH = inputs
    total_BHC = jnp.moveaxis(jnp.cumsum(decay_BCH, axis=1), 1, 2)
    rate_BHC = jnp.moveaxis(rate_BCH, 1, 2)

    size = q_BCHK.shape[1]
    sees_CC = jnp.tril(jnp.ones((size, size), bool))
    if starts_BC is None:
        sees_BHCC = sees_CC[None, None]
        continues_BHC = jnp.ones((1, 1, size), bool)
    else:
        sees_BHCC = (sees_CC[None] & (starts_BC[:, :, None] == starts_BC[:, None, :]))[:, None]
        continues_BHC = (starts_BC < first)[:, None]
    # If a position does not see another one, the difference may be positive and its exponential infinite.
    between_BHCC = total_BHC[..., :, None] - total_BHC[..., None, :]
    decay_BHCC = jnp.where(sees_BHCC, jnp.exp(jnp.where(sees_BHCC, between_BHCC, 0.0)), 0.0)
    since_BHC = jnp.where(continues_BHC, jnp.exp(total_BHC), 0.0)

    overlap_BHCC = rate_BHC[..., None] * decay_BHCC * _einsum("bihk,bjhk->bhij", k_BCHK, k_BCHK)
    known_BHCV = since_BHC[..., None] * _einsum("bchk,bhkv->bhcv", k_BCHK, state_BHKV)
    error_BHCV = rate_BHC[..., None] * (jnp.moveaxis(v_BCHV, 1, 2) - known_BHCV)
    written_BHCV = lax.linalg.triangular_solve(
        jnp.tril(overlap_BHCC, -1), error_BHCV, left_side=True, lower=True, unit_diagonal=True
    )

    of_state_BCHV = jnp.moveaxis(since_BHC, 2, 1)[..., None] * _einsum("bchk,bhkv->bchv", q_BCHK, state_BHKV)
    scores_BHCC = decay_BHCC * _einsum("bihk,bjhk->bhij", q_BCHK, k_BCHK)
    out_BCHV = of_state_BCHV + _einsum("bhij,bhjv->bihv", scores_BHCC, written_BHCV)
    to_end_BHC = decay_BHCC[..., -1, :]
    state_BHKV = since_BHC[..., -1, None, None] * state_BHKV + _einsum(
        "bhc,bchk,bhcv->bhkv", to_end_BHC, k_BCHK, written_BHCV
    )
    return state_BHKV, out_BCHV


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
