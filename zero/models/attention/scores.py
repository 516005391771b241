"""Scores of causal attention from products of queries and keys: scale, cap, biases, masks.

Shapes are named by suffix: B rows, T query positions, S key positions, H heads, C buckets of distance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zero.partition.model_parallel import WHOLE, ModelParallel

LOWEST = float(np.finfo(np.float32).min)
# Buckets of distance of T5's relative bias: one for each distance below 16, logarithmic up to 128, one for all beyond.
T5_BUCKETS, T5_DISTANCE = 32, 128


class Form(NamedTuple):
    """The form of attention scores.

    Attributes:
      has_alibi: whether scores fall linearly with distance (ALiBi, arXiv 2108.12409).
      window: number of positions that a query sees, itself included; 0 for all before it.
      divisor: divisor of the products of queries and keys; None for the root of the head dimension.
      cap: products p become `cap tanh(p / cap)`, before biases; None for none.
      has_extra_logit: whether each softmax has a further logit of 0, whose value is 0.
      dropout_rate: dropout rate of probabilities.
      row_group: the group, and so which heads these are.
    """

    has_alibi: bool = False
    window: int = 0
    divisor: float | None = None
    cap: float | None = None
    has_extra_logit: bool = False
    dropout_rate: float = 0.0
    row_group: ModelParallel = WHOLE

    def divisor_of(self, width: int) -> float:
        """The divisor for heads of this width."""
        if self.divisor is not None:
            return self.divisor
        return math.sqrt(width)


PLAIN = Form()


class Terms(NamedTuple):
    """The terms of a layer's scores besides its queries and keys; None for an absent one.

    Attributes:
      bias_CH: added to the scores by bucket of distance, as in T5.
      sinks_H: the further logit of each head, if the form has one; None for 0.
      keys_B: one random key per row, for dropout.
      starts_BT: the first key that each query sees, int32: the start of its segment; None for key 0.
    """

    bias_CH: jax.Array | None = None
    sinks_H: jax.Array | None = None
    keys_B: jax.Array | None = None
    starts_BT: jax.Array | None = None


NO_TERMS = Terms()


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


def alibi_columns(num_head: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns for queries `(H, C)` and keys `(T, C)` whose products are ALiBi's biases plus a constant per query.

    A bias is `m (s - t)`. The softmax does not see `-m t`, which is the same for all keys, so `m s` remains, a product
    of queries and keys. Slopes m and positions s are sums of numbers that bfloat16 holds exactly: products in bfloat16
    with sums in float32 match float32. Up to 65,536 positions.

    >>> query_columns, key_columns = alibi_columns(12, 2048)
    >>> bool(np.allclose(query_columns @ key_columns.T, np.outer(alibi_slopes(12), np.arange(2048)), rtol=1e-6))
    True
    """
    places = np.arange(positions, dtype=np.float32)
    rest = alibi_slopes(num_head)
    parts = []
    while rest.any():
        parts.append(rest.astype(jnp.bfloat16).astype(np.float32))
        rest = rest - parts[-1]
    key_columns = np.stack([places - places % 256, places % 256], 1)
    return np.repeat(np.stack(parts, 1), 2, axis=1), np.tile(key_columns, (1, len(parts)))


def t5_buckets(distance: jax.Array) -> jax.Array:
    """The bucket of each distance, int32; keys after the query count as distance 0.

    Source: Raffel et al., arXiv 1910.10683, section 2.1, for causal attention.

    >>> t5_buckets(jnp.asarray([-1, 0, 15, 16, 127, 1000])).tolist()
    [0, 0, 15, 16, 31, 31]
    """
    exact = T5_BUCKETS // 2
    log_steps = (T5_BUCKETS - exact) / math.log(T5_DISTANCE / exact)
    # The first distance of each logarithmic bucket: comparisons are exact, a logarithm on the device is not.
    starts = [math.ceil(exact * math.exp(step / log_steps)) for step in range(1, T5_BUCKETS - exact)]
    later = sum((distance >= start).astype(jnp.int32) for start in starts)
    return jnp.where(distance < exact, jnp.maximum(distance, 0), exact + later).astype(jnp.int32)


def divided_and_capped(scores_BHTS: jax.Array, form: Form, width: int) -> tuple[jax.Array, jax.Array | None]:
    """Scores from products, and the derivative of the cap, if there is one."""
    scores_BHTS = scores_BHTS / form.divisor_of(width)
    if form.cap is None:
        return scores_BHTS, None
    tanh_BHTS = jnp.tanh(scores_BHTS / form.cap)
    return form.cap * tanh_BHTS, 1 - tanh_BHTS**2


def biased_and_masked(
    scores_BHTS: jax.Array,
    t_T1: jax.Array,
    s_1S: jax.Array,
    form: Form,
    bias_CH: jax.Array | None,
    starts_BT: jax.Array | None,
) -> jax.Array:
    """Scores of queries and keys at these positions with their biases; the lowest number where a key is not seen.

    `bias_CH` is by bucket of distance, `starts_BT` the first key that each query sees; None for no bias and for key 0.
    """
    if form.has_alibi:
        slopes_H = form.row_group.part(jnp.asarray(alibi_slopes(scores_BHTS.shape[1] * form.row_group.size)), 0)
        distance_11TS = (s_1S - t_T1)[None, None].astype(jnp.float32)
        scores_BHTS = scores_BHTS + slopes_H[None, :, None, None] * distance_11TS
    if bias_CH is not None:
        scores_BHTS = scores_BHTS + relative_bias(bias_CH, t_T1, s_1S)[None]
    is_seen_TS = s_1S <= t_T1
    if form.window:
        is_seen_TS = is_seen_TS & (s_1S > t_T1 - form.window)
    is_seen_BHTS = is_seen_TS[None, None]
    if starts_BT is not None:
        is_seen_BHTS = is_seen_BHTS & (s_1S[None, None] >= starts_BT[:, None, :, None])
    return jnp.where(is_seen_BHTS, scores_BHTS, LOWEST)


def relative_bias(bias_CH: jax.Array, t_T1: jax.Array, s_1S: jax.Array) -> jax.Array:
    """`(H, T, S)`, float32, by a product: the gradient of a look-up would be a scatter of T x S rows."""
    is_bucket_CTS = t5_buckets(t_T1 - s_1S)[None] == jnp.arange(T5_BUCKETS)[:, None, None]
    return jnp.einsum("CH,CTS->HTS", bias_CH.astype(jnp.float32), is_bucket_CTS.astype(jnp.float32))
