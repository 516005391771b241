"""Softmax attention of a transformer layer, computed by the kernel or loop that suits the device and the length.

Shapes are named by suffix:
  B rows, T query positions, S key positions, D embedding, H heads of queries, G heads of keys,
  K head dimension, L layers, C buckets of distance
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zero.models.attention.blockwise import blockwise_attention
from zero.models.attention.dense import attention_by_queries, dense_attention
from zero.models.attention.kernel import kernel_attention, missing_in, splits_heads
from zero.models.attention.scores import Form, Terms
from zero.models.attention_keys import Attention, attention_form
from zero.models.axes import EMBED, HEADS, KV_HEADS, PER_HEAD, Axes, Role, named
from zero.models.mixer import LayerContext, Mixer
from zero.models.norms import make_head_norm
from zero.models.part import Sizes
from zero.models.positions.kind import Place
from zero.models.stack import ATTENTION_OUTPUT, ATTENTION_SUMS, PROJECTIONS
from zero.partition.model_parallel import ModelParallel


class Cache(NamedTuple):
    """Keys and values of the positions so far, one entry per layer: float `(L, B, S, G, K)`."""

    k_LBSGK: jax.Array
    v_LBSGK: jax.Array


def empty_cache(
    config: Sizes,
    layers: int,
    rows: int,
    positions: int,
    dtype: DTypeLike,
    row_group: ModelParallel,
    known: jax.Array | int,
) -> Cache:
    """The cache before the first position, of this device's heads."""
    k = jnp.zeros((layers, rows, positions, config.key_heads // row_group.size, config.head_width), dtype)
    return Cache(k, k)


def stored_floats_of_heads(config: Attention) -> dict[str, int]:
    """Numbers per position: values; a float32 sum per head, which counts as two; projections with the output."""
    heads = config.num_head * config.head_width
    projections = heads + 2 * config.key_heads * config.head_width + config.embedding_dim
    return {ATTENTION_OUTPUT: heads, ATTENTION_SUMS: 2 * config.num_head, PROJECTIONS: projections}


def transient_floats_of_heads(config: Attention) -> int:
    """Numbers per position of queries, keys, values and the output, if heads are wider than the model together."""
    return 4 * max(0, config.num_head * config.head_width - config.embedding_dim)


_BLOCK = 512  # positions of the blocks of scores that kernels compute as a whole, those on the diagonal as well


def flops_of_heads(config: Attention, context: int) -> float:
    """Operations of the scores of a row, and of its values."""
    scores = sum(_scores(context, window) for window in config.windows) / len(config.windows)
    return 4 * config.num_head * config.head_width * scores


def _scores(context: int, window: int) -> int:
    """Scores that a kernel computes per row and head, in whole blocks; a window of 0 is all positions before.

    >>> _scores(1024, 0) / 1024**2, _scores(2048, 512) / 2048**2
    (0.75, 0.4375)
    """
    blocks = -(-context // _BLOCK)
    widest = blocks if window == 0 else -(-window // _BLOCK) + 1
    return _BLOCK**2 * sum(min(number + 1, widest) for number in range(blocks))


def heads_of_attention(config: Sizes) -> dict[str, int]:
    """The heads that a tensor group divides."""
    return {"num_head": config.num_head, "kv_heads": config.key_heads}


def projection_weights_of_heads(config: Attention) -> int:
    """Weights of the products that make queries, keys, values and the output."""
    return 2 * config.embedding_dim * config.head_width * (config.num_head + config.key_heads)


class Sinks(nn.Module):
    """A learned logit for each head, in addition to the keys'."""

    heads: int

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("logits", named(nn.initializers.normal(0.02), PER_HEAD), (self.heads,))


def with_equal_widths(
    attend: Callable[..., jax.Array], q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array
) -> jax.Array:
    """Attention by a function whose values are as wide as its keys, of values that may be narrower."""
    narrower = k_BSGK.shape[-1] - v_BSGK.shape[-1]
    if not narrower:
        return attend(q_BTHK, k_BSGK, v_BSGK)
    padded_BSGK = jnp.pad(v_BSGK, [(0, 0)] * 3 + [(0, narrower)])
    return attend(q_BTHK, k_BSGK, padded_BSGK)[..., : v_BSGK.shape[-1]]


class ScoredAttention(Mixer):
    """Each position sees the earlier ones of its window, by a softmax of scores; derived classes make these."""

    def _form(self, window: int, row_group: ModelParallel) -> Form:
        """The form of the scores of a layer with this window."""
        return attention_form(self.config, window, row_group)

    def _scored(
        self,
        q_BTHK: jax.Array,
        k_BSGK: jax.Array,
        v_BSGK: jax.Array,
        site: LayerContext,
        bias_CH: jax.Array | None = None,
        sinks_H: jax.Array | None = None,
    ) -> jax.Array:
        """The values that queries see, `(B, T, H, K)`, by the window of this layer; V if values have another width."""
        config = self.config
        starts_BT = site.starts_BT
        row_group = self.row_group
        swap = self.row_group.head_swap(config.num_head, config.key_heads)
        if swap is not None:
            row_group = swap.row_group
            bias_CH = None if bias_CH is None else swap.row_group.part(bias_CH, 1)
            sinks_H = None if sinks_H is None else swap.row_group.part(sinks_H, 0)
            q_BTHK, k_BSGK, v_BSGK = (swap.to_heads(x) for x in (q_BTHK, k_BSGK, v_BSGK))
            starts_BT = None if starts_BT is None else swap.whole_rows(starts_BT)
        terms = Terms(bias_CH, sinks_H, site.keys_B, starts_BT)
        attended_BTHK = self._by_window(row_group, site.layer, q_BTHK, k_BSGK, v_BSGK, site.position, terms)
        if swap is None:
            return attended_BTHK
        return swap.to_positions(attended_BTHK)

    def _by_window(self, row_group: ModelParallel, layer: jax.Array | int, *arguments: Any) -> jax.Array:
        """`_attend` with the window of this layer."""
        windows = self.config.window_pattern if self.window is None else (self.window,)
        if len(windows) == 1:
            return self._attend(row_group, windows[0], *arguments)
        # Without the checkpoint `lax.switch` would store the residuals of every branch.
        branches = [jax.checkpoint(partial(self._attend, row_group, window)) for window in windows]
        return lax.switch(layer % len(windows), branches, *arguments)

    def _attend(
        self,
        row_group: ModelParallel,
        window: int,
        q_BTHK: jax.Array,
        k_BSGK: jax.Array,
        v_BSGK: jax.Array,
        position: jax.Array | int,
        terms: Terms,
    ) -> jax.Array:
        queries = q_BTHK.shape[1]
        if window and queries == 1 and window < k_BSGK.shape[1]:  # in decoding: reads only the window of the cache
            first = jnp.clip(position - window + 1, 0, k_BSGK.shape[1] - window)
            k_BSGK, v_BSGK = (lax.dynamic_slice_in_dim(x, first, window, axis=1) for x in (k_BSGK, v_BSGK))
            position = position - first
        form = self._form(window, row_group)
        is_whole = queries == k_BSGK.shape[1] > 1  # with a cache there are more keys than queries
        drops = terms.keys_B is not None and form.dropout_rate > 0
        if self.kernel is not None and is_whole:
            missing = missing_in(
                self.kernel,
                form,
                positions=queries,
                width=q_BTHK.shape[3],
                drops=drops,
                has_bias=terms.bias_CH is not None,
                has_segments=terms.starts_BT is not None,
            )
            if missing is None:
                kernel = partial(kernel_attention, self.kernel, form=form, starts_BT=terms.starts_BT)
                return with_equal_widths(kernel, q_BTHK, k_BSGK, v_BSGK)
        if row_group.ring > 1 or self._is_blockwise(queries, window):
            blockwise = partial(blockwise_attention, position=position, form=form, terms=terms)
            return with_equal_widths(blockwise, q_BTHK, k_BSGK, v_BSGK)
        block = self.query_block
        if block is not None and is_whole and queries >= 2 * block and not drops:
            return attention_by_queries(q_BTHK, k_BSGK, v_BSGK, block, form=form, terms=terms)
        return dense_attention(q_BTHK, k_BSGK, v_BSGK, position, form=form, terms=terms)

    def _is_blockwise(self, queries: int, window: int) -> bool:
        """Whether rows are long enough for blocks; those outside a window are skipped, so it pays off earlier there."""
        if self.blockwise_from is None:
            return False
        earliest = self.blockwise_from
        if window:
            earliest = min(earliest, max(2, 2 * window))
        return queries >= earliest


class SelfAttention(ScoredAttention):
    """Attention by queries, keys and values that are products of their own."""

    @nn.compact
    def __call__(self, h_BTD: jax.Array, cache: Cache | None, site: LayerContext) -> tuple[jax.Array, Cache | None]:
        """As `Mixer` says."""
        config = self.config
        layer, entry, position, starts_BT, _, adapter_keys_B = site

        form = self._form(config.widest_window, self.row_group)
        positions = h_BTD.shape[1] * self.row_group.ring  # of a whole row
        are_split = splits_heads(self.kernel, form, positions=positions, width=config.head_width)

        def heads(name: str, count: int, axis: str = KV_HEADS, role: Role | None = None) -> jax.Array:
            shape = (count // self.row_group.size, config.head_width)
            features = shape if are_split else (math.prod(shape),)
            x_BTX = self.dense(h_BTD, features, name, Axes((EMBED, axis), role), adapter_keys_B, config.qkv_bias)
            return x_BTX.reshape(*x_BTX.shape[:2], *shape)

        q_BTHK = heads("query", config.num_head, HEADS, Role.QUERY)
        k_BSGK = heads("key", config.key_heads)
        v_BSGK = heads("value", config.key_heads)
        if config.qk_norm:
            q_BTHK = make_head_norm(config, self.dtype, "query_norm", self.row_group)(q_BTHK)
            k_BSGK = make_head_norm(config, self.dtype, "key_norm", self.row_group)(k_BSGK)
        kind = config.kind_of_positions
        if kind.turned is not None:
            row = positions if cache is None else cache.k_LBSGK.shape[2]
            numbers = self.row_group.attended_numbers(position, h_BTD.shape[1])
            place = Place(layer, numbers, row, starts_BT, None if are_split else self.kernel)
            q_BTHK, k_BSGK = kind.turned(config, q_BTHK, k_BSGK, place)
        q_BTHK, k_BSGK, v_BSGK = (checkpoint_name(x, PROJECTIONS) for x in (q_BTHK, k_BSGK, v_BSGK))
        bias_CH = None if kind.bias is None else kind.bias(config, self, self.row_group)
        sinks_H = None
        if config.extra_logit == "learned":
            sinks_H = self.row_group.part(Sinks(config.num_head, name="sinks")(), 0)
        if cache is not None:
            # The whole cache is carried from layer to layer, so that only the new positions are written.
            start = (entry, 0, position, 0, 0)
            k_LBSGK = lax.dynamic_update_slice(cache.k_LBSGK, k_BSGK[None], start)
            v_LBSGK = lax.dynamic_update_slice(cache.v_LBSGK, v_BSGK[None], start)
            cache = Cache(k_LBSGK, v_LBSGK)
            k_BSGK, v_BSGK = (lax.dynamic_index_in_dim(c, entry, keepdims=False) for c in cache)
        attended_BTHK = self._scored(q_BTHK, k_BSGK, v_BSGK, site, bias_CH, sinks_H)
        attended_BTX = attended_BTHK if are_split else lax.collapse(attended_BTHK, 2)
        if config.attention_gate:
            axes = Axes((EMBED, HEADS))
            features = attended_BTX.shape[2:]
            gate_BTX = self.dense(h_BTD, features, "attention_gate", axes, adapter_keys_B, config.qkv_bias)
            attended_BTX = attended_BTX * jax.nn.sigmoid(gate_BTX)
        out_BTD = self.residual_dense(attended_BTX, "attention_out", HEADS, adapter_keys_B, config.out_bias)
        return checkpoint_name(out_BTD, PROJECTIONS), cache
