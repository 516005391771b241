"""Causal attention with the whole matrix of scores.

Shapes are named by suffix:
  B rows, T query positions, S key positions, H heads of queries, G heads of keys, each for H / G of queries,
  K head dimension, C buckets of distance, X queries of all heads that share keys
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zero.models.attention.scores import NO_TERMS, PLAIN, Form, Terms, biased_and_masked, divided_and_capped
from zero.models.elements import dropout
from zero.models.stack import ATTENTION_OUTPUT

# Queries of a block by platform, measured in docs/decisions/cpu-speed.md; elsewhere all queries are one.
QUERY_BLOCK = {"cpu": 64}


def query_block(choice: str, platform: str) -> int | None:
    """The number of queries that are multiplied at a time with the keys up to theirs; None for all with all keys.

    Args:
      choice: `model.attention`; "kernel" falls back to "auto" where the kernel is unsupported.
      platform: "cpu", "tpu", "gpu", ...

    >>> query_block("auto", "cpu"), query_block("dense", "cpu"), query_block("auto", "tpu")
    (64, None, None)
    """
    if choice not in ("auto", "kernel"):
        return None
    return QUERY_BLOCK.get(platform)


def dense_attention(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    position: jax.Array | int = 0,
    *,
    form: Form = PLAIN,
    terms: Terms = NO_TERMS,
) -> jax.Array:
    """Causal attention `(B, T, H, K)` with softmax in float32; it holds float32 `(B, H, T, S)`.

    Args:
      q_BTHK: queries; query t is at position `position + t`.
      k_BSGK: keys, at positions 0, 1, 2, ...
      v_BSGK: values, which may have a width of their own.
      position: position of the first query.
      form: the form of the scores.
      terms: what else acts on the scores.
    """
    shape_BHTS = (*q_BTHK.swapaxes(1, 2).shape[:3], k_BSGK.shape[1])
    q_BGXK = by_key_head(q_BTHK.swapaxes(1, 2), k_BSGK.shape[2])
    scores_BGXS = jnp.einsum("BGXK,BSGK->BGXS", q_BGXK, k_BSGK, preferred_element_type=jnp.float32)
    t_T1 = position + jnp.arange(q_BTHK.shape[1])[:, None]
    s_1S = jnp.arange(k_BSGK.shape[1])[None, :]
    scores_BHTS, _ = divided_and_capped(scores_BGXS.reshape(shape_BHTS), form, q_BTHK.shape[-1])
    scores_BHTS = biased_and_masked(scores_BHTS, t_T1, s_1S, form, terms.bias_CH, terms.starts_BT)
    if form.has_extra_logit:
        sinks_H = jnp.zeros(1) if terms.sinks_H is None else terms.sinks_H.astype(jnp.float32)
        sinks_1H11 = sinks_H[None, :, None, None]
        most_BHT1 = lax.stop_gradient(jnp.maximum(scores_BHTS.max(-1, keepdims=True), sinks_1H11))
        weights_BHTS = jnp.exp(scores_BHTS - most_BHT1)
        probabilities_BHTS = weights_BHTS / (weights_BHTS.sum(-1, keepdims=True) + jnp.exp(sinks_1H11 - most_BHT1))
    else:
        probabilities_BHTS = jax.nn.softmax(scores_BHTS)
    dropped_BHTS = dropout(probabilities_BHTS, form.dropout_rate, terms.keys_B, form.row_group.of_heads)
    dropped_BGXS = dropped_BHTS.astype(q_BTHK.dtype).reshape(scores_BGXS.shape)
    attended_BGXK = jnp.einsum("BGXS,BSGK->BGXK", dropped_BGXS, v_BSGK)
    attended_BGXK = checkpoint_name(attended_BGXK, ATTENTION_OUTPUT)
    return attended_BGXK.reshape(*shape_BHTS[:3], v_BSGK.shape[-1]).swapaxes(1, 2)


def attention_by_queries(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    block: int,
    *,
    form: Form = PLAIN,
    terms: Terms = NO_TERMS,
) -> jax.Array:
    """`dense_attention` of whole rows, a block of queries at a time: keys after its last query are not multiplied.

    Blocks are unrolled, and the scores of all of them exist at once. A mask of dropout is one of the whole matrix, so
    there is no dropout.

    Args:
      q_BTHK: queries, as many as keys.
      block: queries of a block; T need not divide by it.
      others: as for `dense_attention`.

    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 2, 4))
    >>> form = Form(has_alibi=True, window=3)
    >>> by_queries = attention_by_queries(q, k[:, :, :1], v[:, :, :1], 4, form=form)
    >>> bool(jnp.allclose(by_queries, dense_attention(q, k[:, :, :1], v[:, :, :1], form=form), atol=1e-6))
    True
    """
    attended = []
    for first in range(0, q_BTHK.shape[1], block):
        last = first + block
        first_key = max(0, first - form.window + 1) if form.window else 0
        keys = slice(first_key, last)
        own_terms = terms
        if terms.starts_BT is not None:
            own_terms = terms._replace(starts_BT=terms.starts_BT[:, first:last] - first_key)
        own_queries = q_BTHK[:, first:last]
        position = first - first_key
        attended.append(
            dense_attention(own_queries, k_BTGK[:, keys], v_BTGK[:, keys], position, form=form, terms=own_terms)
        )
    return jnp.concatenate(attended, axis=1)


def by_key_head(x_BHTK: jax.Array, key_heads: int) -> jax.Array:
    """`(B, G, X, K)`: the queries of all heads that share keys and values, head by head."""
    return x_BHTK.reshape(x_BHTK.shape[0], key_heads, -1, x_BHTK.shape[-1])
