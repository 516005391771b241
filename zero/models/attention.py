"""Causal attention: with the whole matrix of scores, or block by block without it. The results are the same.

Shapes are named by suffix:
  B rows, T query positions, S key positions, H heads, K head dimension,
  N blocks of positions, Q query positions of a block, R key positions of a block
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

# Positions of a block. Smaller blocks skip more above the diagonal, larger ones multiply faster; measured in
# docs/decisions/attention.md.
BLOCK = 256
# The number of positions from which `auto` is blockwise. On CPU it is faster from there on; elsewhere time has not been
# measured, and from 4,096 positions on the scores of 12 heads need 0.75 GiB per row.
BLOCKWISE_FROM = {"cpu": 512}
_BLOCKWISE_FROM_ELSEWHERE = 4096
CHOICES = ("auto", "dense", "blockwise")
LOWEST = float(np.finfo(np.float32).min)


def blockwise_from(choice: str, platform: str) -> int | None:
    """The number of query positions from which attention is blockwise; None for never.

    A single query, as in decoding, has no matrix of scores and is always dense.

    Args:
      choice: "auto", "dense" or "blockwise".
      platform: "cpu", "tpu", "gpu", ...

    >>> blockwise_from("dense", "cpu"), blockwise_from("blockwise", "cpu")
    (None, 2)
    """
    if choice == "auto":
        return BLOCKWISE_FROM.get(platform, _BLOCKWISE_FROM_ELSEWHERE)
    return {"dense": None, "blockwise": 2}[choice]


def alibi_slopes(num_head: int) -> np.ndarray:
    """One slope per head: `2^(-8 h / H)` for powers of two, the paper's interleaving for other counts.

    Source: Press et al., arXiv 2108.12409, section 3 and the reference implementation.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** math.floor(math.log2(num_head))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * (num_head - power), 2) / power)
    return np.concatenate([slopes, between]).astype(np.float32)


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """Dropout with one key per row, so that a mask depends on its sequence and on nothing else; no keys, no dropout."""
    if keys_B is None or rate == 0:
        return x
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys_B)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def dense_attention(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    position: jax.Array | int = 0,
    *,
    has_alibi: bool,
    dropout_rate: float = 0.0,
    keys_B: jax.Array | None = None,
) -> jax.Array:
    """Causal attention `(B, T, H, K)` with softmax in float32; it holds float32 `(B, H, T, S)`.

    Args:
      q_BTHK: queries; query t is at position `position + t`.
      k_BSHK: keys, at positions 0, 1, 2, ...
      v_BSHK: values.
      position: of the first query.
      has_alibi: whether scores fall linearly with distance (ALiBi, arXiv 2108.12409).
      dropout_rate: of probabilities.
      keys_B: one random key per row, or None for no dropout.
    """
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)
    scores_BHTS = scores_BHTS / math.sqrt(q_BTHK.shape[-1])
    t_T1 = position + jnp.arange(q_BTHK.shape[1])[:, None]
    s_1S = jnp.arange(k_BSHK.shape[1])[None, :]
    scores_BHTS = _bias_and_mask(scores_BHTS, t_T1, s_1S, has_alibi)
    probabilities_BHTS = dropout(jax.nn.softmax(scores_BHTS), dropout_rate, keys_B).astype(q_BTHK.dtype)
    return jnp.einsum("BHTS,BSHK->BTHK", probabilities_BHTS, v_BSHK)


def _bias_and_mask(scores_BHTS: jax.Array, t_T1: jax.Array, s_1S: jax.Array, has_alibi: bool) -> jax.Array:
    if has_alibi:
        slopes_1H11 = alibi_slopes(scores_BHTS.shape[1])[None, :, None, None]
        scores_BHTS = scores_BHTS + slopes_1H11 * (s_1S - t_T1)[None, None].astype(jnp.float32)
    return jnp.where((s_1S <= t_T1)[None, None], scores_BHTS, LOWEST)


