"""Causal attention block by block, without the whole matrix of scores, of rows on one device or cut over several.

If rows are cut, queries stay on their device, and keys and values move around a ring of `ModelParallel.ring` devices,
in the backward pass with their gradients.

Shapes are named by suffix:
  B rows, T query positions, S key positions, H heads of queries, G heads of keys, each for H / G of queries,
  K head dimension, C buckets of distance, X queries of all heads that share keys,
  N blocks of positions, Q query positions of a block, R key positions of a block
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zero.models.attention.block_pairs import Blocks, Carry, around_the_ring, block_scores, dropped_block
from zero.models.attention.dense import by_key_head
from zero.models.attention.scores import NO_TERMS, PLAIN, Form, Terms, relative_bias
from zero.models.stack import ATTENTION_OUTPUT, ATTENTION_SUMS

# Positions of a block. Smaller blocks skip more above the diagonal, larger ones multiply faster; measured in
# docs/decisions/attention.md.
BLOCK = 256
CHOICES = ("auto", "dense", "blockwise", "kernel")  # values of model.attention
# The number of positions from which `auto` is blockwise. On CPU it is faster from there on. Elsewhere time is not
# measured; at 4,096 positions the scores of 12 heads need 0.75 GiB per row.
BLOCKWISE_FROM = {"cpu": 512}
_BLOCKWISE_FROM_ELSEWHERE = 4096


def blockwise_from(choice: str, platform: str) -> int | None:
    """The number of query positions from which attention is blockwise; None for never.

    A single query, as in decoding, has no matrix of scores and is always dense.

    Args:
      choice: one of `CHOICES`; "kernel" falls back to "auto" where the kernel is unsupported.
      platform: "cpu", "tpu", "gpu", ...

    >>> blockwise_from("dense", "cpu"), blockwise_from("blockwise", "cpu")
    (None, 2)
    """
    if choice in ("auto", "kernel"):
        return BLOCKWISE_FROM.get(platform, _BLOCKWISE_FROM_ELSEWHERE)
    return {"dense": None, "blockwise": 2}[choice]


def blockwise_attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    position: jax.Array | int = 0,
    *,
    form: Form = PLAIN,
    terms: Terms = NO_TERMS,
    block: int = BLOCK,
) -> jax.Array:
    """`dense_attention` in memory linear in T and S: it holds the scores of one pair of blocks at a time.

    The forward pass keeps the running maximum and sum of each query's softmax, and saves its log-sum-exp, from which
    the backward pass recomputes probabilities. With as many queries as keys, blocks above the diagonal and outside
    the window are skipped. Dropout masks equal `dense_attention`'s for the same keys. If `form.row_group` cuts rows,
    arguments and result are for this device's positions in attention over whole rows.

    Source: Rabe and Staats, arXiv 2112.05682; Dao et al., FlashAttention, arXiv 2205.14135, algorithms 1 and 4; Liu et
    al., ring attention, arXiv 2310.01889.

    Args:
      k_BSGK: keys, at least `position + T` of them.
      block: positions of a block; T and S need not divide by it.
      others: as for `dense_attention`.

    >>> from zero.models.attention.dense import dense_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 2, 4))
    >>> form = Form(has_alibi=True, window=7)
    >>> blockwise = blockwise_attention(q, k[:, :, :1], v[:, :, :1], form=form, block=4)
    >>> bool(jnp.allclose(blockwise, dense_attention(q, k[:, :, :1], v[:, :, :1], form=form), atol=1e-6))
    True

    Raises:
      ValueError: dropout with random keys that are not counter-based threefry.
    """
    queries = q_BTHK.shape[1]
    keys = k_BSGK.shape[1]
    key_data_B2 = None
    if terms.keys_B is not None and form.dropout_rate > 0:
        if str(jax.random.key_impl(terms.keys_B)) != "threefry2x32" or not jax.threefry_partitionable.value:
            raise ValueError("dropout in blockwise attention needs threefry2x32 keys and jax_threefry_partitionable")
        key_data_B2 = jax.random.key_data(terms.keys_B)
    blocks = Blocks(form, queries, keys, min(block, max(queries, keys) // form.row_group.pieces))
    starts_NBQ = None
    if terms.starts_BT is not None:
        starts_NBQ = blocks.of(terms.starts_BT[:, :, None, None])[:, :, 0, :, 0]
    inputs = _Inputs(
        blocks.of(q_BTHK),
        blocks.of(k_BSGK),
        blocks.of(v_BSGK),
        terms.bias_CH,
        terms.sinks_H,
        jnp.asarray(position),
        key_data_B2,
        starts_NBQ,
    )
    return blocks.joined(_attend(blocks, inputs), queries)


class _Pair(NamedTuple):
    """A block of queries and a block of keys."""

    blocks: Blocks
    q_BHQK: jax.Array
    k_BGRK: jax.Array
    v_BGRK: jax.Array
    bias_CH: jax.Array | None
    position: jax.Array
    t_Q: jax.Array
    s_R: jax.Array
    key_data_B2: jax.Array | None
    starts_BQ: jax.Array | None

    def _scores(self) -> tuple[jax.Array, jax.Array | None]:
        t_Q = self.position + self.t_Q
        return block_scores(self.blocks, self.q_BHQK, self.k_BGRK, self.bias_CH, t_Q, self.s_R, self.starts_BQ)

    def _dropped(self, x_BHQR: jax.Array) -> jax.Array:
        return dropped_block(self.blocks, x_BHQR, self.key_data_B2, self.t_Q, self.s_R)

    def add_to_sums(self, sums: Carry) -> Carry:
        """Adds to the weighted sum of values, the largest score and the sum of weights of each query."""
        out_BHQK, most_BHQ, sum_BHQ = sums
        scores_BHQR, _ = self._scores()
        new_most_BHQ = jnp.maximum(most_BHQ, scores_BHQR.max(-1))
        weights_BHQR = jnp.exp(scores_BHQR - new_most_BHQ[..., None])
        shrink_BHQ = jnp.exp(most_BHQ - new_most_BHQ)
        sum_BHQ = shrink_BHQ * sum_BHQ + weights_BHQR.sum(-1)
        weights_BGXR = by_key_head(self._dropped(weights_BHQR).astype(self.v_BGRK.dtype), self.v_BGRK.shape[1])
        added_BGXK = jnp.einsum("BGXR,BGRK->BGXK", weights_BGXR, self.v_BGRK, preferred_element_type=jnp.float32)
        return shrink_BHQ[..., None] * out_BHQK + added_BGXK.reshape(out_BHQK.shape), new_most_BHQ, sum_BHQ

    def add_to_gradients(
        self, out_grads_BHQK: jax.Array, lse_BHQ: jax.Array, mean_BHQ: jax.Array, grads: Carry
    ) -> Carry:
        """Adds to the gradients of queries, keys, values and the bias.

        Args:
          out_grads_BHQK: gradients of the output.
          lse_BHQ: log-sum-exp of each query's scores.
          mean_BHQ: mean of each query's probability gradients, weighted by its probabilities.
          grads: the sums so far; for keys and values they are transposed.
        """
        q_grads_BHQK, k_grads_BGKR, v_grads_BGKR, bias_grads_CH = grads
        q_BHQK = self.q_BHQK
        k_BGRK = self.k_BGRK
        v_BGRK = self.v_BGRK
        dtype = q_BHQK.dtype
        key_heads = k_BGRK.shape[1]
        scale = 1 / self.blocks.form.divisor_of(q_BHQK.shape[-1])
        out_grads_BGXK = by_key_head(out_grads_BHQK, key_heads)
        scores_BHQR, slope_BHQR = self._scores()
        probabilities_BHQR = jnp.exp(scores_BHQR - lse_BHQ[..., None])
        grads_BGXR = jnp.einsum("BGXK,BGRK->BGXR", out_grads_BGXK, v_BGRK, preferred_element_type=jnp.float32)
        grads_BHQR = self._dropped(grads_BGXR.reshape(scores_BHQR.shape))
        grads_BHQR = probabilities_BHQR * (grads_BHQR - mean_BHQ[..., None])
        if self.bias_CH is not None:
            t_Q1 = (self.position + self.t_Q)[:, None]
            s_1R = self.s_R[None]
            _, bias_backward = jax.vjp(lambda bias_CH: relative_bias(bias_CH, t_Q1, s_1R), self.bias_CH)
            bias_grads_CH = bias_grads_CH + bias_backward(grads_BHQR.sum(0))[0].astype(jnp.float32)
        if slope_BHQR is not None:
            grads_BHQR = grads_BHQR * slope_BHQR
        grads_BGXR = by_key_head(grads_BHQR.astype(dtype), key_heads)
        dropped_BGXR = by_key_head(self._dropped(probabilities_BHQR).astype(dtype), key_heads)
        # From transposed queries and gradients, which are smaller than scores: XLA's CPU backend multiplies by a
        # transposed matrix at a fifth of its speed.
        multiply = partial(jnp.einsum, preferred_element_type=jnp.float32)
        added_q_BGXK = multiply("BGXR,BGRK->BGXK", grads_BGXR, k_BGRK) * scale
        added_k_BGKR = multiply("BGKX,BGXR->BGKR", by_key_head(q_BHQK, key_heads).swapaxes(2, 3), grads_BGXR) * scale
        added_v_BGKR = multiply("BGKX,BGXR->BGKR", out_grads_BGXK.swapaxes(2, 3), dropped_BGXR)
        q_grads_BHQK = q_grads_BHQK + added_q_BGXK.reshape(q_BHQK.shape)
        return q_grads_BHQK, k_grads_BGKR + added_k_BGKR, v_grads_BGKR + added_v_BGKR, bias_grads_CH


class _Inputs(NamedTuple):
    """The arguments of attention in blocks."""

    q_NBHQK: jax.Array
    k_NBGRK: jax.Array
    v_NBGRK: jax.Array
    bias_CH: jax.Array | None
    sinks_H: jax.Array | None
    position: jax.Array
    key_data_B2: jax.Array | None
    starts_NBQ: jax.Array | None

    def pair(self, blocks: Blocks, i: jax.Array, j: jax.Array, t_NQ: jax.Array, s_NR: jax.Array) -> _Pair:
        """Block i of the queries, at positions `t_NQ[i]`, and block j of the keys, at `s_NR[j]`."""
        return _Pair(
            blocks,
            self.q_NBHQK[i],
            self.k_NBGRK[j],
            self.v_NBGRK[j],
            self.bias_CH,
            self.position,
            t_NQ[i],
            s_NR[j],
            self.key_data_B2,
            None if self.starts_NBQ is None else self.starts_NBQ[i],
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: Blocks, inputs: _Inputs) -> jax.Array:
    """The output `(N, B, H, Q, K)`."""
    return _forward(blocks, inputs)[0]


class _Saved(NamedTuple):
    """What the backward pass needs."""

    inputs: _Inputs
    out_NBHQK: jax.Array
    lse_NBHQ: jax.Array  # log-sum-exp of each query's scores


def _forward(blocks: Blocks, inputs: _Inputs) -> tuple[jax.Array, _Saved]:
    # Bias and masks depend only on the pairs, so in a scan over layers jax would compute them before the loop, for all
    # pairs at once: T x S again. The barrier makes the pairs depend on the queries.
    all_pairs = (jnp.asarray(blocks.pairs()), *blocks.later_pairs())
    q_NBHQK, all_pairs = lax.optimization_barrier((inputs.q_NBHQK, all_pairs))
    inputs = inputs._replace(q_NBHQK=q_NBHQK)
    t_NQ = blocks.numbers(blocks.queries)

    def add_pairs(sums: Carry, kv: Carry, pairs: Any, s_NR: jax.Array) -> tuple[Carry, Carry]:
        k_NBGRK, v_NBGRK = kv
        present = inputs._replace(k_NBGRK=k_NBGRK, v_NBGRK=v_NBGRK)

        def add_pair(carry: Carry, pair_2: jax.Array) -> tuple[Carry, None]:
            i, j = pair_2
            pair = present.pair(blocks, i, j, t_NQ, s_NR)
            new = blocks.where_near(pair.t_Q, pair.s_R, pair.add_to_sums, tuple(x[i] for x in carry))
            return tuple(x.at[i].set(block) for x, block in zip(carry, new, strict=True)), None

        return lax.scan(add_pair, sums, pairs)[0], kv

    zeros_NBHQK = jnp.zeros(q_NBHQK.shape, jnp.float32)
    zeros_NBHQ = zeros_NBHQK[..., 0]
    # A further logit is the initial maximum, and its weight of 1 the initial sum.
    most, total = (0.0, 1.0) if blocks.form.has_extra_logit else (-jnp.inf, 0.0)
    most_NBHQ = jnp.full_like(zeros_NBHQ, most)
    if inputs.sinks_H is not None:
        most_NBHQ = most_NBHQ + inputs.sinks_H.astype(jnp.float32)[None, None, :, None]
    start = (zeros_NBHQK, most_NBHQ, jnp.full_like(zeros_NBHQ, total))
    kv = (inputs.k_NBGRK, inputs.v_NBGRK)
    (out_NBHQK, most_NBHQ, sum_NBHQ), _ = around_the_ring(blocks, all_pairs, add_pairs, start, kv)
    out_NBHQK = checkpoint_name((out_NBHQK / sum_NBHQ[..., None]).astype(q_NBHQK.dtype), ATTENTION_OUTPUT)
    lse_NBHQ = checkpoint_name(most_NBHQ + jnp.log(sum_NBHQ), ATTENTION_SUMS)
    return out_NBHQK, _Saved(inputs, out_NBHQK, lse_NBHQ)


def _backward(blocks: Blocks, saved: _Saved, out_grads_NBHQK: jax.Array) -> tuple[_Inputs]:
    """The gradients of `_Inputs`, None for those that have none."""
    inputs, out_NBHQK, lse_NBHQ = saved
    bias_CH = inputs.bias_CH
    sinks_H = inputs.sinks_H
    dtype = inputs.q_NBHQK.dtype
    products_NBHQK = out_grads_NBHQK.astype(jnp.float32) * out_NBHQK.astype(jnp.float32)
    mean_NBHQ = products_NBHQK.sum(-1)
    t_NQ = blocks.numbers(blocks.queries)

    def add_pairs(staying: Carry, traveling: Carry, pairs: Any, s_NR: jax.Array) -> tuple[Carry, Carry]:
        k_NBGRK, v_NBGRK, *kv_grads_NBGKR = traveling
        present = inputs._replace(k_NBGRK=k_NBGRK, v_NBGRK=v_NBGRK)

        def add_pair(carry: Carry, pair_2: jax.Array) -> tuple[Carry, None]:
            i, j = pair_2
            pair = present.pair(blocks, i, j, t_NQ, s_NR)
            q_grads_NBHQK, k_grads_NBGKR, v_grads_NBGKR, bias_grads_CH = carry
            add = partial(pair.add_to_gradients, out_grads_NBHQK[i], lse_NBHQ[i], mean_NBHQ[i])
            grads = (q_grads_NBHQK[i], k_grads_NBGKR[j], v_grads_NBGKR[j], bias_grads_CH)
            grads = blocks.where_near(pair.t_Q, pair.s_R, add, grads)
            q_grads_BHQK, k_grads_BGKR, v_grads_BGKR, bias_grads_CH = grads
            return (
                q_grads_NBHQK.at[i].set(q_grads_BHQK),
                k_grads_NBGKR.at[j].set(k_grads_BGKR),
                v_grads_NBGKR.at[j].set(v_grads_BGKR),
                bias_grads_CH,
            ), None

        q_grads_NBHQK, bias_grads_CH = staying
        carry = (q_grads_NBHQK, *kv_grads_NBGKR, bias_grads_CH)
        (q_grads_NBHQK, *kv_grads_NBGKR, bias_grads_CH), _ = lax.scan(add_pair, carry, pairs)
        return (q_grads_NBHQK, bias_grads_CH), (k_NBGRK, v_NBGRK, *kv_grads_NBGKR)

    zeros_NBGKR = jnp.zeros(inputs.k_NBGRK.swapaxes(3, 4).shape, jnp.float32)
    bias_zeros_CH = None if bias_CH is None else jnp.zeros(bias_CH.shape, jnp.float32)
    staying = (jnp.zeros(inputs.q_NBHQK.shape, jnp.float32), bias_zeros_CH)
    traveling = (inputs.k_NBGRK, inputs.v_NBGRK, zeros_NBGKR, zeros_NBGKR)
    pairs = (jnp.asarray(blocks.pairs()), *blocks.later_pairs())
    (q_grads_NBHQK, bias_grads_CH), traveled = around_the_ring(blocks, pairs, add_pairs, staying, traveling)
    kv_grads_NBGKR = traveled[2:]
    if blocks.form.row_group.ring > 1:  # once more, back to the device of the keys
        kv_grads_NBGKR = blocks.form.row_group.ring_shift(kv_grads_NBGKR)
    k_grads_NBGRK, v_grads_NBGRK = (x.swapaxes(3, 4).astype(dtype) for x in kv_grads_NBGKR)
    if bias_CH is not None:
        bias_grads_CH = bias_grads_CH.astype(bias_CH.dtype)
    sinks_grads_H = None
    if sinks_H is not None:  # the value at a sink is 0
        probabilities_NBHQ = jnp.exp(sinks_H.astype(jnp.float32)[None, None, :, None] - lse_NBHQ)
        sinks_grads_H = -(probabilities_NBHQ * mean_NBHQ).sum((0, 1, 3)).astype(sinks_H.dtype)
    grads: Any = (
        q_grads_NBHQK.astype(dtype),
        k_grads_NBGRK,
        v_grads_NBGRK,
        bias_grads_CH,
        sinks_grads_H,
        None,
        None,
        None,
    )
    return (_Inputs(*grads),)


_attend.defvjp(_forward, _backward)
