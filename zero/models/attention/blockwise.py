"""Causal attention block by block, without the whole matrix of scores.

Shapes are named by suffix:
  B rows, T query positions, S key positions, H heads of queries, G heads of keys, each for H / G of queries,
  K head dimension, C buckets of distance, X queries of all heads of a group,
  N blocks of positions, Q query positions of a block, R key positions of a block
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from zero.models.attention.dense import by_group
from zero.models.attention.scores import PLAIN, Form, biased_and_masked, divided_and_capped, relative_bias

# Positions of a block. Smaller blocks skip more above the diagonal, larger ones multiply faster; measured in
# docs/decisions/attention.md.
BLOCK = 256


def blockwise_attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    position: jax.Array | int = 0,
    *,
    form: Form = PLAIN,
    bias_CH: jax.Array | None = None,
    keys_B: jax.Array | None = None,
    starts_BT: jax.Array | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """`dense_attention` in memory linear in T and S: it holds the scores of one pair of blocks at a time.

    The forward pass keeps the running maximum and sum of each query's softmax, and saves its log-sum-exp; the backward
    pass computes the scores again from it. With as many queries as keys, blocks above the diagonal and blocks outside
    the window are skipped. Dropout masks are those of `dense_attention` for the same keys.

    Source: Rabe and Staats, arXiv 2112.05682; Dao et al., FlashAttention, arXiv 2205.14135, algorithms 1 and 4.

    Args:
      q_BTHK: queries; query t is at position `position + t`.
      k_BSGK: keys, at positions 0, 1, 2, ...; at least `position + T` of them.
      v_BSGK: values.
      position: of the first query.
      form: what scores are made of.
      bias_CH: added to the scores by bucket of distance, as T5 has it.
      keys_B: one random key per row, or None for no dropout.
      starts_BT: the first key that each query may see, int32: where its segment starts; None for the first of all.
      block: positions of a block; T and S need not divide by it.

    >>> from zero.models.attention.dense import dense_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 2, 4))
    >>> form = Form(has_alibi=True, window=7)
    >>> blockwise = blockwise_attention(q, k[:, :, :1], v[:, :, :1], form=form, block=4)
    >>> bool(jnp.allclose(blockwise, dense_attention(q, k[:, :, :1], v[:, :, :1], form=form), atol=1e-6))
    True

    Raises:
      ValueError: dropout whose masks cannot be drawn block by block: random bits are not counter-based threefry.
    """
    queries, keys = q_BTHK.shape[1], k_BSGK.shape[1]
    key_data_B2 = None
    if keys_B is not None and form.dropout_rate > 0:
        if str(jax.random.key_impl(keys_B)) != "threefry2x32" or not jax.threefry_partitionable.value:
            raise ValueError("dropout in blockwise attention needs threefry2x32 keys and jax_threefry_partitionable")
        key_data_B2 = jax.random.key_data(keys_B)
    blocks = _Blocks(form, queries, keys, min(block, max(queries, keys)))
    in_blocks = (_to_blocks(x, blocks.block) for x in (q_BTHK, k_BSGK, v_BSGK))
    starts_NBQ = None
    if starts_BT is not None:
        starts_NBQ = _to_blocks(starts_BT[:, :, None, None], blocks.block)[:, :, 0, :, 0]
    out_NBHQK = _attend(blocks, *in_blocks, bias_CH, jnp.asarray(position), key_data_B2, starts_NBQ)
    return _from_blocks(out_NBHQK, queries)


class _Blocks(NamedTuple):
    """What is known of one attention when it is traced."""

    form: Form
    queries: int
    keys: int
    block: int

    def pairs(self) -> np.ndarray:
        """Numbers of a query block and a key block that it attends to, row by row, `(pairs, 2)`."""
        rows, columns = (-(-count // self.block) for count in (self.queries, self.keys))
        if self.queries != self.keys:
            # The position may be traced, and the mask alone decides.
            return np.asarray([(i, j) for i in range(rows) for j in range(columns)], np.int32)
        # A block's first query sees no key before this one.
        firsts = [max(0, i * self.block - self.form.window + 1) if self.form.window else 0 for i in range(rows)]
        return np.asarray([(i, j) for i in range(rows) for j in range(firsts[i] // self.block, i + 1)], np.int32)


def _to_blocks(x_BTHK: jax.Array, block: int) -> jax.Array:
    """`(N, B, H, Q, K)`, padded with zeros."""
    rows, positions, heads, width = x_BTHK.shape
    x_BTHK = jnp.pad(x_BTHK, ((0, 0), (0, -positions % block), (0, 0), (0, 0)))
    return x_BTHK.reshape(rows, -1, block, heads, width).transpose(1, 0, 3, 2, 4)


def _from_blocks(x_NBHQK: jax.Array, positions: int) -> jax.Array:
    """`(B, T, H, K)`, without padding."""
    _, rows, heads, _, width = x_NBHQK.shape
    return x_NBHQK.transpose(1, 0, 3, 2, 4).reshape(rows, -1, heads, width)[:, :positions]


def _scores(
    blocks: _Blocks,
    q_BHQK: jax.Array,
    k_BGRK: jax.Array,
    bias_CH: jax.Array | None,
    pair_2: jax.Array,
    position: jax.Array,
    starts_NBQ: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Scores of a pair of blocks, float32 `(B, H, Q, R)`, the lowest number where a query does not see a key.

    And the derivative of the cap, where there is one.
    """
    q_BGXK = by_group(q_BHQK, k_BGRK.shape[1])
    scores_BGXR = jnp.einsum("BGXK,BGRK->BGXR", q_BGXK, k_BGRK, preferred_element_type=jnp.float32)
    scores_BHQR = scores_BGXR.reshape(*q_BHQK.shape[:3], -1)
    scores_BHQR, slope_BHQR = divided_and_capped(scores_BHQR, blocks.form, q_BHQK.shape[-1])
    t_Q1, s_1R = _positions(blocks, pair_2, position)
    starts_BQ = None if starts_NBQ is None else starts_NBQ[pair_2[0]]
    return biased_and_masked(scores_BHQR, t_Q1, s_1R, blocks.form, bias_CH, starts_BQ), slope_BHQR


