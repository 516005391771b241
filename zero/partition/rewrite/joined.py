"""Joined dimensions of which the second is split: a table in chunks, seen as one table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero.partition.layout import Split


@dataclasses.dataclass(frozen=True)
class Joined:
    """The split of `(chunks, rows)` along rows, seen as one dimension of which the first `count` elements count.

    A shard has some rows of every chunk, so its elements are not neighbors. That is why this is not a `Split`: layouts
    and collectives do not take it, and it lacks the sizes from which they compute positions. An array that is split
    like this is moved along `dim`, taken apart (`in_chunks`, `apart`), or gathered; there is no other way to read it.

    Elements from `count` on are padding, such as those of the last chunk.
    """

    dim: int
    count: int
    chunks: int
    rows: int
    shards: int

    @classmethod
    def of(cls, split: Split, chunks: int, dim: int) -> Joined:
        """`split`, joined with the dimension of chunks before it; `dim` is the number of the joined dimension."""
        return cls(dim, chunks * split.size, chunks, split.size, split.shards)

    @property
    def apart(self) -> Split:
        """The split of an array with a dimension of chunks, `dim`, and one of rows after it."""
        return Split(self.dim + 1, self.rows, self.shards)

    @property
    def of_neighbors(self) -> Split:
        """The split of the same dimension into shards of neighbors."""
        return Split(self.dim, self.count, self.shards)

    @property
    def room(self) -> int:
        """How many elements of the chunks are padding."""
        return self.chunks * self.rows - self.count

    def whole_in_chunks(self, full_x: jax.Array) -> jax.Array:
        """The whole array with dimensions of chunks and of rows; rows past the end are zero."""
        padded = jnp.pad(full_x, [(0, self.room if dim == self.dim else 0) for dim in range(full_x.ndim)])
        return self.in_chunks(padded)

    def in_chunks(self, shard_x: jax.Array) -> jax.Array:
        """A shard with dimensions of chunks and of rows."""
        sizes = (self.chunks, shard_x.shape[self.dim] // self.chunks)
        return shard_x.reshape(*shard_x.shape[: self.dim], *sizes, *shard_x.shape[self.dim + 1 :])

    def joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `in_chunks`."""
        return lax.collapse(x, self.dim, self.dim + 2)

    def filled(self, shard_x: jax.Array, shard: jax.Array, fill: Any) -> jax.Array:
        """A shard with `fill` in its padding."""
        row = self.apart.positions(shard)
        position = jnp.arange(self.chunks)[:, None] * self.rows + row[None]
        is_own = ((row < self.rows)[None] & (position < self.count)).reshape(-1)
        is_own = lax.broadcast_in_dim(is_own, shard_x.shape, (self.dim,))
        return jnp.where(is_own, shard_x, jnp.asarray(fill, shard_x.dtype))


def joined_dim(shape: Sequence[int], split: Split, sizes: Sequence[int]) -> int | None:
    """The dimension of a reshaped array that joins the split dimension with the one before it; None for no such one."""
    if split.dim == 0:
        return None
    before = math.prod(shape[: split.dim - 1])
    both = shape[split.dim - 1] * split.size
    dims = [dim for dim, size in enumerate(sizes) if size == both and math.prod(sizes[:dim]) == before]
    if not dims:
        return None
    return dims[0]
