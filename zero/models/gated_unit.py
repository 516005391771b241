"""Gated attention units with vector-quantized keys: attention to all positions in time linear in their number.

A query attends, in one softmax, to its own block of C positions (causally), to the block before, and to everything
older. Keys are rounded to one of S codes, so all older positions of one code have the same score: a mean value and a
count per code replace them exactly, in a memory of constant size.

Sources: Lingle, Transformer-VQ, arXiv 2309.16354, section 3; gated attention unit: Hua et al., arXiv 2202.10447.

Shapes are named by suffix:
  B rows, T positions of a row, D embedding, K width of queries and keys, V width of values, S codes, C positions of a
  block, W = 2 C positions of a window, N blocks, L layers, U units of a layer
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from zero.base.keys import Check, at_least, fraction_below_one, key, one_of, zero_or_more
from zero.models.attention.scores import LOWEST
from zero.models.axes import EMBED, VALUES, Axes, Role, named
from zero.models.elements import Residual, dropout
from zero.models.norms import Norms, make_norm
from zero.models.parametrization import Initial, kernel_init
from zero.models.positions.sinusoidal import Sinusoidal
from zero.partition.model_parallel import WHOLE, ModelParallel

UNITS = 2  # per layer: together 12 D^2 parameters, as attention and MLP
_KEYS = "keys"  # axis of queries and keys, which each device of a tensor group has whole
CODEBOOK = "codebook"  # name of the collection of variables


@dataclass(frozen=True)
class GatedUnits(Sinusoidal, Norms, Residual, Initial):
    """The keys of gated units."""

    # S
    codes: int = key(
        512,
        None,
        "codes to which the keys of a unit are rounded; 0: none, and only the window of two blocks is seen",
    )
    # C
    vq_block: int = key(
        512,
        at_least(1),
        "positions of a block; those of a token's own block and of the block before are seen one by one",
    )
    # K
    key_width: int = key(128, at_least(1), "width of queries and keys; values have twice the width of the model")
    cache_gradient: bool = key(True, None, "gradients flow to values that are older than the window")
    commitment: float = key(1e-4, zero_or_more(), "weight of the loss that draws keys to their codes")
    codebook_decay: float = key(
        0.99,
        Check(lambda decay: 0 < decay < 1, "more than 0, less than 1"),
        "decay of the moving averages of the codes",
    )
    distance_dropout: float = key(0.0, fraction_below_one(), "dropout of the features of distances")
    distance_width: int | None = key(
        None, None, "number of these features, the sines and cosines of a distance", none="key_width"
    )
    # block: distances of more than C have no bias
    distance_limit: str = key(
        "window",
        one_of("window", "block"),
        "distances with a bias: window, all in the two blocks; block, those of up to vq_block",
    )
    layer_dropout: float = key(0.0, fraction_below_one(), "probability with which a sequence skips a unit")
    update_tokens: int | None = key(
        None,
        at_least(1),
        "tokens of each row per training step: a step takes the next so many, with the memory of those before "
        "and without its gradient, and max_context / update_tokens steps make a row; null: a step takes whole "
        "rows",
    )

    def mistakes(self) -> Iterator[str]:
        """Widths that are odd, and updates that cut a block."""
        if self.codes < 0 or self.key_width % 2:
            yield f"codes must be at least 0 and key_width even, got {self.codes} and {self.key_width}"
        if self.update_tokens is not None and self.update_tokens % self.vq_block:
            yield f"update_tokens {self.update_tokens} must be a multiple of vq_block {self.vq_block}"
        if self.distance_width is not None and (self.distance_width < 2 or self.distance_width % 2):
            yield f"distance_width must be even and at least 2, or null, got {self.distance_width}"


@jax.custom_vjp
def assign_codes(
    keys_BTK: jax.Array,
    counts_S: jax.Array,
    sums_SK: jax.Array,
    commitment: jax.Array | float = 0.0,
    counted_BT: jax.Array | float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Each key rounded to the nearest code, float32 `(B, T, K)`, and the number of that code, int32 `(B, T)`.

    In the backward pass the gradient of a rounded key flows to the key ("straight through"); plus the gradient of
    `commitment` times the squared distance between the two. The "gradients" of `counts_S` and `sums_SK` are the inputs
    of their moving averages: the number of keys assigned to each code, and the sums of these keys. So micro-batches and
    rematerialized layers add them up like gradients, each key once.

    Args:
      keys_BTK: float32.
      counts_S, sums_SK: codes are sums / counts.
      commitment: weight of the commitment loss of one position.
      counted_BT: 1 where a key counts for the averages and the commitment, 0 if another device counts it.

    >>> keys = jnp.asarray([[[0.9, 0.1], [0.2, 0.7], [1.0, 0.0]]])
    >>> rounded, backward = jax.vjp(lambda *args: assign_codes(*args)[0], keys, jnp.ones(2), jnp.eye(2))
    >>> rounded.tolist()
    [[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]]
    >>> backward(jnp.zeros((1, 3, 2)))[1].tolist()
    [2.0, 1.0]
    """
    codes_SK = codes_of(counts_S, sums_SK)
    products_BTS = jnp.einsum("BTK,SK->BTS", keys_BTK, codes_SK, precision=lax.Precision.HIGHEST)
    codes_BT = jnp.argmin(jnp.square(codes_SK).sum(-1)[None, None] - 2 * products_BTS, axis=-1).astype(jnp.int32)
    return codes_SK[codes_BT], codes_BT


