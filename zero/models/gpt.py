"""A decoder-only transformer that knows nothing of sharding.

Pre-LayerNorm blocks, stacked by `nn.scan` and rematerialised. The tied vocabulary is a stack as well, of chunks of
rows, so that float32 logits never exist for more than one chunk. `lift` is applied to the class of every part that owns
parameters, before it is rematerialised and stacked: this is where a caller may change how parameters are stored.

Shapes are named by suffix:
  B rows, T positions of a row, S positions that are attended to, D embedding, H heads, K head dimension, L layers,
  C vocabulary rows of a chunk
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from zero.models.attention import blockwise_attention, dense_attention, dropout

Lift = Callable[[type[nn.Module], str], type[nn.Module]]

# Top-level subtrees of the parameters whose leaves have a leading dimension: of layers, of chunks of the vocabulary.
BLOCKS, VOCABULARY = "blocks", "vocabulary"
STACKED = (BLOCKS, VOCABULARY)

# What of a layer is kept for the backward pass besides its input, by name; the rest is computed again. With "none"
# there is no checkpoint at all: one that keeps everything still copies and rounds what it keeps. "nested" is for
# callers that run the layers in groups and keep only the inputs of groups; by itself it is "full".
REMAT: dict[str, Callable[..., bool] | None] = {
    "full": None,
    "nested": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "none": None,
}


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """One size of the family; the keys of an entry in `conf/model_config.yaml`.

    Attributes:
      embedding_dim: D.
      vocab_size: tokens; need not divide by anything.
      num_head: H; divides `embedding_dim`.
      block_size: the longest context, T.
      dropout: of attention probabilities and of both residual outputs.
      N: layers, L.
      alibi_attn: ALiBi (arXiv 2108.12409); False for learned positions.
      vocab_chunks: parts that the vocabulary is looked up and scored in; more parts need less memory.
      embedding_norm: a LayerNorm behind the embedding, as BLOOM has it (arXiv 2211.05100, section 3.2.3).
      norm_epsilon: of every LayerNorm.
    """

    embedding_dim: int
    vocab_size: int
    num_head: int
    block_size: int
    dropout: float
    N: int
    alibi_attn: bool = True
    vocab_chunks: int = 1
    embedding_norm: bool = False
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "vocab_size", "num_head", "block_size", "N", "vocab_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if (self.vocab_chunks - 1) * self.chunk_rows >= self.vocab_size:
            raise ValueError(f"vocab_chunks {self.vocab_chunks} leave one without any of vocab_size {self.vocab_size}")
        if self.embedding_dim % self.num_head:
            raise ValueError(f"embedding_dim {self.embedding_dim} does not divide into num_head {self.num_head} heads")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.norm_epsilon <= 0:
            raise ValueError(f"norm_epsilon must be more than 0, got {self.norm_epsilon}")

    @property
    def chunk_rows(self) -> int:
        return -(-self.vocab_size // self.vocab_chunks)


class Cache(NamedTuple):
    """Keys and values of the positions so far, one entry per layer: float `(L, B, S, H, K)`."""

    k_LBSHK: jax.Array
    v_LBSHK: jax.Array


def init_cache(config: GPTConfig, rows: int, positions: int, dtype: DTypeLike) -> Cache:
    """An empty cache for `rows` rows of up to `positions` positions."""
    head_dim = config.embedding_dim // config.num_head
    k = jnp.zeros((config.N, rows, positions, config.num_head, head_dim), dtype)
    return Cache(k, k)


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual stream."""

    config: GPTConfig
    dtype: DTypeLike
    blockwise_from: int | None = None

    @nn.compact
    def __call__(
        self,
        carry: tuple[jax.Array, Cache | None],
        layer: jax.Array,
        keys_B: jax.Array | None,
        position: jax.Array | int,
    ) -> tuple[tuple[jax.Array, Cache | None], None]:
        config = self.config
        x_BTD, cache = carry
        if keys_B is not None:
            keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, layer)
        site_keys = [None if keys_B is None else jax.vmap(jax.random.fold_in, (0, None))(keys_B, i) for i in range(3)]

        def dense(features: int, name: str, stddev: float = 0.02) -> nn.Dense:
            return nn.Dense(features, dtype=self.dtype, kernel_init=nn.initializers.normal(stddev), name=name)

        def norm(name: str) -> nn.LayerNorm:
            return nn.LayerNorm(config.norm_epsilon, dtype=self.dtype, name=name)

        # GPT-2: each of the 2 N residual outputs adds variance, so each starts smaller.
        residual_stddev = 0.02 / math.sqrt(2 * config.N)

        h_BTD = norm("norm_attention")(x_BTD)
        heads = (*x_BTD.shape[:2], config.num_head, config.embedding_dim // config.num_head)
        q_BTHK, k_BSHK, v_BSHK = (
            dense(config.embedding_dim, name)(h_BTD).reshape(heads) for name in ("query", "key", "value")
        )
        if cache is not None:
            # The whole cache is carried from layer to layer, so that only the new positions are written.
            start = (layer, 0, position, 0, 0)
            cache = Cache(
                *(lax.dynamic_update_slice(c, x[None], start) for c, x in zip(cache, (k_BSHK, v_BSHK), strict=True))
            )
            k_BSHK, v_BSHK = (lax.dynamic_index_in_dim(c, layer, keepdims=False) for c in cache)
        is_blockwise = self.blockwise_from is not None and q_BTHK.shape[1] >= self.blockwise_from
        attended_BTHK = (blockwise_attention if is_blockwise else dense_attention)(
            q_BTHK,
            k_BSHK,
            v_BSHK,
            position,
            has_alibi=config.alibi_attn,
            dropout_rate=config.dropout,
            keys_B=site_keys[0],
        )
        attended_BTD = dense(config.embedding_dim, "attention_out", residual_stddev)(attended_BTHK.reshape(x_BTD.shape))
        x_BTD = x_BTD + dropout(attended_BTD, config.dropout, site_keys[1])

        h_BTD = norm("norm_mlp")(x_BTD)
        h_BTF = nn.gelu(dense(4 * config.embedding_dim, "mlp_in")(h_BTD), approximate=True)
        h_BTD = dense(config.embedding_dim, "mlp_out", residual_stddev)(h_BTF)
        return (x_BTD + dropout(h_BTD, config.dropout, site_keys[2]), cache), None


class VocabularyChunk(nn.Module):
    """`chunk_rows` rows of the tied table, from token `first` on; one turn of a scan over the vocabulary."""

    config: GPTConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, embedded_BTD: Any, first: jax.Array, tokens_BT: Any, x_BTD: Any
    ) -> tuple[jax.Array | None, jax.Array | tuple[jax.Array, jax.Array, jax.Array] | None]:
        """Without `x_BTD` embeds the tokens, without tokens scores `x_BTD`, with both scores it against the tokens.

        Embedding adds the rows of those tokens that lie in this chunk to the carry. Scoring returns float32 logits
        `(B, T, C)`, minus infinity past the vocabulary; against tokens only the chunk's part of a cross-entropy:
        the log-sum-exp of its logits, the token's own logit where it is here, and the largest, each `(B, T)`.
        """
        rows = self.config.chunk_rows
        table_CD = self.param("table", nn.initializers.normal(0.02), (rows, self.config.embedding_dim))
        if x_BTD is None:
            row_BT = tokens_BT - first
            inside_BT1 = ((row_BT >= 0) & (row_BT < rows))[..., None]
            # In float32, because the gradient of a row is a sum over every place that the token has in the batch.
            found_BTD = jnp.take(table_CD.astype(jnp.float32), row_BT, axis=0, mode="clip")
            return embedded_BTD + jnp.where(inside_BT1, found_BTD, 0), None

        x_BTD, table_CD = x_BTD.astype(self.dtype), table_CD.astype(self.dtype)
        logits_BTC = jnp.einsum("BTD,CD->BTC", x_BTD, table_CD, preferred_element_type=jnp.float32)
        is_token_C = first + jnp.arange(rows) < self.config.vocab_size
        logits_BTC = jnp.where(is_token_C[None, None], logits_BTC, -jnp.inf)
        if tokens_BT is None:
            return embedded_BTD, logits_BTC
        is_target_BTC = jnp.arange(rows)[None, None] == (tokens_BT - first)[..., None]
        target_BT = jnp.sum(jnp.where(is_target_BTC, logits_BTC, 0), axis=-1)
        most_BT = lax.stop_gradient(jnp.max(logits_BTC, axis=-1))
        return embedded_BTD, (jax.nn.logsumexp(logits_BTC, axis=-1), target_BT, most_BT)