def _positions(blocks: _Blocks, pair_2: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    within = jnp.arange(blocks.block)
    return position + (pair_2[0] * blocks.block + within)[:, None], (pair_2[1] * blocks.block + within)[None, :]


def _dropped(blocks: _Blocks, x_BHQR: jax.Array, key_data_B2: jax.Array | None, pair_2: jax.Array) -> jax.Array:
    """`dropout` of what would be a block of `(B, H, T, S)`.

    The random bits of entry n of an array are threefry of n, 64 bits in two words, so a block has those of its entries.
    """
    if key_data_B2 is None:
        return x_BHQR
    heads = x_BHQR.shape[1] * blocks.form.cut.size
    row_HT = np.arange(heads * blocks.queries, dtype=np.uint64).reshape(heads, -1) * np.uint64(blocks.keys)
    row_HT = np.pad(row_HT, ((0, 0), (0, -blocks.queries % blocks.block)))
    row_NHQ1 = row_HT.reshape(heads, -1, blocks.block).swapaxes(0, 1)[..., None]
    high_HQ1, row_low_HQ1 = (
        blocks.form.cut.part(jnp.asarray(word.astype(np.uint32))[pair_2[0]], 0)
        for word in (row_NHQ1 >> np.uint64(32), row_NHQ1)
    )
    s_11R = (pair_2[1] * blocks.block + jnp.arange(blocks.block)).astype(jnp.uint32)[None, None]
    low_HQR = row_low_HQ1 + s_11R
    high_HQR = high_HQ1 + (low_HQR < row_low_HQ1)

    def is_kept(key_data_2: jax.Array) -> jax.Array:
        first, second = threefry2x32_p.bind(key_data_2[0], key_data_2[1], high_HQR, low_HQR)
        # A float32 in [0, 1) from the 23 upper bits, as jax.random.uniform.
        return ((first ^ second) >> 9).astype(jnp.float32) * jnp.float32(2**-23) < 1 - blocks.form.dropout_rate

    return jnp.where(jax.vmap(is_kept)(key_data_B2), x_BHQR / (1 - blocks.form.dropout_rate), 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    blocks: _Blocks,
    q_NBHQK: jax.Array,
    k_NBGRK: jax.Array,
    v_NBGRK: jax.Array,
    bias_CH: jax.Array | None,
    position: jax.Array,
    key_data_B2: jax.Array | None,
    starts_NBQ: jax.Array | None,
) -> jax.Array:
    return _forward(blocks, q_NBHQK, k_NBGRK, v_NBGRK, bias_CH, position, key_data_B2, starts_NBQ)[0]


def _forward(
    blocks: _Blocks,
    q_NBHQK: jax.Array,
    k_NBGRK: jax.Array,
    v_NBGRK: jax.Array,
    bias_CH: jax.Array | None,
    position: jax.Array,
    key_data_B2: jax.Array | None,
    starts_NBQ: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    # Bias and masks follow from the pairs alone. Where layers are scanned, jax would compute what does not depend on
    # the input of a layer before all layers, for all pairs at once: T x S again. So the pairs are
    # made to depend on the queries.
    q_NBHQK, pairs = lax.optimization_barrier((q_NBHQK, jnp.asarray(blocks.pairs())))

    def add_pair(carry: tuple[jax.Array, ...], pair_2: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        i, j = pair_2
        out_BHQK, most_BHQ, sum_BHQ = (x[i] for x in carry)
        scores_BHQR, _ = _scores(blocks, q_NBHQK[i], k_NBGRK[j], bias_CH, pair_2, position, starts_NBQ)
        new_most_BHQ = jnp.maximum(most_BHQ, scores_BHQR.max(-1))
        weights_BHQR = jnp.exp(scores_BHQR - new_most_BHQ[..., None])
        shrink_BHQ = jnp.exp(most_BHQ - new_most_BHQ)
        sum_BHQ = shrink_BHQ * sum_BHQ + weights_BHQR.sum(-1)
        weights_BHQR = _dropped(blocks, weights_BHQR, key_data_B2, pair_2).astype(v_NBGRK.dtype)
        weights_BGXR = by_group(weights_BHQR, v_NBGRK.shape[2])
        added_BGXK = jnp.einsum("BGXR,BGRK->BGXK", weights_BGXR, v_NBGRK[j], preferred_element_type=jnp.float32)
        new = (shrink_BHQ[..., None] * out_BHQK + added_BGXK.reshape(out_BHQK.shape), new_most_BHQ, sum_BHQ)
        return tuple(x.at[i].set(block) for x, block in zip(carry, new, strict=True)), None

    zeros_NBHQK = jnp.zeros(q_NBHQK.shape, jnp.float32)
    zeros_NBHQ = zeros_NBHQK[..., 0]
    # A further logit of 0 is the first that each softmax has met.
    most, total = (0.0, 1.0) if blocks.form.has_extra_logit else (-jnp.inf, 0.0)
    start: tuple[jax.Array, ...] = (zeros_NBHQK, jnp.full_like(zeros_NBHQ, most), jnp.full_like(zeros_NBHQ, total))
    (out_NBHQK, most_NBHQ, sum_NBHQ), _ = lax.scan(add_pair, start, pairs)
    out_NBHQK = (out_NBHQK / sum_NBHQ[..., None]).astype(q_NBHQK.dtype)
    lse_NBHQ = most_NBHQ + jnp.log(sum_NBHQ)
    return out_NBHQK, (q_NBHQK, k_NBGRK, v_NBGRK, bias_CH, position, key_data_B2, starts_NBQ, out_NBHQK, lse_NBHQ)


def _backward(
    blocks: _Blocks, saved: tuple[jax.Array, ...], out_grads_NBHQK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None, None, None]:
    q_NBHQK, k_NBGRK, v_NBGRK, bias_CH, position, key_data_B2, starts_NBQ, out_NBHQK, lse_NBHQ = saved
    dtype, groups = q_NBHQK.dtype, k_NBGRK.shape[2]
    scale = 1 / (math.sqrt(q_NBHQK.shape[-1]) if blocks.form.divisor is None else blocks.form.divisor)
    products_NBHQK = out_grads_NBHQK.astype(jnp.float32) * out_NBHQK.astype(jnp.float32)
    mean_NBHQ = products_NBHQK.sum(-1)  # of each query's probability gradients, by its probabilities

    def add_pair(carry: tuple[Any, ...], pair_2: jax.Array) -> tuple[tuple[Any, ...], None]:
        i, j = pair_2
        q_grads_NBHQK, k_grads_NBGKR, v_grads_NBGKR, bias_grads_CH = carry
        q_BHQK, k_BGRK, v_BGRK = q_NBHQK[i], k_NBGRK[j], v_NBGRK[j]
        out_grads_BGXK = by_group(out_grads_NBHQK[i], groups)
        scores_BHQR, slope_BHQR = _scores(blocks, q_BHQK, k_BGRK, bias_CH, pair_2, position, starts_NBQ)
        probabilities_BHQR = jnp.exp(scores_BHQR - lse_NBHQ[i][..., None])
        grads_BGXR = jnp.einsum("BGXK,BGRK->BGXR", out_grads_BGXK, v_BGRK, preferred_element_type=jnp.float32)
        grads_BHQR = _dropped(blocks, grads_BGXR.reshape(scores_BHQR.shape), key_data_B2, pair_2)
        grads_BHQR = probabilities_BHQR * (grads_BHQR - mean_NBHQ[i][..., None])
        if bias_CH is not None:
            t_Q1, s_1R = _positions(blocks, pair_2, position)
            _, bias_backward = jax.vjp(lambda bias_CH: relative_bias(bias_CH, t_Q1, s_1R), bias_CH)
            bias_grads_CH = bias_grads_CH + bias_backward(grads_BHQR.sum(0))[0].astype(jnp.float32)
        if slope_BHQR is not None:
            grads_BHQR = grads_BHQR * slope_BHQR
        grads_BGXR = by_group(grads_BHQR.astype(dtype), groups)
        dropped_BHQR = _dropped(blocks, probabilities_BHQR, key_data_B2, pair_2).astype(dtype)
        # From transposed queries and gradients, which are smaller than scores: XLA's CPU backend multiplies a matrix
        # that is stored transposed at a fifth of its speed.
        multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)
        q_grads_BGXK = multiply("BGXR,BGRK->BGXK", grads_BGXR, k_BGRK) * scale
        k_grads_BGKR = multiply("BGKX,BGXR->BGKR", by_group(q_BHQK, groups).swapaxes(2, 3), grads_BGXR) * scale
        v_grads_BGKR = multiply("BGKX,BGXR->BGKR", out_grads_BGXK.swapaxes(2, 3), by_group(dropped_BHQR, groups))
        return (
            q_grads_NBHQK.at[i].add(q_grads_BGXK.reshape(q_BHQK.shape)),
            k_grads_NBGKR.at[j].add(k_grads_BGKR),
            v_grads_NBGKR.at[j].add(v_grads_BGKR),
            bias_grads_CH,
        ), None

    zeros_NBGKR = jnp.zeros(k_NBGRK.swapaxes(3, 4).shape, jnp.float32)
    bias_zeros_CH = None if bias_CH is None else jnp.zeros(bias_CH.shape, jnp.float32)
    start = (jnp.zeros(q_NBHQK.shape, jnp.float32), zeros_NBGKR, zeros_NBGKR, bias_zeros_CH)
    (q_grads_NBHQK, *kv_grads_NBGKR, bias_grads_CH), _ = lax.scan(add_pair, start, jnp.asarray(blocks.pairs()))
    k_grads_NBGRK, v_grads_NBGRK = (x.swapaxes(3, 4).astype(dtype) for x in kv_grads_NBGKR)
    if bias_CH is not None:
        bias_grads_CH = bias_grads_CH.astype(bias_CH.dtype)
    return q_grads_NBHQK.astype(dtype), k_grads_NBGRK, v_grads_NBGRK, bias_grads_CH, None, None, None


_attend.defvjp(_forward, _backward)