def blockwise_attention(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    position: jax.Array | int = 0,
    *,
    has_alibi: bool,
    dropout_rate: float = 0.0,
    keys_B: jax.Array | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """`dense_attention` in memory linear in T and S: it holds the scores of one pair of blocks at a time.

    The forward pass keeps the running maximum and sum of each query's softmax, and saves its log-sum-exp; the backward
    pass computes the scores again from it. With as many queries as keys, blocks above the diagonal are skipped.
    Dropout masks are those of `dense_attention` for the same keys.

    Source: Rabe and Staats, arXiv 2112.05682; Dao et al., FlashAttention, arXiv 2205.14135, algorithms 1 and 4.

    Args:
      q_BTHK: queries; query t is at position `position + t`.
      k_BSHK: keys, at positions 0, 1, 2, ...; at least `position + T` of them.
      v_BSHK: values.
      position: of the first query.
      has_alibi: whether scores fall linearly with distance (ALiBi, arXiv 2108.12409).
      dropout_rate: of probabilities.
      keys_B: one random key per row, or None for no dropout.
      block: positions of a block; T and S need not divide by it.

    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 2, 4))
    >>> blockwise = blockwise_attention(q, k, v, has_alibi=True, block=4)
    >>> bool(jnp.allclose(blockwise, dense_attention(q, k, v, has_alibi=True), atol=1e-6))
    True

    Raises:
      ValueError: dropout whose masks cannot be had block by block, because random bits are not counter-based threefry.
    """
    queries, keys = q_BTHK.shape[1], k_BSHK.shape[1]
    key_data_B2 = None
    if keys_B is not None and dropout_rate > 0:
        if str(jax.random.key_impl(keys_B)) != "threefry2x32" or not jax.threefry_partitionable.value:
            raise ValueError("dropout in blockwise attention needs threefry2x32 keys and jax_threefry_partitionable")
        key_data_B2 = jax.random.key_data(keys_B)
    form = _Form(queries, keys, min(block, max(queries, keys)), has_alibi, dropout_rate)
    blocks = (_to_blocks(x, form.block) for x in (q_BTHK, k_BSHK, v_BSHK))
    out_NBHQK = _attend(form, *blocks, jnp.asarray(position), key_data_B2)
    return _from_blocks(out_NBHQK, queries)


class _Form(NamedTuple):
    """What is known of one attention when it is traced."""

    queries: int
    keys: int
    block: int
    has_alibi: bool
    dropout_rate: float

    def pairs(self) -> np.ndarray:
        """Numbers of a query block and a key block that it attends to, row by row, `(pairs, 2)`."""
        rows, columns = (-(-count // self.block) for count in (self.queries, self.keys))
        # Where there are more keys than queries, the position may be traced, and the mask alone decides.
        is_square = self.queries == self.keys
        pairs = [(i, j) for i in range(rows) for j in range(min(i + 1, columns) if is_square else columns)]
        return np.asarray(pairs, np.int32)


def _to_blocks(x_BTHK: jax.Array, block: int) -> jax.Array:
    """`(N, B, H, Q, K)`, padded with zeros."""
    rows, positions, heads, width = x_BTHK.shape
    x_BTHK = jnp.pad(x_BTHK, ((0, 0), (0, -positions % block), (0, 0), (0, 0)))
    return x_BTHK.reshape(rows, -1, block, heads, width).transpose(1, 0, 3, 2, 4)


def _from_blocks(x_NBHQK: jax.Array, positions: int) -> jax.Array:
    """`(B, T, H, K)`, without padding."""
    _, rows, heads, _, width = x_NBHQK.shape
    return x_NBHQK.transpose(1, 0, 3, 2, 4).reshape(rows, -1, heads, width)[:, :positions]


def _scores(form: _Form, q_BHQK: jax.Array, k_BHRK: jax.Array, pair_2: jax.Array, position: jax.Array) -> jax.Array:
    """Scores of a pair of blocks, float32 `(B, H, Q, R)`, the lowest number where a key is after its query."""
    scores_BHQR = jnp.einsum("BHQK,BHRK->BHQR", q_BHQK, k_BHRK, preferred_element_type=jnp.float32)
    within = jnp.arange(form.block)
    t_Q1 = position + (pair_2[0] * form.block + within)[:, None]
    s_1R = (pair_2[1] * form.block + within)[None, :]
    return _bias_and_mask(scores_BHQR / math.sqrt(q_BHQK.shape[-1]), t_Q1, s_1R, form.has_alibi)


def _dropped(form: _Form, x_BHQR: jax.Array, key_data_B2: jax.Array | None, pair_2: jax.Array) -> jax.Array:
    """`dropout` of what would be a block of `(B, H, T, S)`.

    The random bits of entry n of an array are threefry of n, 64 bits in two words, so a block has those of its entries.
    """
    if key_data_B2 is None:
        return x_BHQR
    heads = x_BHQR.shape[1]
    row_HT = np.arange(heads * form.queries, dtype=np.uint64).reshape(heads, -1) * np.uint64(form.keys)
    row_HT = np.pad(row_HT, ((0, 0), (0, -form.queries % form.block)))
    row_NHQ1 = row_HT.reshape(heads, -1, form.block).swapaxes(0, 1)[..., None]
    high_HQ1, row_low_HQ1 = (
        jnp.asarray(word.astype(np.uint32))[pair_2[0]] for word in (row_NHQ1 >> np.uint64(32), row_NHQ1)
    )
    s_11R = (pair_2[1] * form.block + jnp.arange(form.block)).astype(jnp.uint32)[None, None]
    low_HQR = row_low_HQ1 + s_11R
    high_HQR = high_HQ1 + (low_HQR < row_low_HQ1)

    def is_kept(key_data_2: jax.Array) -> jax.Array:
        first, second = threefry2x32_p.bind(key_data_2[0], key_data_2[1], high_HQR, low_HQR)
        # A float32 in [0, 1) from the 23 upper bits, as jax.random.uniform.
        return ((first ^ second) >> 9).astype(jnp.float32) * jnp.float32(2**-23) < 1 - form.dropout_rate

    return jnp.where(jax.vmap(is_kept)(key_data_B2), x_BHQR / (1 - form.dropout_rate), 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    form: _Form,
    q_NBHQK: jax.Array,
    k_NBHRK: jax.Array,
    v_NBHRK: jax.Array,
    position: jax.Array,
    key_data_B2: jax.Array | None,
) -> jax.Array:
    return _forward(form, q_NBHQK, k_NBHRK, v_NBHRK, position, key_data_B2)[0]


def _forward(
    form: _Form,
    q_NBHQK: jax.Array,
    k_NBHRK: jax.Array,
    v_NBHRK: jax.Array,
    position: jax.Array,
    key_data_B2: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    # Bias and masks follow from the pairs alone. Where layers are scanned, jax would compute what does not depend on
    # the input of a layer before all layers, for all pairs at once: T x S again. So the pairs are
    # made to depend on the queries.
    q_NBHQK, pairs = lax.optimization_barrier((q_NBHQK, jnp.asarray(form.pairs())))

    def add_pair(carry: tuple[jax.Array, ...], pair_2: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        i, j = pair_2
        out_BHQK, most_BHQ, sum_BHQ = (x[i] for x in carry)
        scores_BHQR = _scores(form, q_NBHQK[i], k_NBHRK[j], pair_2, position)
        new_most_BHQ = jnp.maximum(most_BHQ, scores_BHQR.max(-1))
        weights_BHQR = jnp.exp(scores_BHQR - new_most_BHQ[..., None])
        shrink_BHQ = jnp.exp(most_BHQ - new_most_BHQ)
        sum_BHQ = shrink_BHQ * sum_BHQ + weights_BHQR.sum(-1)
        weights_BHQR = _dropped(form, weights_BHQR, key_data_B2, pair_2).astype(v_NBHRK.dtype)
        added_BHQK = jnp.einsum("BHQR,BHRK->BHQK", weights_BHQR, v_NBHRK[j], preferred_element_type=jnp.float32)
        new = (shrink_BHQ[..., None] * out_BHQK + added_BHQK, new_most_BHQ, sum_BHQ)
        return tuple(x.at[i].set(block) for x, block in zip(carry, new, strict=True)), None

    zeros_NBHQK = jnp.zeros(q_NBHQK.shape, jnp.float32)
    zeros_NBHQ = zeros_NBHQK[..., 0]
    start: tuple[jax.Array, ...] = (zeros_NBHQK, jnp.full_like(zeros_NBHQ, -jnp.inf), zeros_NBHQ)
    (out_NBHQK, most_NBHQ, sum_NBHQ), _ = lax.scan(add_pair, start, pairs)
    out_NBHQK = (out_NBHQK / sum_NBHQ[..., None]).astype(q_NBHQK.dtype)
    lse_NBHQ = most_NBHQ + jnp.log(sum_NBHQ)
    return out_NBHQK, (q_NBHQK, k_NBHRK, v_NBHRK, position, key_data_B2, out_NBHQK, lse_NBHQ)


def _backward(
    form: _Form, saved: tuple[jax.Array, ...], out_grads_NBHQK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    q_NBHQK, k_NBHRK, v_NBHRK, position, key_data_B2, out_NBHQK, lse_NBHQ = saved
    dtype, scale = q_NBHQK.dtype, 1 / math.sqrt(q_NBHQK.shape[-1])
    products_NBHQK = out_grads_NBHQK.astype(jnp.float32) * out_NBHQK.astype(jnp.float32)
    mean_NBHQ = products_NBHQK.sum(-1)  # of each query's probability gradients, by its probabilities

    def add_pair(carry: tuple[jax.Array, ...], pair_2: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        i, j = pair_2
        q_grads_NBHQK, k_grads_NBHKR, v_grads_NBHKR = carry
        q_BHQK, k_BHRK, v_BHRK, out_grads_BHQK = q_NBHQK[i], k_NBHRK[j], v_NBHRK[j], out_grads_NBHQK[i]
        probabilities_BHQR = jnp.exp(_scores(form, q_BHQK, k_BHRK, pair_2, position) - lse_NBHQ[i][..., None])
        grads_BHQR = jnp.einsum("BHQK,BHRK->BHQR", out_grads_BHQK, v_BHRK, preferred_element_type=jnp.float32)
        grads_BHQR = _dropped(form, grads_BHQR, key_data_B2, pair_2)
        grads_BHQR = (probabilities_BHQR * (grads_BHQR - mean_NBHQ[i][..., None])).astype(dtype)
        dropped_BHQR = _dropped(form, probabilities_BHQR, key_data_B2, pair_2).astype(dtype)
        # From transposed queries and gradients, which are smaller than scores: XLA's CPU backend multiplies a matrix
        # that is stored transposed at a fifth of its speed.
        multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)
        q_grads_BHQK = multiply("BHQR,BHRK->BHQK", grads_BHQR, k_BHRK) * scale
        k_grads_BHKR = multiply("BHKQ,BHQR->BHKR", q_BHQK.swapaxes(2, 3), grads_BHQR) * scale
        v_grads_BHKR = multiply("BHKQ,BHQR->BHKR", out_grads_BHQK.swapaxes(2, 3), dropped_BHQR)
        return (
            q_grads_NBHQK.at[i].add(q_grads_BHQK),
            k_grads_NBHKR.at[j].add(k_grads_BHKR),
            v_grads_NBHKR.at[j].add(v_grads_BHKR),
        ), None

    zeros_NBHKR = jnp.zeros(k_NBHRK.swapaxes(3, 4).shape, jnp.float32)
    start: tuple[jax.Array, ...] = (jnp.zeros(q_NBHQK.shape, jnp.float32), zeros_NBHKR, zeros_NBHKR)
    (q_grads_NBHQK, *kv_grads_NBHKR), _ = lax.scan(add_pair, start, jnp.asarray(form.pairs()))
    k_grads_NBHRK, v_grads_NBHRK = (x.swapaxes(3, 4).astype(dtype) for x in kv_grads_NBHKR)
    return q_grads_NBHQK.astype(dtype), k_grads_NBHRK, v_grads_NBHRK, None, None


_attend.defvjp(_forward, _backward)
