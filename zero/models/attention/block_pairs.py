"""Rows in blocks of positions, and the pairs of blocks in attention, on one device or around a ring.

Shapes are named by suffix:
  B rows, T query positions, H heads of queries, G heads of keys, each for H / G of queries,
  K head dimension, C buckets of distance, X queries of all heads that share keys,
  N blocks of positions, Q query positions of a block, R key positions of a block
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from zero.models.attention.dense import by_key_head
from zero.models.attention.scores import Form, biased_and_masked, divided_and_capped

BEHIND_ALL = 2**30  # the position number of padding
Carry = tuple[Any, ...]


class Blocks(NamedTuple):
    """The static description of an attention."""

    form: Form
    queries: int
    keys: int
    block: int

    def of(self, x_BTHK: jax.Array) -> jax.Array:
        """`(N, B, H, Q, K)`; the last block of each piece is padded with zeros."""
        pieces = self.form.row_group.pieces
        rows, positions, heads, width = x_BTHK.shape
        x_BPTHK = x_BTHK.reshape(rows, pieces, positions // pieces, heads, width)
        x_BPTHK = jnp.pad(x_BPTHK, ((0, 0), (0, 0), (0, -x_BPTHK.shape[2] % self.block), (0, 0), (0, 0)))
        return x_BPTHK.reshape(rows, -1, self.block, heads, width).transpose(1, 0, 3, 2, 4)

    def joined(self, x_NBHQK: jax.Array, positions: int) -> jax.Array:
        """`(B, T, H, K)`, without padding."""
        pieces = self.form.row_group.pieces
        _, rows, heads, _, width = x_NBHQK.shape
        x_BPTHK = x_NBHQK.transpose(1, 0, 3, 2, 4).reshape(rows, pieces, -1, heads, width)
        return x_BPTHK[:, :, : positions // pieces].reshape(rows, positions, heads, width)

    def numbers(self, count: int, turn: jax.Array | int = 0) -> jax.Array:
        """Position numbers of each block, `(N, Q)`; padding comes after all of them, so that no query sees it."""
        number_PT = self.form.row_group.numbers(count, turn)
        padding = ((0, 0), (0, -number_PT.shape[1] % self.block))
        return jnp.pad(number_PT, padding, constant_values=BEHIND_ALL).reshape(-1, self.block)

    def pairs(self) -> np.ndarray:
        """Pairs of a query block and a block of this device's keys that it attends to, row by row, `(pairs, 2)`."""
        pieces = self.form.row_group.pieces
        rows, columns = (pieces * -(-count // pieces // self.block) for count in (self.queries, self.keys))
        is_needed = np.ones((rows, columns), bool)
        if self.queries == self.keys:  # else the position may be traced, and only the mask decides
            is_needed = np.tril(is_needed)
            if self.form.window and pieces == 1:  # between pieces there may be any distance
                first_key = np.arange(rows) * self.block - self.form.window + 1  # that a block's first query sees
                is_needed &= np.arange(columns) >= first_key[:, None] // self.block
        return np.argwhere(is_needed).astype(np.int32)

    def later_pairs(self) -> tuple[np.ndarray, ...]:
        """The pairs of later turns: for keys of a device with an earlier first piece, and of any other device.

        In the first case all queries attend only to the early piece of those keys, in the second only the late queries
        attend, to all keys. Both are half of the pairs.
        """
        if self.form.row_group.ring == 1:
            return ()
        half = -(-self.queries // 2 // self.block)
        early = np.argwhere(np.ones((2 * half, half), bool))
        late = np.argwhere(np.ones((half, 2 * half), bool)) + [half, 0]
        return early.astype(np.int32), late.astype(np.int32)

    def where_near(self, t_Q: jax.Array, s_R: jax.Array, add: Callable[[Carry], Carry], carry: Carry) -> Carry:
        """`add(carry)`, or the carry if a block of keys lies outside the windows of a block of queries.

        For rows that are not cut, `pairs` excludes such blocks.
        """
        if not self.form.window or self.form.row_group.ring == 1:
            return add(carry)
        is_near = s_R[0] + self.block > t_Q[0] - self.form.window + 1
        return lax.cond(is_near, add, lambda carry: carry, carry)


def block_scores(
    blocks: Blocks,
    q_BHQK: jax.Array,
    k_BGRK: jax.Array,
    bias_CH: jax.Array | None,
    t_Q: jax.Array,
    s_R: jax.Array,
    starts_BQ: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Masked scores of a pair of blocks, float32 `(B, H, Q, R)`, and the derivative of the cap, if there is one."""
    q_BGXK = by_key_head(q_BHQK, k_BGRK.shape[1])
    scores_BGXR = jnp.einsum("BGXK,BGRK->BGXR", q_BGXK, k_BGRK, preferred_element_type=jnp.float32)
    scores_BHQR = scores_BGXR.reshape(*q_BHQK.shape[:3], -1)
    scores_BHQR, slope_BHQR = divided_and_capped(scores_BHQR, blocks.form, q_BHQK.shape[-1])
    masked_BHQR = biased_and_masked(scores_BHQR, t_Q[:, None], s_R[None], blocks.form, bias_CH, starts_BQ)
    return masked_BHQR, slope_BHQR


def dropped_block(
    blocks: Blocks, x_BHQR: jax.Array, key_data_B2: jax.Array | None, t_Q: jax.Array, s_R: jax.Array
) -> jax.Array:
    """The block that `dropout` of the whole `(B, H, T, S)` would give; `t_Q` counts from the first query.

    The random bits of entry n of an array are threefry of n, 64 bits in two words, so they can be drawn by block.
    """
    if key_data_B2 is None:
        return x_BHQR
    row_group = blocks.form.row_group
    heads = x_BHQR.shape[1]
    head_H = row_group.part(jnp.arange(heads * row_group.size, dtype=jnp.uint32), 0)
    row_HQ = head_H[:, None] * (blocks.queries * row_group.ring) + t_Q[None].astype(jnp.uint32)
    high_HQ1, row_low_HQ1 = (word[..., None] for word in _product_words(row_HQ, blocks.keys * row_group.ring))
    low_HQR = row_low_HQ1 + s_R[None, None].astype(jnp.uint32)
    high_HQR = high_HQ1 + (low_HQR < row_low_HQ1)

    def is_kept(key_data_2: jax.Array) -> jax.Array:
        first, second = threefry2x32_p.bind(key_data_2[0], key_data_2[1], high_HQR, low_HQR)
        # A float32 in [0, 1) from the 23 upper bits, as in jax.random.uniform.
        return ((first ^ second) >> 9).astype(jnp.float32) * jnp.float32(2**-23) < 1 - blocks.form.dropout_rate

    return jnp.where(jax.vmap(is_kept)(key_data_B2), x_BHQR / (1 - blocks.form.dropout_rate), 0)


def _product_words(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32 bits of `x * factor`; all of them uint32.

    >>> [int(word) for word in _product_words(jnp.uint32(2**32 - 1), 2**32 - 1)] == [2**32 - 2, 1]
    True
    """
    x_high = x >> 16
    x_low = x & 0xFFFF
    high = jnp.uint32(factor >> 16)
    low = jnp.uint32(factor & 0xFFFF)
    middle = x_high * low + (x_low * low >> 16)
    other_middle = x_low * high + (middle & 0xFFFF)
    return x_high * high + (middle >> 16) + (other_middle >> 16), x * jnp.uint32(factor)


def around_the_ring(
    blocks: Blocks,
    pairs: tuple[Any, ...],
    add_pairs: Callable[[Carry, Carry, Any, jax.Array], tuple[Carry, Carry]],
    staying: Carry,
    traveling: Carry,
) -> tuple[Carry, Carry]:
    """Calls `add_pairs(staying, traveling, pairs, key numbers)` in each turn of the ring, own keys first.

    Args:
      blocks: the attention.
      pairs: of the first turn, and of later turns.
      add_pairs: processes the keys and values on this device.
      staying: arrays of the queries, which stay on the device.
      traveling: arrays of the keys, which move around the ring.
    """
    first, *later = pairs
    first_query = blocks.numbers(blocks.queries)[0, 0]
    carry = add_pairs(staying, traveling, first, blocks.numbers(blocks.keys))
    if not later:
        return carry

    def one_turn(carry: tuple[Carry, Carry], turn: jax.Array) -> tuple[tuple[Carry, Carry], None]:
        staying = carry[0]
        traveling = blocks.form.row_group.ring_shift(carry[1])
        s_NR = blocks.numbers(blocks.keys, turn)
        return add_pairs(staying, traveling, jnp.where(s_NR[0, 0] < first_query, *later), s_NR), None

    return lax.scan(one_turn, carry, jnp.arange(1, blocks.form.row_group.ring))[0]