class Positions(nn.Module):
    """Learned positions."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, position: jax.Array | int) -> jax.Array:
        table_TD = self.param(
            "table", nn.initializers.normal(0.02), (self.config.block_size, self.config.embedding_dim)
        )
        return x_BTD + lax.dynamic_slice_in_dim(table_TD, position, x_BTD.shape[1])[None]


class GPT(nn.Module):
    """Tokens in, negative log-likelihoods out.

    Attributes:
      config: the size.
      dtype: of activations and matrix products; parameters are made in float32.
      lift: `lift(module_class, name)` returns the class to use in its place; by default the class itself.
      remat: what of a block is computed once more in the backward pass: "full" or "nested" for all of it, "dots"
        for all but matrix products with parameters, "none" for nothing, with the layers unrolled.
      blockwise_from: the number of query positions from which attention is blockwise; None for never.
    """

    config: GPTConfig
    dtype: DTypeLike = jnp.float32
    lift: Lift = lambda module_class, name: module_class
    remat: str = "full"
    blockwise_from: int | None = None

    def setup(self) -> None:
        config = self.config
        self.vocabulary = nn.scan(
            nn.remat(self.lift(VocabularyChunk, VOCABULARY), prevent_cse=False),
            variable_axes={True: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
        )(config, self.dtype)
        if not config.alibi_attn:
            self.positions = self.lift(Positions, "positions")(config)
        if config.embedding_norm:
            self.embedding_norm = self.lift(nn.LayerNorm, "embedding_norm")(config.norm_epsilon, dtype=self.dtype)
        block = self.lift(Block, BLOCKS)
        self.blocks = nn.scan(
            block if self.remat == "none" else nn.remat(block, prevent_cse=False, policy=REMAT[self.remat]),
            variable_axes={True: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=config.N,
            # What a loop keeps for the backward pass is copied into stacks and out of them again.
            unroll=config.N if self.remat == "none" else 1,
        )(config, self.dtype, self.blockwise_from)
        self.norm = self.lift(nn.LayerNorm, "norm")(config.norm_epsilon, dtype=self.dtype)

    def __call__(self, tokens_BT: jax.Array, targets_BT: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Negative log-likelihood of each target in nats, float32 `(B, T)`; one dropout key per row, or none."""
        return self.scores(tokens_BT, targets_BT, keys_B)[0]

    def scores(
        self, tokens_BT: jax.Array, targets_BT: jax.Array, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Negative log-likelihood of each target in nats, float32 `(B, T)`, and whether it is the most likely token."""
        x_BTD = self.embed(tokens_BT)
        (x_BTD, _), _ = self.blocks((x_BTD, None), jnp.arange(self.config.N), keys_B, 0)
        return self.score(x_BTD, targets_BT)

    def score(self, x_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`scores` from what leaves the last block, `(B, T, D)`."""
        # Every chunk adds to the gradient of x, so that sum is kept in float32.
        x_BTD = self.norm(x_BTD).astype(jnp.float32)
        _, (lse_CBT, target_CBT, most_CBT) = self.vocabulary(None, self._first_rows(), targets_BT, x_BTD)
        target_BT = target_CBT.sum(0)
        return jax.nn.logsumexp(lse_CBT, axis=0) - target_BT, target_BT >= most_CBT.max(0)

    def logits(
        self,
        tokens_BT: jax.Array,
        cache: Cache | None = None,
        position: jax.Array | int = 0,
        last: jax.Array | int = -1,
    ) -> tuple[jax.Array, Cache | None]:
        """Logits after column `last`, float32 `(B, V)`, and the cache with the positions of `tokens_BT` added."""
        x_BTD, cache = self.hidden(tokens_BT, None, cache, position)
        last_B1D = lax.dynamic_slice_in_dim(x_BTD, last % x_BTD.shape[1], 1, axis=1)
        _, logits_CB1C = self.vocabulary(None, self._first_rows(), None, last_B1D)
        logits_BV = jnp.moveaxis(logits_CB1C[:, :, 0], 0, 1).reshape(len(tokens_BT), -1)
        return logits_BV[:, : self.config.vocab_size], cache

    def hidden(
        self,
        tokens_BT: jax.Array,
        keys_B: jax.Array | None,
        cache: Cache | None = None,
        position: jax.Array | int = 0,
    ) -> tuple[jax.Array, Cache | None]:
        """The normalised residual stream after the last block, `(B, T, D)`, and the cache with these positions."""
        x_BTD = self.embed(tokens_BT, position)
        (x_BTD, cache), _ = self.blocks((x_BTD, cache), jnp.arange(self.config.N), keys_B, position)
        return self.norm(x_BTD), cache

    def embed(self, tokens_BT: jax.Array, position: jax.Array | int = 0) -> jax.Array:
        """What enters the first block, `(B, T, D)`."""
        x_BTD = jnp.zeros((*tokens_BT.shape, self.config.embedding_dim), jnp.float32)
        x_BTD, _ = self.vocabulary(x_BTD, self._first_rows(), tokens_BT, None)
        if not self.config.alibi_attn:
            x_BTD = self.positions(x_BTD, position)
        if self.config.embedding_norm:
            x_BTD = self.embedding_norm(x_BTD)
        return x_BTD.astype(self.dtype)

    def _first_rows(self) -> jax.Array:
        return jnp.arange(self.config.vocab_chunks) * self.config.chunk_rows
