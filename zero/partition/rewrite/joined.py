"""Joined dimensions of which the second is split: a table in chunks, seen as one table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zero.partition.layout import Split


@dataclasses.dataclass(frozen=True)
class Joined(Split):
    """The split of `(chunks, rows)` along rows, seen as one dimension of which `size` elements count.

    A shard has some rows of every chunk, so its elements are not neighbors. Elements from `size` on are padding, such
    as those of the last chunk.
    """

    chunks: int
    rows: int

    @classmethod
    def of(cls, split: Split, chunks: int, dim: int) -> Joined:
        """`split`, joined with the dimension of chunks before it; `dim` is the number of the joined dimension."""
        return cls(dim, chunks * split.size, split.shards, chunks, split.size)

    @property
    def apart(self) -> Split:
        """The split of an array with a dimension of chunks, `dim`, and one of rows after it."""
        return Split(self.dim + 1, self.rows, self.shards)

    @property
    def of_neighbors(self) -> Split:
        """The split of the same dimension into shards of neighbors."""
        return Split(self.dim, self.size, self.shards)

    @property
    def shard_size(self) -> int:
        return self.chunks * self.apart.shard_size

    def positions(self, shard: jax.Array | int) -> jax.Array:
        row = self.apart.positions(shard)
        in_table = jnp.arange(self.chunks)[:, None] * self.rows + row[None]
        return jnp.where((row < self.rows)[None], in_table, self.chunks * self.rows).reshape(-1)

    def whole_in_chunks(self, full_x: jax.Array) -> jax.Array:
        """The whole array with dimensions of chunks and of rows; rows past the end are zero."""
        missing = self.chunks * self.rows - self.size
        padded = jnp.pad(full_x, [(0, missing if dim == self.dim else 0) for dim in range(full_x.ndim)])
        return self.in_chunks(padded)

    def in_chunks(self, shard_x: jax.Array) -> jax.Array:
        """A shard with dimensions of chunks and of rows."""
        return shard_x.reshape(*shard_x.shape[: self.dim], self.chunks, -1, *shard_x.shape[self.dim + 1 :])

    def joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `in_chunks`."""
        return x.reshape(*x.shape[: self.dim], -1, *x.shape[self.dim + 2 :])


def joined_dim(shape: Sequence[int], split: Split, sizes: Sequence[int]) -> int | None:
    """The dimension of a reshaped array that joins the split dimension with the one before it; None for no such one."""
    if split.dim == 0 or isinstance(split, Joined):
        return None
    before = math.prod(shape[: split.dim - 1])
    both = shape[split.dim - 1] * split.size
    dims = [dim for dim, size in enumerate(sizes) if size == both and math.prod(sizes[:dim]) == before]
    if not dims:
        return None
    return dims[0]
