"""Multi-head latent attention: keys and values of all heads are products of one small vector per position.

A key consists of such a product and a rotated part that all heads share; a query also has a rotated part. Sampling
stores only the vector and the rotated part. It applies the product that makes keys to the queries instead, and the
product that makes values to the output of attention: the same scores, from one key for all heads that is also the
value.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1, equations 9 to 19; DeepSeek-V3, arXiv 2412.19437, section 2.1.1.

Shapes are named by suffix:
  B rows, T query positions, S key positions, D embedding, H heads, K head dimension (N without position and P rotated),
  V width of a value, R width of the latent vector, L layers, Q rank of an adapter
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zero.models.adapters import LORA_A, LORA_B, MAGNITUDE, Adapters, column_squares
from zero.models.attention.blockwise import blockwise_attention
from zero.models.attention.dense import dense_attention
from zero.models.attention.kernel import splits_heads
from zero.models.attention.scores import Form, Terms
from zero.models.axes import EMBED, HEADS, Axes, Role
from zero.models.latent_keys import Latent
from zero.models.mixer import LayerContext
from zero.models.norms import make_norm
from zero.models.parametrization import kernel_init
from zero.models.positions.kind import Place
from zero.models.self_attention import ScoredAttention
from zero.models.stack import ATTENTION_OUTPUT, ATTENTION_SUMS, PROJECTIONS
from zero.partition.model_parallel import ModelParallel, RoundedWeight

_QUERY_LATENT, _LATENT = "query_latent", "latent"  # axes of the latent vectors, which are whole on each device
_KEY_VALUE = Axes((_LATENT, HEADS))
_EPSILON = 1e-6  # of the norms of latent vectors, independent of other norms, as in DeepSeek's code


class LatentCache(NamedTuple):
    """Latent vectors of the positions so far and their rotated parts, one entry per layer: float `(L, B, S, R + P)`."""

    x_LBSR: jax.Array


def empty_latents(
    config: Latent,
    layers: int,
    rows: int,
    positions: int,
    dtype: DTypeLike,
    row_group: ModelParallel,
    known: jax.Array | int,
) -> LatentCache:
    """The cache before the first position, the same on all devices of a group."""
    assert config.latent_dim is not None
    return LatentCache(jnp.zeros((layers, rows, positions, config.latent_dim + config.rotated), dtype))


def stored_floats_of_latents(config: Latent) -> dict[str, int]:
    """Numbers per position: queries, the latent vector, the rotated part of keys, and the output.

    Keys and values are computed again. Kernels and blocks return values as wide as keys.
    """
    assert config.latent_dim is not None
    heads = config.num_head * config.head_width
    projections = heads + config.latent_dim + config.rotated + config.embedding_dim
    return {ATTENTION_OUTPUT: heads, ATTENTION_SUMS: 2 * config.num_head, PROJECTIONS: projections}


def projection_weights_of_latents(config: Latent) -> int:
    """Weights of the products that make queries, the latent vector and the output."""
    assert config.latent_dim is not None
    embedding = config.embedding_dim
    heads = config.num_head * config.head_width
    queries = embedding * heads
    if config.query_latent_dim is not None:
        queries = config.query_latent_dim * (embedding + heads)
    return queries + embedding * (config.latent_dim + config.rotated + config.num_head * config.value_width)


class EffectiveKernel(nn.Module):
    """The kernel of a product with its adapter, `(inputs, outputs)`; the parameters are those of `Dense`.

    Attributes:
      shape: of the kernel, this device's part.
      dtype: of the result.
      init: of the kernel.
      adapters: those of the model, if this product has one; None for none.
    """

    shape: tuple[int, int]
    dtype: DTypeLike
    init: Any
    adapters: Adapters | None = None

    @nn.compact
    def __call__(self) -> jax.Array:
        kernel = self.param("kernel", self.init, self.shape)
        if isinstance(kernel, RoundedWeight):
            kernel = kernel.numbers.astype(jnp.float32) * kernel.scales
        kernel_IO = kernel.astype(self.dtype)
        if self.adapters is None:
            return kernel_IO
        rank = self.adapters.rank_of(str(self.name))
        scale = self.adapters.scale_of(str(self.name))
        a_IQ = self.param(LORA_A, nn.initializers.zeros, (self.shape[0], rank)).astype(self.dtype)
        b_QO = self.param(LORA_B, nn.initializers.zeros, (rank, self.shape[1])).astype(self.dtype)
        adapted_IO = kernel_IO + scale * (a_IQ @ b_QO)
        if self.adapters.has_magnitudes:
            magnitude_O = self.param(MAGNITUDE, nn.initializers.zeros, self.shape[1:]).astype(jnp.float32)
            ratio_O = magnitude_O * lax.rsqrt(column_squares(kernel_IO, a_IQ, b_QO, scale))
            adapted_IO = adapted_IO * ratio_O.astype(self.dtype)[None]
        return adapted_IO


class LatentAttention(ScoredAttention):
    """Each position sees the earlier ones, through keys and values made from one vector per position."""

    @nn.compact
    def __call__(
        self, h_BTD: jax.Array, cache: LatentCache | None, site: LayerContext
    ) -> tuple[jax.Array, LatentCache | None]:
        """See `Mixer`."""
        config = self.config
        assert config.latent_dim is not None
        heads = config.num_head // self.row_group.size
        rows, count, _ = h_BTD.shape
        positions = count * self.row_group.ring  # of a whole row
        unrotated = config.head_width - config.rotated
        form = self._form(0, self.row_group)
        are_split = cache is None and splits_heads(self.kernel, form, positions=positions, width=config.head_width)

        def by_head(x_BTX: jax.Array, name: str, width: int, axes: Axes) -> jax.Array:
            features = (heads, width) if are_split else (heads * width,)
            y_BTX = self.dense(x_BTX, features, name, axes, site.adapter_keys_B, use_bias=False)
            return y_BTX.reshape(rows, -1, heads, width)

        def narrow(name: str, width: int, axis: str) -> jax.Array:
            axes = Axes((EMBED, axis))
            return self.dense(h_BTD, (width,), name, axes, site.adapter_keys_B, use_bias=False)

        query_input_BTX = h_BTD
        inputs = EMBED
        if config.query_latent_dim is not None:
            inputs = _QUERY_LATENT
            query_input_BTX = narrow("query_latent", config.query_latent_dim, inputs)
            norm = make_norm(config, self.dtype, "query_latent_norm", epsilon=_EPSILON, axes=Axes((inputs,)))
            query_input_BTX = norm(query_input_BTX)
        q_BTHK = by_head(query_input_BTX, "query", config.head_width, Axes((inputs, HEADS), Role.QUERY))
        joint_BTX = checkpoint_name(narrow("latent", config.latent_dim + config.rotated, _LATENT), PROJECTIONS)
        norm = make_norm(config, self.dtype, "latent_norm", epsilon=_EPSILON, axes=Axes((_LATENT,)))
        latent_BTR = norm(joint_BTX[..., : config.latent_dim])
        q_BTHP = q_BTHK[..., unrotated:]
        k_BT1P = joint_BTX[:, :, None, config.latent_dim :]
        turn = config.kind_of_positions.turned
        assert turn is not None  # a rule of the keys
        row = positions if cache is None else cache.x_LBSR.shape[2]
        numbers = self.row_group.attended_numbers(site.position, count)
        q_BTHP, k_BT1P = turn(config, q_BTHP, k_BT1P, Place(site.layer, numbers, row, site.starts_BT, None))
        q_BTHK = checkpoint_name(jnp.concatenate([q_BTHK[..., :unrotated], q_BTHP], axis=-1), PROJECTIONS)
        if cache is None:
            kv_BTHX = by_head(latent_BTR, "key_value", unrotated + config.value_width, _KEY_VALUE)
            k_BTHP = jnp.broadcast_to(k_BT1P, (rows, count, heads, config.rotated))
            k_BTHK = jnp.concatenate([kv_BTHX[..., :unrotated], k_BTHP], axis=-1)
            attended_BTHV = self._scored(q_BTHK, k_BTHK, kv_BTHX[..., unrotated:], site)
        else:
            new_BTR = jnp.concatenate([latent_BTR, k_BT1P[:, :, 0]], axis=-1).astype(cache.x_LBSR.dtype)
            start = (site.entry, 0, site.position, 0)
            cache = LatentCache(lax.dynamic_update_slice(cache.x_LBSR, new_BTR[None], start))
            x_BSR = lax.dynamic_index_in_dim(cache.x_LBSR, site.entry, keepdims=False)
            attended_BTHV = self._by_latents(q_BTHK, x_BSR, unrotated, site)
        attended_BTX = attended_BTHV if are_split else lax.collapse(attended_BTHV, 2)
        out_BTD = self.residual_dense(attended_BTX, "attention_out", HEADS, site.adapter_keys_B, config.out_bias)
        return checkpoint_name(out_BTD, PROJECTIONS), cache

    def _form(self, window: int, row_group: ModelParallel) -> Form:
        """The form with the divisor for whole keys, independent of the width of stored ones."""
        form = super()._form(window, row_group)
        return form._replace(divisor=form.divisor_of(self.config.head_width))

    def _by_latents(self, q_BTHK: jax.Array, x_BSR: jax.Array, unrotated: int, site: LayerContext) -> jax.Array:
        """The output of attention, `(B, T, H, V)`, from stored vectors instead of keys and values."""
        config = self.config
        assert config.latent_dim is not None
        heads = q_BTHK.shape[2]
        shape = (config.latent_dim, heads * (unrotated + config.value_width))
        adapters = self.adapters if self.adapters is not None and self.adapters.covers("key_value") else None
        init = kernel_init(config, "key_value", _KEY_VALUE)
        kernel_RX = EffectiveKernel(shape, self.dtype, init, adapters, name="key_value")()
        kernel_RHX = kernel_RX.reshape(config.latent_dim, heads, -1)
        q_BTHR = jnp.einsum("BTHN,RHN->BTHR", q_BTHK[..., :unrotated], kernel_RHX[..., :unrotated])
        q_BTHR = jnp.concatenate([q_BTHR, q_BTHK[..., unrotated:]], axis=-1)
        x_BS1R = x_BSR[:, :, None]
        attend = blockwise_attention if self._is_blockwise(q_BTHK.shape[1], 0) else dense_attention
        terms = Terms(keys_B=site.keys_B, starts_BT=site.starts_BT)
        form = self._form(0, self.row_group)
        attended_BTHR = attend(q_BTHR, x_BS1R, x_BS1R, site.position, form=form, terms=terms)
        return jnp.einsum("BTHR,RHV->BTHV", attended_BTHR[..., : config.latent_dim], kernel_RHX[..., unrotated:])
