"""A device's rows: tokens, targets, document starts, dropout keys."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Rows = jax.Array | np.ndarray  # `(rows, ...)`, on a device or on the host


class Separators(NamedTuple):
    """Where documents start within a row.

    Attributes:
      starts: the tokens that begin a document. They are predicted from the document before.
      ends: the tokens after which a document begins; its first token is not a target.
    """

    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


UNDIVIDED = Separators()


class Entry(NamedTuple):
    """An input of an objective besides tokens: an array of `Batch.extra`.

    Attributes:
      name: in `Batch.extra`.
      source: its origin, an entry of `zero.run.columns.COLUMNS`; empty for a member of the shards.
      of: the unit of its values: "row", "example", or "position" of a row.
      shape: of a value.
    """

    name: str
    source: str = ""
    of: str = "row"
    shape: tuple[int, ...] = ()
    dtype: str = "float32"

    def struct(self, rows: int, positions: int, texts: int) -> jax.ShapeDtypeStruct:
        """The shape of the entry for `rows` rows of `positions` positions, with `texts` texts per example.

        >>> Entry("label", of="example", dtype="int32").struct(8, 16, 2)
        ShapeDtypeStruct(shape=(4,), dtype=int32)
        """
        leading = {"row": (rows,), "example": (rows // texts,), "position": (rows, positions)}[self.of]
        return jax.ShapeDtypeStruct((*leading, *self.shape), jnp.dtype(self.dtype))


class RowPart(NamedTuple):
    """The part of its rows that a batch has, and the model's memory of earlier parts.

    Attributes:
      number: int32, from 0 on.
      memory: `ShardedGPT.empty_memory` before part 0.
    """

    number: jax.Array
    memory: Any


class Batch(NamedTuple):
    """The rows of one device.

    Attributes:
      tokens: int32 `(rows, context)`: rows of the data, or pieces of them in the staged warmup; with
        `ShardedGPT.last_target` one token more. A token t that is read but not predicted is `~t`, that is -1 - t;
        padding is -1, read as token 0.
      first_row: int32, the index of the first of them in the global batch.
      extra: the objective's other inputs (`Objective.reads`), by name, cut and placed like the rows.
      part: of an update on a part of each row; None: on whole rows.
    """

    tokens: Rows
    first_row: jax.Array | np.ndarray
    extra: Mapping[str, Rows] = {}
    part: RowPart | None = None

    def first_clock(self, clock: jax.Array) -> jax.Array:
        """The clock of the first update on these rows: a row's masks are the same in all its parts."""
        if self.part is None:
            return clock
        return clock - self.part.number


def token_ids(tokens: Rows) -> jax.Array:
    """The tokens to read, whether or not they are predicted.

    >>> token_ids(np.asarray([[7, ~7, -1]])).tolist()
    [[7, 7, 0]]
    """
    return jnp.maximum(tokens, ~tokens)


def next_tokens(tokens: Rows) -> jax.Array:
    """The target of each position; negative where nothing is scored."""
    return jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)


def document_starts(tokens: jax.Array, separators: Separators) -> jax.Array | None:
    """The column where the document of each token starts, int32 of the shape of `tokens`, `(rows, context)`.

    None without separators: rows are not divided.

    >>> document_starts(jnp.asarray([[5, 6, 0, 7, 0, 0, 8]]), Separators(starts=(0,))).tolist()
    [[0, 0, 2, 2, 4, 5, 5]]
    >>> document_starts(jnp.asarray([[5, 6, 0, 7, 0, 0, 8]]), Separators(ends=(0,))).tolist()
    [[0, 0, 0, 3, 3, 5, 6]]
    """
    if not any(separators):
        return None
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    is_start = _is_one_of(tokens, separators.starts) | follows_end(tokens, separators)
    return lax.cummax(jnp.where(is_start, columns, 0), axis=1)


def follows_end(tokens: jax.Array, separators: Separators) -> jax.Array:
    """Whether each token is the first after one of `separators.ends`; `tokens` are ids, `(rows, context)`.

    >>> follows_end(jnp.asarray([[5, 0, 7, 0, 0]]), Separators(ends=(0,))).tolist()
    [[False, False, True, False, True]]
    """
    is_end = _is_one_of(tokens, separators.ends)
    return jnp.pad(is_end[:, :-1], ((0, 0), (1, 0)))


def _is_one_of(tokens: jax.Array, values: Sequence[int]) -> jax.Array:
    none = jnp.zeros(tokens.shape, bool)
    return functools.reduce(jnp.logical_or, [tokens == value for value in values], none)


def row_keys(step_key: jax.Array, batch: Batch) -> jax.Array:
    """One dropout key per row, from its index in the global batch, independent of devices, hosts and micro-batches."""
    rows = batch.first_row + jnp.arange(batch.tokens.shape[0])
    return jax.vmap(jax.random.fold_in, (None, 0))(step_key, rows)
