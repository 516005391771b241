"""Gated DeltaNet: a mixer in linear time, whose cache has a constant size.

Queries, keys and values pass through a short causal convolution of each channel. The gated delta rule mixes the
positions, and a norm of each head and a gate follow. Both need all positions of a row in order: the devices of a
context group swap their positions of all heads for all positions of some heads.

Source: Gated Delta Networks, arXiv 2412.06464, section 3.4 and figure 1.

Shapes are named by suffix:
  B rows, T positions, D embedding, H heads of values, G heads of keys, K width of keys, V width of values, X channels,
  C positions that a convolution sees, L layers
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zero.models.attention.delta_rule import CHUNK, Inputs, delta_rule, delta_step, operations_per_position
from zero.models.axes import EMBED, HEADS, PER_HEAD, TAPS, Axes, Role, named
from zero.models.mixer import LayerContext, Mixer, Transformer
from zero.models.stack import ATTENTION_OUTPUT, PROJECTIONS
from zero.partition.model_parallel import ModelParallel

_EPSILON = 1e-6  # of the length of queries and keys


class DeltaCache(NamedTuple):
    """The state of this mixer's layers after the positions so far.

    Attributes:
      state_LBHKV: of the delta rule, float32.
      inputs_LBCX: the last inputs of the convolutions, one fewer than they see.
      known: the number of valid positions of a prefill, int32.
    """

    state_LBHKV: jax.Array
    inputs_LBCX: jax.Array
    known: jax.Array


def empty_delta_cache(
    config: Transformer,
    layers: int,
    rows: int,
    positions: int,
    dtype: DTypeLike,
    row_group: ModelParallel,
    known: jax.Array | int,
) -> DeltaCache:
    """The cache before the first position, of this device's heads; its size does not depend on `positions`."""
    head_shape = (config.delta_heads // row_group.size, config.delta_key_width, config.delta_value_width)
    state = jnp.zeros((layers, rows, *head_shape), jnp.float32)
    inputs = jnp.zeros((layers, rows, config.delta_taps - 1, sum(_channels(config)) // row_group.size), dtype)
    return DeltaCache(state, inputs, jnp.asarray(known, jnp.int32))


def stored_floats_of_delta(config: Transformer) -> dict[str, int]:
    """Numbers per position: outputs and states of the delta rule in float32; inputs of the convolutions, and outputs.

    A chunk of positions has one state.
    """
    state_floats = config.delta_key_width * config.delta_value_width // CHUNK
    rule_floats = 2 * config.delta_heads * (config.delta_value_width + state_floats)
    return {ATTENTION_OUTPUT: rule_floats, PROJECTIONS: sum(_channels(config)) + config.embedding_dim}


def transient_floats_of_delta(config: Transformer) -> int:
    """Numbers of heads per position, in float32; queries and keys also before they have unit length."""
    return 2 * config.delta_heads * (4 * config.delta_key_width + 3 * config.delta_value_width)


def flops_of_delta(config: Transformer, context: int) -> float:
    """Operations of the delta rule in a row."""
    return context * config.delta_heads * operations_per_position(config.delta_key_width, config.delta_value_width)


def projection_weights_of_delta(config: Transformer) -> int:
    """Weights of the products that make queries, keys, values and the output."""
    channels = _channels(config)
    return config.embedding_dim * (sum(channels) + channels[-1])


def heads_of_delta(config: Transformer) -> dict[str, int]:
    """The heads that a tensor group divides; each device has the heads of values of its heads of keys."""
    return {"delta_key_heads": config.delta_groups}


def _channels(config: Transformer) -> tuple[int, int, int]:
    """The channels of queries, keys and values of all heads."""
    key_channels = config.delta_groups * config.delta_key_width
    return key_channels, key_channels, config.delta_heads * config.delta_value_width


class Taps(nn.Module):
    """The weights of a causal convolution of each channel, `(C, X)`: the last one is that of the position itself."""

    count: int
    channels: int

    @nn.compact
    def __call__(self) -> jax.Array:
        start = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=0, out_axis=())
        named_start = named(start, TAPS, "channels", role=Role.COEFFICIENTS)
        return self.param("taps", named_start, (self.count, self.channels))


class Decay(nn.Module):
    """The log decay of each head's state: `-exp(log_rate) softplus(x + offset)`, float32 `(B, T, H)`."""

    @nn.compact
    def __call__(self, x_BTH: jax.Array) -> jax.Array:
        heads = x_BTH.shape[-1]
        log_rate_H = self.param("log_rate", named(_log_of_uniform, PER_HEAD), (heads,)).astype(jnp.float32)
        offset_H = self.param("offset", named(nn.initializers.ones, PER_HEAD), (heads,)).astype(jnp.float32)
        shifted_BTH = x_BTH.astype(jnp.float32) + offset_H[None, None]
        return -jnp.exp(log_rate_H)[None, None] * jax.nn.softplus(shifted_BTH)


def _log_of_uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


class GatedDelta(Mixer):
    """The layer's mixer `delta`."""

    @nn.compact
    def __call__(
        self, h_BTD: jax.Array, cache: DeltaCache | None, site: LayerContext
    ) -> tuple[jax.Array, DeltaCache | None]:
        """See `Mixer`."""
        config = self.config
        swap = self.row_group.head_swap(config.delta_groups, config.delta_heads)
        inner = self.row_group if swap is None else swap.row_group
        starts_BT = site.starts_BT
        if swap is not None and starts_BT is not None:
            starts_BT = swap.whole_rows(starts_BT)

        def projected(name: str, features: int, axis: str, role: Role | None = None) -> jax.Array:
            axes = Axes((EMBED, axis), role)
            return self.dense(h_BTD, (features,), name, axes, site.adapter_keys_B, use_bias=False)

        def at_all_positions(x_BTX: jax.Array, heads: int) -> jax.Array:
            if swap is None:
                return x_BTX
            return lax.collapse(swap.to_heads(x_BTX.reshape(*x_BTX.shape[:2], heads, -1)), 2)

        mixed, taps = [], []
        counts = zip(_channels(config), (config.delta_groups, config.delta_groups, config.delta_heads), strict=True)
        for name, (channels, heads) in zip(("query", "key", "value"), counts, strict=True):
            role = Role.QUERY if name == "query" else None
            mixed.append(at_all_positions(projected(name, channels // self.row_group.size, HEADS, role), heads))
            taps.append(inner.part(Taps(config.delta_taps, channels, name=f"{name}_convolution")(), 1))
        x_BTX = checkpoint_name(jnp.concatenate(mixed, axis=-1), PROJECTIONS)
        taps_CX = jnp.concatenate(taps, axis=-1)
        gate_BTX = projected("output_gate", _channels(config)[2] // self.row_group.size, HEADS)
        # Small weights are not cut: each device computes the rates and decays of all heads at its positions.
        rate_BTH = jax.nn.sigmoid(projected("rate", config.delta_heads, PER_HEAD).astype(jnp.float32))
        decay_BTH = Decay(name="decay")(projected("decay_input", config.delta_heads, PER_HEAD))
        rate_BTH, decay_BTH = (
            self.row_group.part(at_all_positions(x_BTH, config.delta_heads), 2) for x_BTH in (rate_BTH, decay_BTH)
        )

        before_BCX = None if cache is None else lax.dynamic_index_in_dim(cache.inputs_LBCX, site.entry, keepdims=False)
        extended_BTX = _with_before(x_BTX, before_BCX, config.delta_taps)
        mixed_BTX = jax.nn.silu(convolved(extended_BTX, taps_CX.astype(self.dtype), starts_BT))
        inputs = self._inputs(mixed_BTX, decay_BTH, rate_BTH, inner)

        if cache is None:
            out_BTHV, _ = delta_rule(inputs, None, starts_BT)
        else:
            out_BTHV, cache = self._continued(inputs, extended_BTX, cache, site)
        out_BTHV = checkpoint_name(out_BTHV, ATTENTION_OUTPUT)
        out_BTHV = out_BTHV if swap is None else swap.to_positions(out_BTHV)
        gains = named(nn.initializers.ones, "value_dim")
        norm = nn.RMSNorm(config.norm_epsilon, dtype=jnp.float32, scale_init=gains, name="delta_norm")
        gate_BTHV = gate_BTX.astype(jnp.float32).reshape(out_BTHV.shape)
        out_BTX = lax.collapse(norm(out_BTHV) * jax.nn.silu(gate_BTHV), 2).astype(self.dtype)
        out_BTD = self.residual_dense(out_BTX, "attention_out", HEADS, site.adapter_keys_B, use_bias=False)
        return checkpoint_name(out_BTD, PROJECTIONS), cache

    def _inputs(
        self, mixed_BTX: jax.Array, decay_BTH: jax.Array, rate_BTH: jax.Array, row_group: ModelParallel
    ) -> Inputs:
        """Queries and keys of unit length, each for all heads of values that share it."""
        config = self.config
        query_channels, key_channels, _ = (count // row_group.size for count in _channels(config))
        shared = config.delta_heads // config.delta_groups

        def heads(x_BTX: jax.Array, width: int) -> jax.Array:
            return x_BTX.astype(jnp.float32).reshape(*x_BTX.shape[:2], -1, width)

        q_BTGK = heads(mixed_BTX[..., :query_channels], config.delta_key_width)
        k_BTGK = heads(mixed_BTX[..., query_channels : query_channels + key_channels], config.delta_key_width)
        q_BTHK, k_BTHK = (jnp.repeat(_unit(x_BTGK), shared, axis=2) for x_BTGK in (q_BTGK, k_BTGK))
        v_BTHV = heads(mixed_BTX[..., query_channels + key_channels :], config.delta_value_width)
        return Inputs(q_BTHK * config.delta_key_width**-0.5, k_BTHK, v_BTHV, decay_BTH, rate_BTH)

    def _continued(
        self, inputs: Inputs, extended_BTX: jax.Array, cache: DeltaCache, site: LayerContext
    ) -> tuple[jax.Array, DeltaCache]:
        """The outputs at positions that continue the cache, and the cache with them."""
        positions = inputs.k_BTHK.shape[1]
        state_BHKV = lax.dynamic_index_in_dim(cache.state_LBHKV, site.entry, keepdims=False)
        if positions == 1:
            out_BTHV, state_BHKV = delta_step(inputs, state_BHKV)
            count: jax.Array | int = 1
        else:
            count = jnp.clip(cache.known - site.position, 0, positions)
            is_valid_T = jnp.arange(positions) < count
            decay_BTH = jnp.where(is_valid_T[None, :, None], inputs.decay_BTH, 0.0)
            rate_BTH = jnp.where(is_valid_T[None, :, None], inputs.rate_BTH, 0.0)
            out_BTHV, state_BHKV = delta_rule(inputs._replace(decay_BTH=decay_BTH, rate_BTH=rate_BTH), state_BHKV)
        last_BCX = lax.dynamic_slice_in_dim(extended_BTX, count, self.config.delta_taps - 1, axis=1)
        state_LBHKV = lax.dynamic_update_index_in_dim(cache.state_LBHKV, state_BHKV, site.entry, 0)
        inputs_LBCX = lax.dynamic_update_index_in_dim(
            cache.inputs_LBCX, last_BCX.astype(cache.inputs_LBCX.dtype), site.entry, 0
        )
        return out_BTHV, cache._replace(state_LBHKV=state_LBHKV, inputs_LBCX=inputs_LBCX)


def _with_before(x_BTX: jax.Array, before_BCX: jax.Array | None, taps: int) -> jax.Array:
    """`x` preceded by the inputs that the convolution at its first position sees; zeros at the start of a row."""
    if before_BCX is None:
        return jnp.pad(x_BTX, ((0, 0), (taps - 1, 0), (0, 0)))
    return jnp.concatenate([before_BCX.astype(x_BTX.dtype), x_BTX], axis=1)


def convolved(extended_BTX: jax.Array, taps_CX: jax.Array, starts_BT: jax.Array | None = None) -> jax.Array:
    """The causal convolution of each channel; a segment does not see the previous one.

    Args:
      extended_BTX: the inputs, after the `C - 1` before the first.
      taps_CX: the weights; the last one is that of the position itself.
      starts_BT: the column where the segment of each position starts; None for one segment per row.

    >>> convolved(jnp.asarray([[[0.0], [1], [2], [3]]]), jnp.asarray([[10.0], [1]])).ravel().tolist()
    [1.0, 12.0, 23.0]
    >>> convolved(jnp.asarray([[[0.0], [1], [2], [3]]]), jnp.asarray([[10.0], [1]]), jnp.asarray([[0, 1, 1]])).tolist()
    [[[1.0], [2.0], [23.0]]]
    """
    taps = taps_CX.shape[0]
    positions = extended_BTX.shape[1] - taps + 1
    total = jnp.zeros((), extended_BTX.dtype)
    for tap in range(taps):
        x_BTX = lax.slice_in_dim(extended_BTX, tap, tap + positions, axis=1)
        if starts_BT is not None:
            source_T = jnp.arange(positions) - (taps - 1 - tap)
            x_BTX = jnp.where((source_T[None] >= starts_BT)[..., None], x_BTX, 0)
        total = total + x_BTX * taps_CX[tap][None, None]
    return total


def _unit(x: jax.Array) -> jax.Array:
    """`x` normalized to unit length in its last dimension."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + _EPSILON)
