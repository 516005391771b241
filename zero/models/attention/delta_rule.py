"""The gated delta rule: attention in linear time, whose state has a constant size.

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T,    o_t = S_t^T q_t

The state maps keys to values. Each position decays the state by `a_t`, and moves the state's value for its key toward
its own value by the fraction `b_t`. Training computes chunks with a few products each; sampling computes one position
at a time.

Source: Gated Delta Networks, arXiv 2412.06464, equation 10 and section 3.3.

Shapes are named by suffix:
  B rows, T positions of a row, N chunks, C positions of a chunk, X queries and keys of a chunk, H heads, M heads of all
  rows, K width of keys, V width of values
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zero.models.stack import ATTENTION_OUTPUT

CHUNK = 64  # larger triangular matrices are inverted one after another on TPU (benchmarks/measured/delta-rule.md)

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


@jax.named_scope("delta_rule")
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
    chunks = tuple(_by_head(_in_chunks(x.astype(jnp.float32), chunk)) for x in padded)
    if starts_BT is None:
        marks_NMC = None
    else:
        marks_NBC = _in_chunks(jnp.pad(starts_BT, ((0, 0), (0, added)), mode="edge"), chunk)
        marks_NMC = jnp.repeat(marks_NBC, heads, axis=1)
    firsts_N = jnp.arange(0, positions + added, chunk)

    # The backward pass recomputes a chunk's inner matrices, so it only needs the states between chunks.
    through_chunk = jax.checkpoint(_through_chunk, prevent_cse=False)
    state_MKV = lax.collapse(state_BHKV, 0, 2)
    last_MKV, out_NMCV = lax.scan(through_chunk, state_MKV, (chunks, marks_NMC, firsts_N))
    out_NBHCV = out_NMCV.reshape(-1, rows, heads, *out_NMCV.shape[2:])
    out_BTHV = jnp.moveaxis(out_NBHCV, (0, 2), (1, 3)).reshape(rows, positions + added, heads, -1)
    return out_BTHV[:, :positions], last_MKV.reshape(state_BHKV.shape)


def _in_chunks(x_BT: jax.Array, chunk: int) -> jax.Array:
    rows = x_BT.shape[0]
    return jnp.moveaxis(x_BT.reshape(rows, -1, chunk, *x_BT.shape[2:]), 1, 0)


def _by_head(x_NBCH: jax.Array) -> jax.Array:
    """The heads of all rows before the positions.

    XLA for TPU inverts triangular matrices of 64 rows with one matrix per lane, so its lanes are full only if rows and
    heads are one dimension. Heads are moved once, because otherwise the matrices of each chunk would be transposed.
    """
    return lax.collapse(jnp.moveaxis(x_NBCH, 3, 2), 1, 3)


def _through_chunk(
    state_MKV: jax.Array, xs: tuple[tuple[jax.Array, ...], jax.Array | None, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The state after a chunk, and the outputs of its positions `(M, C, V)`.

    Position i writes `k_i u_i^T`, where u_i depends on the earlier ones: `(I + A) U = b (V - decayed S^T K)`, with a
    strictly lower triangular A. Queries and keys are multiplied as one matrix, whose first C rows are the queries.
    """
    (q_MCK, k_MCK, v_MCV, decay_MC, rate_MC), starts_MC, first = xs
    state_MKV = checkpoint_name(state_MKV, ATTENTION_OUTPUT)
    size = q_MCK.shape[1]
    total_MC = jnp.cumsum(decay_MC, axis=-1)
    sees_MCC = jnp.tril(jnp.ones((1, size, size), bool))
    continues_MC1 = jnp.ones((1, size, 1), bool)
    if starts_MC is not None:
        sees_MCC = sees_MCC & (starts_MC[:, :, None] == starts_MC[:, None, :])
        continues_MC1 = (starts_MC < first)[..., None]
    # If a position does not see another one, the difference may be positive and its exponential infinite.
    between_MCC = total_MC[:, :, None] - total_MC[:, None, :]
    decay_MCC = jnp.where(sees_MCC, jnp.exp(jnp.where(sees_MCC, between_MCC, 0.0)), 0.0)
    since_MC1 = jnp.where(continues_MC1, jnp.exp(total_MC)[..., None], 0.0)

    both_MXK = jnp.concatenate([q_MCK, k_MCK], axis=1)
    key_products_MXC = _einsum("mxk,mck->mxc", both_MXK, k_MCK)
    state_products_MXV = _einsum("mxk,mkv->mxv", both_MXK, state_MKV)

    overlap_MCC = rate_MC[..., None] * decay_MCC * key_products_MXC[:, size:]
    error_MCV = rate_MC[..., None] * (v_MCV - since_MC1 * state_products_MXV[:, size:])
    written_MCV = lax.linalg.triangular_solve(
        jnp.tril(overlap_MCC, -1), error_MCV, left_side=True, lower=True, unit_diagonal=True
    )

    scores_MCC = decay_MCC * key_products_MXC[:, :size]
    out_MCV = since_MC1 * state_products_MXV[:, :size] + _einsum("mij,mjv->miv", scores_MCC, written_MCV)
    k_at_end_MCK = decay_MCC[:, -1, :, None] * k_MCK
    state_MKV = since_MC1[:, -1:] * state_MKV + _einsum("mck,mcv->mkv", k_at_end_MCK, written_MCV)
    return state_MKV, out_MCV


def operations_per_position(width: int, values: int) -> int:
    """Operations of the products of the forward pass of `delta_rule` per head: with the state, and within a chunk."""
    return 2 * (3 * width * values + CHUNK * (2 * width + values))


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
