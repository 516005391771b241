"""Linear attention: a mixer in linear time, whose cache has a constant size.

    S_t = S_{t-1} + f(k_t) v_t^T,    z_t = z_{t-1} + f(k_t),    o_t = S_t^T f(q_t) / (z_t^T f(q_t) + epsilon)

Each position sees the values of all positions up to its own, weighted by the products of features of its query and of
their keys. Training computes chunks of positions; sampling computes one position at a time. Positions have no encoding
of their own here: the kinds of `positions` that turn queries or add to scores do not reach this mixer. The devices of a
context group swap their positions of all heads for all positions of some heads.

Source: Transformers are RNNs, arXiv 2006.16236, equations 9 to 12 and 18 to 20.

Shapes are named by suffix:
  B rows, T positions, N chunks, C positions of a chunk, D embedding, H heads of queries, G heads of keys, K width of a
  head, V the same and a column of ones for the sums of weights, L layers
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zero.models.axes import EMBED, HEADS, KV_HEADS, Axes, Role
from zero.models.linear_keys import FEATURES
from zero.models.mixer import LayerContext, Mixer, Transformer
from zero.models.stack import ATTENTION_OUTPUT, PROJECTIONS
from zero.partition.model_parallel import ModelParallel

CHUNK = 64

# Sums over many positions lose digits in the lower precisions that TPUs choose by default.
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class LinearCache(NamedTuple):
    """The state of this mixer's layers after the positions so far.

    Attributes:
      state_LBHKV: S, and z in its last column, float32.
      known: the number of valid positions of a prefill, int32.
    """

    state_LBHKV: jax.Array
    known: jax.Array


def empty_linear_cache(
    config: Transformer,
    layers: int,
    rows: int,
    positions: int,
    dtype: DTypeLike,
    row_group: ModelParallel,
    known: jax.Array | int,
) -> LinearCache:
    """The cache before the first position, of this device's heads; its size does not depend on `positions`."""
    shape = (layers, rows, config.num_head // row_group.size, config.head_width, config.head_width + 1)
    return LinearCache(jnp.zeros(shape, jnp.float32), jnp.asarray(known, jnp.int32))


def stored_floats_of_linear(config: Transformer) -> dict[str, int]:
    """Numbers per position: outputs and states in float32; projections with the output. A chunk has one state."""
    heads = config.num_head * config.head_width
    of_states = config.num_head * config.head_width * (config.head_width + 1) // CHUNK
    projections = heads + 2 * config.key_heads * config.head_width + config.embedding_dim
    return {ATTENTION_OUTPUT: 2 * (heads + of_states), PROJECTIONS: projections}


def transient_floats_of_linear(config: Transformer) -> int:
    """Numbers per position of features and values in float32."""
    return 6 * config.num_head * config.head_width


def flops_of_linear(config: Transformer, context: int) -> float:
    """Operations of a row: products with the state, and of the positions of a chunk with each other."""
    per_head = 2 * (config.head_width + 1) * (2 * config.head_width + CHUNK) + 2 * config.head_width * CHUNK
    return context * config.num_head * per_head


@jax.named_scope("linear_attention")
def linear_attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    state_BHKV: jax.Array | None = None,
    starts_BT: jax.Array | None = None,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """The weighted sums of values `(B, T, H, V)` and the state after the last position, both float32.

    Args:
      q_BTHK, k_BTHK: features of queries and keys.
      state_BHKV: the state before the first position; None for zeros.
      starts_BT: the column where the segment of each position starts; a segment begins with a state of zeros. None for
        one segment per row, which continues the given state.
      chunk: positions computed at a time.

    >>> one = jnp.ones((1, 3, 1, 1))
    >>> linear_attention(one, one, one, chunk=2)[0].ravel()
    Array([1., 2., 3.], dtype=float32)
    """
    rows, positions, heads, width = k_BTHK.shape
    if state_BHKV is None:
        state_BHKV = jnp.zeros((rows, heads, width, v_BTHV.shape[-1]), jnp.float32)
    chunk = min(chunk, positions)
    added = -positions % chunk
    inputs = (jnp.pad(x, ((0, 0), (0, added), (0, 0), (0, 0))) for x in (q_BTHK, k_BTHK, v_BTHV))
    chunks = tuple(_in_chunks(x.astype(jnp.float32), chunk) for x in inputs)
    marks_NBC = None
    if starts_BT is not None:
        marks_NBC = _in_chunks(jnp.pad(starts_BT, ((0, 0), (0, added)), mode="edge"), chunk)
    firsts_N = jnp.arange(0, positions + added, chunk)
    # The backward pass recomputes the weights within a chunk, so it only needs the states between chunks.
    through_chunk = jax.checkpoint(_through_chunk, prevent_cse=False)
    last_BHKV, out_NBCHV = lax.scan(through_chunk, state_BHKV, (chunks, marks_NBC, firsts_N))
    out_BTHV = jnp.moveaxis(out_NBCHV, 0, 1).reshape(rows, positions + added, heads, -1)
    return out_BTHV[:, :positions], last_BHKV


def _in_chunks(x_BT: jax.Array, chunk: int) -> jax.Array:
    return jnp.moveaxis(x_BT.reshape(x_BT.shape[0], -1, chunk, *x_BT.shape[2:]), 1, 0)


def _through_chunk(
    state_BHKV: jax.Array, xs: tuple[tuple[jax.Array, ...], jax.Array | None, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The state after a chunk, and the sums of its positions `(B, C, H, V)`."""
    (q_BCHK, k_BCHK, v_BCHV), starts_BC, first = xs
    state_BHKV = checkpoint_name(state_BHKV, ATTENTION_OUTPUT)
    size = q_BCHK.shape[1]
    sees_BCC = jnp.tril(jnp.ones((1, size, size)))
    continues_BC = jnp.ones((1, size))
    if starts_BC is not None:
        sees_BCC = sees_BCC * (starts_BC[:, :, None] == starts_BC[:, None, :])
        continues_BC = (starts_BC < first).astype(jnp.float32)
    weights_BHCC = sees_BCC[:, None] * _einsum("bihk,bjhk->bhij", q_BCHK, k_BCHK)
    within_BCHV = _einsum("bhij,bjhv->bihv", weights_BHCC, v_BCHV)
    before_BCHV = continues_BC[..., None, None] * _einsum("bchk,bhkv->bchv", q_BCHK, state_BHKV)
    last_BC11 = sees_BCC[:, -1, :, None, None]  # of the segment of the last position
    added_BHKV = _einsum("bchk,bchv->bhkv", last_BC11 * k_BCHK, v_BCHV)
    return continues_BC[:, -1, None, None, None] * state_BHKV + added_BHKV, before_BCHV + within_BCHV


class LinearAttention(Mixer):
    """The layer's mixer `linear`."""

    @nn.compact
    def __call__(
        self, h_BTD: jax.Array, cache: LinearCache | None, site: LayerContext
    ) -> tuple[jax.Array, LinearCache | None]:
        """See `Mixer`."""
        config = self.config
        swap = self.row_group.head_swap(config.num_head, config.key_heads)
        starts_BT = site.starts_BT
        if swap is not None and starts_BT is not None:
            starts_BT = swap.whole_rows(starts_BT)

        def heads(name: str, count: int, axis: str, role: Role | None = None) -> jax.Array:
            count //= self.row_group.size
            axes = Axes((EMBED, axis), role)
            features = (count * config.head_width,)
            x_BTX = self.dense(h_BTD, features, name, axes, site.adapter_keys_B, config.qkv_bias)
            x_BTGK = checkpoint_name(x_BTX, PROJECTIONS).reshape(*x_BTX.shape[:2], count, config.head_width)
            return x_BTGK if swap is None else swap.to_heads(x_BTGK)

        features = FEATURES[config.linear_features]
        q_BTHK = features(heads("query", config.num_head, HEADS, Role.QUERY).astype(jnp.float32))
        k_BTGK = features(heads("key", config.key_heads, KV_HEADS).astype(jnp.float32))
        v_BTGK = heads("value", config.key_heads, KV_HEADS).astype(jnp.float32)
        v_BTGV = jnp.concatenate([v_BTGK, jnp.ones_like(v_BTGK[..., :1])], axis=-1)
        shared = config.num_head // config.key_heads
        k_BTHK, v_BTHV = (jnp.repeat(x, shared, axis=2) for x in (k_BTGK, v_BTGV))
        if cache is None:
            sums_BTHV, _ = linear_attention(q_BTHK, k_BTHK, v_BTHV, None, starts_BT)
        else:
            sums_BTHV, cache = _continued(q_BTHK, k_BTHK, v_BTHV, cache, site)
        out_BTHK = sums_BTHV[..., :-1] / (sums_BTHV[..., -1:] + config.linear_epsilon)
        out_BTHK = checkpoint_name(out_BTHK, ATTENTION_OUTPUT)
        out_BTHK = out_BTHK if swap is None else swap.to_positions(out_BTHK)
        out_BTX = lax.collapse(out_BTHK, 2).astype(self.dtype)
        out_BTD = self.residual_dense(out_BTX, "attention_out", HEADS, site.adapter_keys_B, config.out_bias)
        return checkpoint_name(out_BTD, PROJECTIONS), cache


def _continued(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHV: jax.Array, cache: LinearCache, site: LayerContext
) -> tuple[jax.Array, LinearCache]:
    """The sums of positions that continue the cache, and the cache with those that are known."""
    positions = q_BTHK.shape[1]
    count: Any = 1 if positions == 1 else jnp.clip(cache.known - site.position, 0, positions)
    is_known_T = jnp.arange(positions) < count
    state_BHKV = lax.dynamic_index_in_dim(cache.state_LBHKV, site.entry, keepdims=False)
    known_BTHK = jnp.where(is_known_T[None, :, None, None], k_BTHK, 0.0)
    sums_BTHV, state_BHKV = linear_attention(q_BTHK, known_BTHK, v_BTHV, state_BHKV)
    state_LBHKV = lax.dynamic_update_index_in_dim(cache.state_LBHKV, state_BHKV, site.entry, 0)
    return sums_BTHV, cache._replace(state_LBHKV=state_LBHKV)
