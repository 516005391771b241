"""A transformer layer: attention, then an MLP or experts, on the residual stream.

Shapes are named by suffix:
  B rows, T query positions, S key positions, D embedding, H heads of queries, G heads of keys,
  K head dimension, L layers, F width of the MLP, C buckets of distance
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zero.models.adapters import AdaptedDense
from zero.models.attention.blockwise import blockwise_attention
from zero.models.attention.dense import attention_by_queries, dense_attention
from zero.models.attention.kernel import kernel_attention, missing_in, splits_heads
from zero.models.attention.scores import Terms
from zero.models.attention.tpu_kernels import TPU_KERNELS
from zero.models.attention_keys import Attention, attention_form
from zero.models.elements import Dense, Residual, dropout, fold_keys, row_major
from zero.models.experts import Experts, Mixture, ResidualStream, Routing
from zero.models.layer import Layer
from zero.models.mlp import hidden_values
from zero.models.norms import Norms, make_head_norm, make_norm
from zero.models.parametrization import kernel_init
from zero.models.part import Sizes
from zero.models.positions.kind import Place
from zero.models.stack import MLP_GATE, MLP_IN, PROJECTIONS
from zero.partition.model_parallel import WHOLE, ModelParallel


class Cache(NamedTuple):
    """Keys and values of the positions so far, one entry per layer: float `(L, B, S, G, K)`."""

    k_LBSGK: jax.Array
    v_LBSGK: jax.Array


def empty_cache(config: Sizes, rows: int, positions: int, dtype: DTypeLike, cut: ModelParallel = WHOLE) -> Cache:
    """The cache before the first position, of this device's heads."""
    k = jnp.zeros((config.N, rows, positions, config.key_heads // cut.size, config.head_width), dtype)
    return Cache(k, k)


@dataclass(frozen=True)
class Transformer(Attention, Norms, Residual, Mixture):
    """The keys of a transformer layer: those of its parts."""


class Sinks(nn.Module):
    """A learned logit for each head, beside those of the keys."""

    heads: int

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("logits", nn.initializers.normal(0.02), (self.heads,))


class TransformerLayer(Layer):
    """Attention and MLP, each normalized and added to the residual stream.

    Attributes:
      is_dense: the layer has an MLP in a model with experts.
    """

    config: Transformer
    is_dense: bool = False

    @nn.compact
    def __call__(
        self,
        carry: tuple[ResidualStream, Cache | None],
        layer: jax.Array,
        keys_B: jax.Array | None,
        position: jax.Array | int,
        starts_BT: jax.Array | None = None,
    ) -> tuple[tuple[ResidualStream, Cache | None], None]:
        """`starts_BT` is the column where the segment of each position starts; None for one segment per row."""
        config = self.config
        (x_BTD, routing), cache = carry
        x_BTD = self._laid_out(x_BTD)
        entry = layer // config.experts_every
        layer = layer + self.first
        keys_B = fold_keys(keys_B, layer)
        site_keys = [fold_keys(keys_B, i) for i in range(4)]

        h_BTD = self.cut.gather_positions(self._norm("norm_attention", x_BTD))
        attended_BTD, cache = self._attention(h_BTD, cache, layer, position, starts_BT, site_keys[0], site_keys[3])
        attended_BTD = self._norm("norm_attention", attended_BTD, is_after=True) * config.residual_multiplier
        sum_BTD = x_BTD + dropout(attended_BTD, config.residual_drop_rate, site_keys[1], self.cut.of_positions)
        h_BTD = self._norm("norm_mlp", x_BTD if config.parallel_residual else sum_BTD)
        h_BTD = self.cut.gather_positions(h_BTD)
        if config.experts is None or self.is_dense:
            h_BTD = self._mlp(h_BTD, config.dense_width, site_keys[3])
        else:
            of_experts_BTD, decided = self._experts(h_BTD, entry)
            routing = jax.tree.map(jnp.add, routing, decided)
            if config.shared_dim is not None:
                of_experts_BTD = of_experts_BTD + self._mlp(h_BTD, config.shared_dim, site_keys[3])
            h_BTD = of_experts_BTD
        h_BTD = self._norm("norm_mlp", h_BTD, is_after=True) * config.residual_multiplier
        sum_BTD = sum_BTD + dropout(h_BTD, config.residual_drop_rate, site_keys[2], self.cut.of_positions)
        return ((sum_BTD, routing), cache), None

    def _laid_out(self, x: jax.Array) -> jax.Array:
        """`x` as products and kernels on TPU read it, forward and backward; source: docs/decisions/attention.md."""
        return row_major(x) if self.kernel in TPU_KERNELS else x

    def _norm(self, name: str, x: jax.Array, *, is_after: bool = False) -> jax.Array:
        """Applies the norm before or after a sublayer, if there is one; the latter's name ends in `_after`."""
        if self.config.norm_place == ("before" if is_after else "after"):
            return x
        return make_norm(self.config, self.dtype, name + "_after" * is_after)(x)

    def _dense(
        self,
        x_BTX: jax.Array,
        features: tuple[int, ...],
        name: str,
        keys_B: jax.Array | None,
        use_bias: bool,
        total: Any = None,
    ) -> jax.Array:
        """The output of a dense layer; arguments as of `Dense`, `keys_B` are for its adapter."""
        initializer = kernel_init(self.config, name)
        options: Any = {"dtype": self.dtype, "kernel_init": initializer, "name": name, "total": total}
        if self.adapters is not None and name in self.adapters.targets:
            options |= {"adapters": self.adapters, "keys_B": keys_B, "stack": None if total is None else self.cut.stack}
            y_BTX = AdaptedDense(math.prod(features), use_bias, **options)(lax.collapse(x_BTX, 2))
            return y_BTX.reshape(*y_BTX.shape[:2], *features)
        return Dense(features, use_bias, product=self.product, **options)(x_BTX)

    def _residual_dense(self, x_BTX: jax.Array, name: str, keys_B: jax.Array | None, use_bias: bool) -> jax.Array:
        """The output of a dense layer whose input is cut."""
        return self._dense(x_BTX, (self.config.embedding_dim,), name, keys_B, use_bias, self.cut.sum_positions)

    def _attention(
        self,
        h_BTD: jax.Array,
        cache: Cache | None,
        layer: jax.Array,
        position: jax.Array | int,
        starts_BT: jax.Array | None,
        keys_B: jax.Array | None,
        adapter_keys_B: jax.Array | None,
    ) -> tuple[jax.Array, Cache | None]:
        config = self.config

        form = attention_form(config, max(config.windows), self.cut)
        shared = config.num_head // config.key_heads
        positions = h_BTD.shape[1] * self.cut.ring  # of a whole row
        are_split = splits_heads(self.kernel, form, positions=positions, shared=shared, width=config.head_width)

        def heads(name: str, count: int) -> jax.Array:
            shape = (count // self.cut.size, config.head_width)
            features = shape if are_split else (math.prod(shape),)
            x_BTX = self._dense(h_BTD, features, name, adapter_keys_B, config.qkv_bias)
            return x_BTX.reshape(*x_BTX.shape[:2], *shape)

        q_BTHK = heads("query", config.num_head)
        k_BSGK = heads("key", config.key_heads)
        v_BSGK = heads("value", config.key_heads)
        if config.qk_norm:
            q_BTHK = make_head_norm(config, self.dtype, "query_norm", self.cut)(q_BTHK)
            k_BSGK = make_head_norm(config, self.dtype, "key_norm", self.cut)(k_BSGK)
        kind = config.kind_of_positions
        if kind.turned is not None:
            row = positions if cache is None else cache.k_LBSGK.shape[2]
            numbers = self.cut.attended_numbers(position, h_BTD.shape[1])
            place = Place(layer, numbers, row, starts_BT, None if are_split else self.kernel)
            q_BTHK, k_BSGK = kind.turned(config, q_BTHK, k_BSGK, place)
        q_BTHK, k_BSGK, v_BSGK = (checkpoint_name(x, PROJECTIONS) for x in (q_BTHK, k_BSGK, v_BSGK))
        bias_CH = None if kind.bias is None else kind.bias(config, self, self.cut)
        sinks_H = None
        if config.extra_logit == "learned":
            sinks_H = self.cut.part(Sinks(config.num_head, name="sinks")(), 0)
        if cache is not None:
            # The whole cache is carried from layer to layer, so that only the new positions are written.
            start = (layer, 0, position, 0, 0)
            k_LBSGK = lax.dynamic_update_slice(cache.k_LBSGK, k_BSGK[None], start)
            v_LBSGK = lax.dynamic_update_slice(cache.v_LBSGK, v_BSGK[None], start)
            cache = Cache(k_LBSGK, v_LBSGK)
            k_BSGK, v_BSGK = (lax.dynamic_index_in_dim(c, layer, keepdims=False) for c in cache)
        cut = self.cut
        swap = self.cut.head_swap(config.num_head, config.key_heads)
        if swap is not None:
            cut = swap.cut
            bias_CH = None if bias_CH is None else swap.cut.part(bias_CH, 1)
            sinks_H = None if sinks_H is None else swap.cut.part(sinks_H, 0)
            q_BTHK, k_BSGK, v_BSGK = (swap.to_heads(x) for x in (q_BTHK, k_BSGK, v_BSGK))
            starts_BT = None if starts_BT is None else swap.whole_rows(starts_BT)
        terms = Terms(bias_CH, sinks_H, keys_B, starts_BT)
        attended_BTHK = self._by_window(cut, layer, q_BTHK, k_BSGK, v_BSGK, position, terms)
        if swap is not None:
            attended_BTHK = swap.to_positions(attended_BTHK)
        attended_BTX = attended_BTHK if are_split else lax.collapse(attended_BTHK, 2)
        out_BTD = self._residual_dense(attended_BTX, "attention_out", adapter_keys_B, config.out_bias)
        return checkpoint_name(out_BTD, PROJECTIONS), cache

    def _by_window(self, cut: ModelParallel, layer: jax.Array, *arguments: Any) -> jax.Array:
        """`_attend` with the window of this layer."""
        windows = self.config.window_pattern if self.window is None else (self.window,)
        if len(windows) == 1:
            return self._attend(cut, windows[0], *arguments)
        # Without the checkpoint `lax.switch` would store the residuals of every branch.
        branches = [jax.checkpoint(partial(self._attend, cut, window)) for window in windows]
        return lax.switch(layer % len(windows), branches, *arguments)

    def _attend(
        self,
        cut: ModelParallel,
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
        form = attention_form(self.config, window, cut)
        is_whole = queries == k_BSGK.shape[1] > 1  # with a cache there are more keys than queries
        drops = terms.keys_B is not None and form.dropout_rate > 0
        if self.kernel is not None and is_whole:
            missing = missing_in(
                self.kernel,
                form,
                positions=queries,
                shared=q_BTHK.shape[2] // k_BSGK.shape[2],
                width=q_BTHK.shape[3],
                drops=drops,
                has_bias=terms.bias_CH is not None,
                has_segments=terms.starts_BT is not None,
            )
            if missing is None:
                return kernel_attention(self.kernel, q_BTHK, k_BSGK, v_BSGK, form=form, starts_BT=terms.starts_BT)
        if cut.ring > 1 or self._is_blockwise(queries, window):
            return blockwise_attention(q_BTHK, k_BSGK, v_BSGK, position, form=form, terms=terms)
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

    def _mlp(self, h_BTD: jax.Array, whole_width: int, adapter_keys_B: jax.Array | None) -> jax.Array:
        """The MLP of a layer, or the one beside its experts."""
        config = self.config
        width = (whole_width // self.cut.size,)
        h_BTF = self._laid_out(self._dense(h_BTD, width, "mlp_in", adapter_keys_B, config.mlp_bias))
        h_BTF = checkpoint_name(h_BTF, MLP_IN)
        gate_BTF = None
        if config.gated:
            gate_BTF = self._dense(h_BTD, width, "mlp_gate", adapter_keys_B, config.mlp_bias)
            gate_BTF = checkpoint_name(gate_BTF, MLP_GATE)
        h_BTF = hidden_values(config, h_BTF, gate_BTF)
        return self._residual_dense(h_BTF, "mlp_out", adapter_keys_B, config.mlp_bias)

    def _experts(self, h_BTD: jax.Array, entry: jax.Array) -> tuple[jax.Array, Routing]:
        experts = Experts(self.config, self.dtype, self.cut, self.group, name="experts")
        y_BTD, decided = experts(h_BTD, entry, drops=self.drops)
        return self.cut.sum_positions(y_BTD), decided


class DenseLayer(TransformerLayer):
    """One of the layers before those with experts."""

    is_dense: bool = True


class Period(Layer):
    """`experts_every` layers; only the last one has experts."""

    config: Transformer

    @nn.compact
    def __call__(
        self, carry: tuple[ResidualStream, Cache | None], number: jax.Array, *arguments: Any
    ) -> tuple[tuple[ResidualStream, Cache | None], None]:
        """As `TransformerLayer`; `number` is that of the period."""
        every = self.config.experts_every
        fields = ("window", "cut", "group", "kernel", "drops", "adapters", "product", "query_block", "first")
        options: dict[str, Any] = {field: getattr(self, field) for field in fields}
        for i in range(every):
            name = f"layer_{i}"
            is_dense = i + 1 < every
            layer = TransformerLayer(
                self.config, self.dtype, self.blockwise_from, **options, is_dense=is_dense, name=name
            )
            carry, _ = layer(carry, number * every + i, *arguments)
        return carry, None