def _assign_codes_forward(*arguments: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    rounded_BTK, codes_BT = assign_codes(*arguments)
    keys_BTK, counts_S, _, commitment, counted_BT = arguments
    return (rounded_BTK, codes_BT), (keys_BTK, rounded_BTK, codes_BT, counts_S, commitment, counted_BT)


def _assign_codes_backward(
    saved: tuple[Any, ...], grads: tuple[jax.Array, Any]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    keys_BTK, rounded_BTK, codes_BT, counts_S, commitment, counted_BT = saved
    counted_BT1 = jnp.broadcast_to(counted_BT, codes_BT.shape)[..., None]
    is_code_BTS = _is_code(codes_BT, len(counts_S)) * counted_BT1
    sums_SK = jnp.einsum("BTS,BTK->SK", is_code_BTS, keys_BTK, precision=lax.Precision.HIGHEST)
    keys_grads_BTK = grads[0] + 2 * commitment * counted_BT1 * (keys_BTK - rounded_BTK)
    return keys_grads_BTK, is_code_BTS.sum((0, 1)), sums_SK, jnp.zeros_like(commitment), jnp.zeros_like(counted_BT)


assign_codes.defvjp(_assign_codes_forward, _assign_codes_backward)


def codes_of(counts_S: jax.Array, sums_SK: jax.Array) -> jax.Array:
    """The codes, `(S, K)`."""
    return sums_SK / counts_S[:, None]


def _is_code(codes_BT: jax.Array, codes: int) -> jax.Array:
    return (codes_BT[..., None] == jnp.arange(codes)[None, None]).astype(jnp.float32)


class Heads(NamedTuple):
    """The inputs of attention: queries for keys and for distances, keys, their codes, and values."""

    q_BTK: jax.Array
    q_distance_BTK: jax.Array
    k_BTK: jax.Array
    codes_BT: jax.Array
    v_BTV: jax.Array


class Memory(NamedTuple):
    """The memory of a unit, of constant size.

    Attributes:
      k_BWK, codes_BW, v_BWV: keys, codes and values of the block before and of the block of the next position.
      mean_BSV, count_BS: mean value and number of the older positions of each code, float32.
    """

    k_BWK: jax.Array
    codes_BW: jax.Array
    v_BWV: jax.Array
    mean_BSV: jax.Array
    count_BS: jax.Array


def empty_memory(
    config: GatedUnits, rows: tuple[int, ...], block: int, dtype: DTypeLike, row_group: ModelParallel = WHOLE
) -> Memory:
    """The memory before the first position, with leading dimensions `rows`, of this device's part of the values."""
    width = 2 * config.embedding_dim // row_group.size
    keys = jnp.zeros((*rows, 2 * block, config.key_width), dtype)
    values = jnp.zeros((*rows, 2 * block, width), dtype)
    means = jnp.zeros((*rows, config.codes, width), jnp.float32)
    empty = Memory(keys, jnp.zeros(keys.shape[:-1], jnp.int32), values, means, means[..., 0])
    return lax.optimization_barrier(empty)  # else XLA folds products with these zeros at compile time, for seconds


def attend(
    heads: Heads,
    r_WK: jax.Array,
    codes_SK: jax.Array,
    memory: Memory,
    position: jax.Array | int = 0,
    known: jax.Array | None = None,
    *,
    limit: int | None = None,
    cache_gradient: bool = True,
) -> tuple[jax.Array, Memory]:
    """Attention of each position to itself and all before it, `(B, T, V)`, and the memory after position `known`.

    The blocks are a scan, in time and memory linear in T. A single position, as in decoding, takes constant time.

    Args:
      heads: inputs at these positions; keys are rounded to codes.
      r_WK: relative keys of the distances 0 to W - 1, or `(B, W, K)`; their products with queries are biases.
      codes_SK: the codes.
      memory: memory of the positions before. `position` begins a block unless T is 1.
      position: number of the first position.
      known: the number of valid positions, those in the memory included; results beyond it are meaningless. None, or
        more than `position + T`: all are valid.
      limit: distances of more than this have no bias; None: all in the window have one.
      cache_gradient: whether gradients flow to values older than the block before.
    """
    positions = heads.k_BTK.shape[1]
    block = r_WK.shape[-2] // 2
    if positions == 1:
        return _attend_one(heads, r_WK, codes_SK, memory, position, limit)
    end = position + positions if known is None else jnp.minimum(known, position + positions)
    first = position // block
    blocks = jax.tree.map(partial(_to_blocks, block=block), heads)
    # The block before the first, all blocks, and an empty block after the last.
    all_blocks = [
        jnp.concatenate([x[None, :, :block], x_blocks, jnp.zeros_like(x_blocks[:1])])
        for x, x_blocks in zip(memory[:3], blocks[2:], strict=True)
    ]
    is_causal_CW = np.arange(2 * block)[None] <= block + np.arange(block)[:, None]

    def one(cache: tuple[jax.Array, jax.Array], xs: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        current, before, number = xs
        if not cache_gradient:
            cache = lax.stop_gradient(cache)
        k_BWK, _, v_BWV = (jnp.concatenate(pair, axis=1) for pair in zip(before, current[2:], strict=True))
        is_seen_CW = is_causal_CW & ((number > 0) | (np.arange(2 * block)[None] >= block))
        bias_BCW = _by_key(_by_distance(current, r_WK, limit))
        out_BCV = _joint(current.q_BTK, k_BWK, v_BWV, bias_BCW, is_seen_CW, codes_SK, *cache)
        is_added = (number > 0) & ((number + 1) * block <= end)
        return _added(*cache, before[1], before[2], is_added), out_BCV

    befores = [x[:-2] for x in all_blocks]
    xs = (blocks, befores, first + jnp.arange(len(befores[0])))
    cache, out_NBCV = lax.scan(jax.checkpoint(one, prevent_cse=False), (memory.mean_BSV, memory.count_BS), xs)
    out_BTV = out_NBCV.swapaxes(0, 1).reshape(out_NBCV.shape[1], -1, out_NBCV.shape[3])[:, :positions]
    before, current = (
        [lax.dynamic_index_in_dim(x, end // block - first + i, keepdims=False) for x in all_blocks] for i in (0, 1)
    )
    window = [jnp.concatenate(pair, axis=1) for pair in zip(before, current, strict=True)]
    return out_BTV, Memory(window[0], window[1], window[2], *cache)


def _attend_one(
    heads: Heads, r_WK: jax.Array, codes_SK: jax.Array, memory: Memory, position: jax.Array | int, limit: int | None
) -> tuple[jax.Array, Memory]:
    block = r_WK.shape[-2] // 2
    slot = block + position % block
    window = [
        lax.dynamic_update_slice_in_dim(x, new, slot, axis=1) for x, new in zip(memory[:3], heads[2:], strict=True)
    ]
    memory = Memory(window[0], window[1], window[2], *memory[3:])
    bias_B1W = jnp.flip(_by_distance(heads, r_WK, limit), -1)  # for the last slot
    bias_B1W = lax.dynamic_slice_in_dim(
        jnp.pad(bias_B1W, ((0, 0), (0, 0), (0, block))), 2 * block - 1 - slot, 2 * block, 2
    )
    slots_1W = np.arange(2 * block)[None]
    is_seen_1W = (slots_1W <= slot) & ((slots_1W >= block) | (jnp.asarray(position) >= block))
    out_B1V = _joint(heads.q_BTK, memory.k_BWK, memory.v_BWV, bias_B1W, is_seen_1W, codes_SK, *memory[3:])

    def next_block(memory: Memory) -> Memory:
        before = [x[:, :block] for x in memory[:3]]
        is_added = position >= block
        window = [jnp.concatenate([x[:, block:], jnp.zeros_like(x[:, block:])], axis=1) for x in memory[:3]]
        return Memory(window[0], window[1], window[2], *_added(*memory[3:], before[1], before[2], is_added))

    return out_B1V, lax.cond((position + 1) % block == 0, next_block, lambda memory: memory, memory)


def _joint(
    q_BTK: jax.Array,
    k_BWK: jax.Array,
    v_BWV: jax.Array,
    bias_BTW: jax.Array,
    is_seen_TW: jax.Array | np.ndarray,
    codes_SK: jax.Array,
    mean_BSV: jax.Array,
    count_BS: jax.Array,
) -> jax.Array:
    """One softmax over the window and the codes of everything older, `(B, T, V)`.

    A code of n positions has n equal scores: one score plus log n.
    """
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    near_BTW = jnp.where(is_seen_TW[None], product("BTK,BWK->BTW", q_BTK, k_BWK) + bias_BTW, LOWEST)
    log_count_B1S = jnp.log(jnp.maximum(count_BS, 1))[:, None]
    far_BTS = product("BTK,SK->BTS", q_BTK, codes_SK.astype(q_BTK.dtype)) + log_count_B1S
    far_BTS = jnp.where(count_BS[:, None] > 0, far_BTS, LOWEST)
    probabilities = jax.nn.softmax(jnp.concatenate([near_BTW, far_BTS], axis=-1)).astype(v_BWV.dtype)
    window = k_BWK.shape[1]
    out_BTV = product("BTW,BWV->BTV", probabilities[..., :window], v_BWV)
    return (out_BTV + product("BTS,BSV->BTV", probabilities[..., window:], mean_BSV.astype(v_BWV.dtype))).astype(
        v_BWV.dtype
    )


def _added(
    mean_BSV: jax.Array, count_BS: jax.Array, codes_BC: jax.Array, v_BCV: jax.Array, is_added: jax.Array | bool
) -> tuple[jax.Array, jax.Array]:
    """Means and counts with one more block added; means, because sums would grow without bound."""
    is_code_BCS = _is_code(codes_BC, count_BS.shape[1]) * is_added
    sums_BSV = jnp.einsum("BCS,BCV->BSV", is_code_BCS.astype(v_BCV.dtype), v_BCV, preferred_element_type=jnp.float32)
    new_count_BS = count_BS + is_code_BCS.sum(1)
    share_BS1 = 1 / jnp.maximum(new_count_BS, 1)[..., None]
    return mean_BSV * (count_BS[..., None] * share_BS1) + sums_BSV * share_BS1, new_count_BS


def _to_blocks(x_BT: jax.Array, block: int) -> jax.Array:
    """`(N, B, C, ...)`, padded with zeros."""
    padding = [(0, 0), (0, -x_BT.shape[1] % block), *[(0, 0)] * (x_BT.ndim - 2)]
    padded = jnp.pad(x_BT, padding)
    return padded.reshape(x_BT.shape[0], -1, block, *x_BT.shape[2:]).swapaxes(0, 1)


def _by_distance(heads: Heads, r_WK: jax.Array, limit: int | None) -> jax.Array:
    product = "BTK,WK->BTW" if r_WK.ndim == 2 else "BTK,BWK->BTW"
    bias_BTW = jnp.einsum(product, heads.q_distance_BTK, r_WK, preferred_element_type=jnp.float32)
    if limit is None:
        return bias_BTW
    return jnp.where((np.arange(bias_BTW.shape[-1]) <= limit)[None, None], bias_BTW, 0)


def _by_key(bias_BCW: jax.Array) -> jax.Array:
    """From biases by distance to biases by key, for a window whose second half are the queries' positions.

    The distance of query c and key w is C + c - w; keys after the query get an arbitrary finite bias. A reshape,
    because the gradient of a look-up would be a scatter. Source: Dai et al., Transformer-XL, arXiv 1901.02860,
    appendix B.
    """
    rows, block, window = bias_BCW.shape
    padded = jnp.pad(jnp.flip(bias_BCW, -1), ((0, 0), (0, 0), (1, 0)))
    return padded.reshape(rows, window + 1, block)[:, 1:].reshape(rows, block, window)


def _distance_features(window: int, width: int, base: float) -> np.ndarray:
    """Sines and cosines of each distance, float32 `(W, K)` (Vaswani et al., arXiv 1706.03762, section 3.5)."""
    angles = np.arange(window)[:, None] * base ** (-np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class GatedUnit(nn.Module):
    """Single-head attention whose output is multiplied by a gate: attention and MLP in one.

    The devices of a tensor group compute the same queries, keys and codes; each has a part of the values and the gate.
    """

    config: GatedUnits
    dtype: DTypeLike
    row_group: ModelParallel = WHOLE

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        memory: Memory | None,
        position: jax.Array | int,
        known: jax.Array | None,
        keys_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Memory]:
        """The output for the residual stream, `(B, T, D)`, and the memory; `memory=None` is an empty one.

        `keys_B` has a dropout key for each row; None for no dropout.
        """
        config = self.config
        width = self.config.key_width
        # Queries and keys have norm K^(1/4), so their products are at most the root of K.
        scale = width**-0.25
        h_BTD = self.row_group.gather_positions(make_norm(config, self.dtype, "norm")(x_BTD))
        rows, positions, dim = h_BTD.shape
        part = 2 * dim // self.row_group.size
        kinds = (("query", Axes((EMBED, _KEYS), Role.QUERY)), ("key", Axes((EMBED, _KEYS))))
        q_BTK, k_BTK = (self._normed(self._dense(width, name, axes)(h_BTD)) * scale for name, axes in kinds)
        to_values = Axes((EMBED, VALUES))
        codes_SK = jnp.zeros((0, width))
        codes_BT = jnp.zeros((rows, positions), jnp.int32)
        if config.codes:
            counts_S = self.variable(CODEBOOK, "counts", jnp.ones, (config.codes,)).value
            sums_SK = self.variable(CODEBOOK, "sums", jnp.ones, (config.codes, width)).value
            commitment = self.get_variable(CODEBOOK, "commitment", 0.0)
            codes_SK = lax.stop_gradient(codes_of(counts_S, sums_SK))
            counted_BT = self.row_group.zero_if_duplicate(jnp.ones((rows, positions)))
            k_BTK, codes_BT = assign_codes(k_BTK, counts_S, sums_SK, commitment, counted_BT)
        v_BTV = nn.silu(self._dense(part, "value", to_values)(h_BTD))
        gate_BTV = nn.silu(self._dense(part, "gate", to_values)(h_BTD))
        for_keys_K, for_distances_K = (
            self.param(name, named(nn.initializers.zeros, _KEYS), (width,)) * scale
            for name in ("key_bias", "distance_bias")
        )
        q_distance_BTK = (q_BTK + for_distances_K[None, None]).astype(self.dtype)
        q_BTK = (q_BTK + for_keys_K[None, None]).astype(self.dtype)
        block = config.vq_block if memory is not None else min(config.vq_block, max(positions, 2))
        features = _distance_features(2 * block, config.distance_width or width, config.distance_base)
        features_WK = jnp.asarray(features, self.dtype)
        if keys_B is not None and config.distance_dropout:  # then each row has its own
            features_WK = jnp.broadcast_to(features_WK[None], (rows, *features_WK.shape))
            features_WK = dropout(features_WK, config.distance_dropout, keys_B)
        r_WK = self._dense(width, "distance", Axes(("distances", _KEYS)))(features_WK) * scale
        if memory is None:
            memory = empty_memory(config, (rows,), block, self.dtype, self.row_group)
        heads = Heads(q_BTK, q_distance_BTK, k_BTK.astype(self.dtype), codes_BT, v_BTV)
        limit = block if config.distance_limit == "block" else None
        options: Any = {"limit": limit, "cache_gradient": config.cache_gradient}
        out_BTV, memory = attend(heads, r_WK, codes_SK, memory, position, known, **options)
        out_BTD = self._dense(dim, "attention_out", Axes((VALUES, EMBED), Role.RESIDUAL_OUT))(out_BTV * gate_BTV)
        return self.row_group.sum_positions(out_BTD), memory

    def _dense(self, features: int, name: str, axes: Axes) -> nn.Dense:
        init = kernel_init(self.config, name, axes)
        return nn.Dense(features, False, dtype=self.dtype, kernel_init=init, name=name)

    def _normed(self, x: jax.Array) -> jax.Array:
        return nn.RMSNorm(self.config.norm_epsilon, dtype=jnp.float32, use_scale=False)(x)
