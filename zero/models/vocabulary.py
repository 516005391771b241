"""The vocabulary: embeddings of tokens, and logits, in chunks of its rows.

Shapes are named by suffix:
  B rows, T positions of a row, D embedding, C vocabulary rows of a chunk, K chosen tokens of a position
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zero.base.keys import at_least, key, positive, zero_or_more
from zero.models.axes import EMBED, VOCAB, Role, named
from zero.models.part import HEAD, STACKS, VOCABULARY, Sizes
from zero.partition.model_parallel import WHOLE, ModelParallel

HEAD_BIAS = "head_bias"
# The largest logit of a position in a chunk, and the chunk's sum of exponentials. The backward pass stores both, which
# are few numbers: after it has computed the logits again it need not go over them once more.
LOG_SUM_EXP = "log_sum_exp"


@dataclass(frozen=True)
class Vocabulary(Sizes):
    """The keys of embeddings and logits."""

    vocab_chunks: int = key(
        1,
        at_least(1),
        "parts in which tokens are embedded and scored, so that the float32 logits of the whole vocabulary "
        "never exist at once (docs/decisions/step-memory.md)",
    )
    tied: bool = key(True, None, "the matrix that embeds tokens also makes the logits")
    scale_embedding: bool = key(False, None, "embeddings are multiplied by the root of embedding_dim")
    embedding_multiplier: float = key(1.0, positive(), "factor of embeddings")
    scale_output: bool = key(
        False,
        None,
        "logits are divided by the root of embedding_dim, the embedding starts with deviation 1",
    )
    output_scale: float = key(1.0, positive(), "logits are multiplied by this")
    head_bias: bool = key(False, None, "a bias of each token's logit")
    logit_cap: float | None = key(None, positive(), "soft cap of the final logits, as attention_cap")
    # PaLM, arXiv 2204.02311, section 5
    z_loss: float = key(
        0.0,
        zero_or_more(),
        "weight of the squared log-sum-exp of the logits; losses are reported without it",
    )

    def mistakes(self) -> Iterator[str]:
        """An empty chunk."""
        if (self.vocab_chunks - 1) * self.chunk_rows >= self.vocab_size:
            yield f"vocab_chunks {self.vocab_chunks} leave one without any of vocab_size {self.vocab_size}"

    @property
    def chunk_rows(self) -> int:
        """Tokens of a chunk."""
        return -(-self.vocab_size // self.vocab_chunks)

    @property
    def logit_divisor(self) -> float:
        """What logits are divided by."""
        return 1 / self.output_scale

    @property
    def stacked(self) -> tuple[str, ...]:
        """Top-level subtrees whose leaves have a leading dimension, of layers or chunks; a model may lack some."""
        return (*STACKS, VOCABULARY) if self.tied else (*STACKS, VOCABULARY, HEAD)


class Chunk(NamedTuple):
    """Where a chunk of the vocabulary begins, and the biases of its logits, `(C,)`, if there are any."""

    first: jax.Array
    bias_C: jax.Array | None = None


class Candidates(NamedTuple):
    """Tokens of each position, int32 `(B, T, K)`, and the sum of their logits in the chunks so far: each is in one."""

    tokens_BTK: jax.Array
    logits_BTK: jax.Array

    @classmethod
    def of(cls, tokens_BTK: jax.Array) -> Candidates:
        """Before the first chunk."""
        return cls(tokens_BTK, jnp.zeros(tokens_BTK.shape, jnp.float32))

    def after(self, logits_BTC: jax.Array, token_C: jax.Array) -> Candidates:
        """With the logits of a chunk whose tokens are consecutive; they are minus infinity past its last token."""
        row_BTK = self.tokens_BTK - token_C[0]
        logits_BTK = jnp.take_along_axis(logits_BTC, jnp.clip(row_BTK, 0, len(token_C) - 1), axis=-1)
        is_here_BTK = (row_BTK >= 0) & (row_BTK < len(token_C)) & jnp.isfinite(logits_BTK)
        return self._replace(logits_BTK=self.logits_BTK + jnp.where(is_here_BTK, logits_BTK, 0))


class TopTokens(NamedTuple):
    """The K largest logits of each position in the chunks so far, in order, and their tokens, int32."""

    logits_BTK: jax.Array
    tokens_BTK: jax.Array

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> TopTokens:
        """Before the first chunk."""
        return cls(jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32))

    def after(self, logits_BTC: jax.Array, token_C: jax.Array) -> TopTokens:
        """With the logits of a chunk."""
        return self.merged(logits_BTC, jnp.broadcast_to(token_C, logits_BTC.shape))

    def merged(self, logits_BTC: jax.Array, tokens_BTC: jax.Array) -> TopTokens:
        """With those of other tokens.

        >>> top = TopTokens.none((1, 1, 2)).merged(jnp.array([[[1.0, 3.0, 2.0]]]), jnp.array([[[5, 6, 7]]]))
        >>> top.logits_BTK.tolist(), top.tokens_BTK.tolist()
        ([[[3.0, 2.0]]], [[[6, 7]]])
        """
        logits_BTC = jnp.concatenate([self.logits_BTK, logits_BTC], axis=-1)
        tokens_BTC = jnp.concatenate([self.tokens_BTK, tokens_BTC], axis=-1)
        logits_BTK, places_BTK = lax.top_k(logits_BTC, self.logits_BTK.shape[-1])
        return TopTokens(logits_BTK, jnp.take_along_axis(tokens_BTC, places_BTK, axis=-1))


class VocabularyChunk(nn.Module):
    """`chunk_rows` rows of a table of tokens, from token `first` on; one iteration of a scan over the vocabulary."""

    config: Vocabulary
    dtype: DTypeLike
    stddev: float
    role: Role
    row_group: ModelParallel = WHOLE

    @nn.compact
    def __call__(
        self, carry: Any, chunk: Chunk, tokens_BT: Any, x_BTD: Any
    ) -> tuple[Any, jax.Array | tuple[jax.Array, jax.Array, jax.Array] | None]:
        """Given only tokens, embeds them; given only `x_BTD`, returns logits; given both, a part of a cross-entropy.

        Embedding adds the embeddings of tokens in this chunk to the carry, `(B, T, D)`. Logits are float32
        `(B, T, C)`, minus infinity past the vocabulary. The chunk's part of a cross-entropy is the log-sum-exp of its
        logits, the target's logit if it is in this chunk, and the largest logit, each `(B, T)`. In a tensor group each
        device has a part of the chunk's tokens. A carry of `Candidates` or `TopTokens` takes what it needs of the
        logits.
        """
        first = chunk.first
        rows = self.row_group.part_size(self.config.chunk_rows)
        first_own = self.row_group.first(rows)
        own_C = first_own + jnp.arange(rows)  # rows of the chunk; padding lies past its end
        init = named(nn.initializers.normal(self.stddev), VOCAB, EMBED, role=self.role)
        table_CD = self.param("table", init, (rows, self.config.embedding_dim))
        if x_BTD is None:
            row_BT = tokens_BT - first - first_own
            end = jnp.minimum(rows, self.config.chunk_rows - first_own)
            inside_BT1 = ((row_BT >= 0) & (row_BT < end))[..., None]
            return carry + jnp.where(inside_BT1, rows_of(table_CD, row_BT), 0), None

        x_BTD = x_BTD.astype(self.dtype)
        table_CD = table_CD.astype(self.dtype)
        logits_BTC = logits_of(x_BTD, table_CD)
        if chunk.bias_C is not None:
            bias_C = jnp.pad(chunk.bias_C, (0, rows * self.row_group.size - len(chunk.bias_C)))
            logits_BTC = logits_BTC + self.row_group.part(bias_C, 0)[None, None]
        if self.config.scale_output:
            logits_BTC = logits_BTC / math.sqrt(self.config.embedding_dim)
        if self.config.output_scale != 1:
            logits_BTC = logits_BTC * self.config.output_scale
        if self.config.logit_cap is not None:
            logits_BTC = self.config.logit_cap * jnp.tanh(logits_BTC / self.config.logit_cap)
        is_token_C = (own_C < self.config.chunk_rows) & (first + own_C < self.config.vocab_size)
        logits_BTC = jnp.where(is_token_C[None, None], logits_BTC, -jnp.inf)
        if carry is not None:
            carry = carry.after(logits_BTC, first + own_C)
        if tokens_BT is None:
            return carry, logits_BTC
        is_target_BTC = is_token_C[None, None] & (own_C[None, None] == (tokens_BT - first)[..., None])
        target_BT = jnp.sum(jnp.where(is_target_BTC, logits_BTC, 0), axis=-1)
        max_logit_BT = checkpoint_name(lax.stop_gradient(jnp.max(logits_BTC, axis=-1)), LOG_SUM_EXP)
        finite_BT = jnp.where(jnp.isfinite(max_logit_BT), max_logit_BT, 0)  # a part of a chunk may be padding alone
        sum_BT = checkpoint_name(jnp.sum(jnp.exp(logits_BTC - finite_BT[..., None]), axis=-1), LOG_SUM_EXP)
        return carry, (jnp.log(sum_BT) + finite_BT, target_BT, max_logit_BT)


@jax.custom_vjp
def logits_of(x_BTD: jax.Array, table_CD: jax.Array) -> jax.Array:
    """Products of activations and rows of a table, float32 `(B, T, C)`.

    The gradient of the logits enters the products of the backward pass in the dtype of their other operand. In float32
    a GPU would multiply at a fifth of the speed; a TPU rounds the operands of such a product to bfloat16 anyway.

    >>> logits_of(jnp.ones((1, 1, 2), jnp.bfloat16), jnp.array([[1, 2], [3, 4]], jnp.bfloat16)).tolist()
    [[[3.0, 7.0]]]
    """
    return jnp.einsum("BTD,CD->BTC", x_BTD, table_CD, preferred_element_type=jnp.float32)


def _logits_and_operands(x_BTD: jax.Array, table_CD: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return logits_of(x_BTD, table_CD), (x_BTD, table_CD)


def _gradients_of_operands(kept: tuple[jax.Array, jax.Array], out_BTC: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTD, table_CD = kept
    out_BTC = out_BTC.astype(table_CD.dtype)
    gradient_BTD = jnp.einsum("BTC,CD->BTD", out_BTC, table_CD, preferred_element_type=jnp.float32)
    gradient_CD = jnp.einsum("BTC,BTD->CD", out_BTC, x_BTD, preferred_element_type=jnp.float32)
    return gradient_BTD.astype(x_BTD.dtype), gradient_CD.astype(table_CD.dtype)


logits_of.defvjp(_logits_and_operands, _gradients_of_operands)


@jax.custom_vjp
def rows_of(table_CD: jax.Array, row_BT: jax.Array) -> jax.Array:
    """Rows of a table, float32 `(B, T, D)`; a number below 0 takes the first row, one beyond the table the last.

    The gradient of a row is a sum over all its occurrences in the batch, in float32.

    >>> rows_of(jnp.array([[1, 2], [3, 4]], jnp.bfloat16), jnp.array([[1, 0, 5]])).tolist()
    [[[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]]
    """
    return jnp.take(table_CD, row_BT, axis=0, mode="clip").astype(jnp.float32)


def _rows_and_their_numbers(table_CD: jax.Array, row_BT: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rows_of(table_CD, row_BT), (row_BT, jnp.zeros((len(table_CD), 0), table_CD.dtype))


def _gradient_of_rows(kept: tuple[jax.Array, jax.Array], out_BTD: jax.Array) -> tuple[jax.Array, None]:
    row_BT, table_C0 = kept
    row_BT = jnp.clip(row_BT, 0, len(table_C0) - 1)
    gradient_CD = jnp.zeros((len(table_C0), out_BTD.shape[-1]), out_BTD.dtype).at[row_BT].add(out_BTD)
    return gradient_CD.astype(table_C0.dtype), None


rows_of.defvjp(_rows_and_their_numbers, _gradient_of_rows)


class HeadBias(nn.Module):
    """A bias of each token's logit, `(chunks, C)`."""

    config: Vocabulary

    @nn.compact
    def __call__(self) -> jax.Array:
        config = self.config
        bias = self.param("bias", named(nn.initializers.zeros, "tokens"), (config.vocab_size,)).astype(jnp.float32)
        padding = config.vocab_chunks * config.chunk_rows - config.vocab_size
        return jnp.pad(bias, (0, padding)).reshape(config.vocab_chunks, -1)
