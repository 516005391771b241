"""Context groups: devices that compute different positions of the same rows. Called inside pmap.

A row of T positions is cut into 2c pieces, and device i of a group of c has the pieces i and 2c - 1 - i: in causal
attention late positions cost more than early ones, so each device has the same share of the work. Parameters are not
cut: gradients are summed over all devices, as without groups.

Sources: ring attention, arXiv 2310.01889; striped pieces for balance, arXiv 2311.09431.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from zero.partition.collectives.axis import Axis, ring_pairs
from zero.partition.collectives.tensor_group import TensorGroup
from zero.partition.model_parallel import WHOLE, Draw, HeadParallel, ModelParallel, Tree


@dataclasses.dataclass(frozen=True)
class ContextGroup(ModelParallel):
    """This device's context group, on an axis whose `context` is more than 1.

    >>> import numpy as np
    >>> n = jax.local_device_count()
    >>> group = ContextGroup(Axis("batch", (1, n), context=n))
    >>> rows = np.broadcast_to(np.arange(4 * n), (n, 1, 4 * n))  # the same whole row on each device
    >>> own = jax.pmap(group.input_positions, "batch")(rows)
    >>> own.shape == (n, 1, 4) and own[0, 0, -1] == 4 * n - 1
    Array(True, dtype=bool)

    Attributes:
      axis: the pmap axis; a group consists of neighbors on it.
    """

    axis: Axis
    pieces = 2

    @property
    def ring(self) -> int:
        return self.axis.context

    def with_all_positions(self) -> ModelParallel:
        return WHOLE

    def rank(self) -> jax.Array:
        """The index of this device in its group."""
        return lax.axis_index(self.axis.name) % self.ring

    def numbers(self, count: int, turn: jax.Array | int = 0) -> jax.Array:
        """The positions of the keys on this device after this many turns, int32 `(2, count / 2)`.

        Raises:
          ValueError: `count` is odd.
        """
        if count % self.pieces:
            raise ValueError(f"a device has {count} positions of a row; expected an even number")
        owner = (self.rank() - turn) % self.ring
        length = count // self.pieces
        firsts = length * jnp.stack([owner, 2 * self.ring - 1 - owner])
        return (firsts[:, None] + jnp.arange(length)[None]).astype(jnp.int32)

    def head_swap(self, *heads: int) -> Ulysses | None:
        if any(count % self.ring for count in heads):
            return None
        return Ulysses(self)

    def ring_shift(self, tree: Tree) -> Tree:
        """The arrays of the previous device of the group; the first device gets those of the last."""
        pairs = ring_pairs(self.axis.context_groups())
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis.name, pairs), tree)

    def input_positions(self, x_BT: jax.Array) -> jax.Array:
        """This device's positions `(B, T / c)` of whole rows.

        Raises:
          ValueError: rows do not divide into two pieces for each device.
        """
        return self._own(x_BT, 1)

    def _own(self, x: jax.Array, dim: int) -> jax.Array:
        length, left = divmod(x.shape[dim], self.pieces * self.ring)
        if left:
            raise ValueError(f"rows of {x.shape[dim]} positions do not divide into {self.pieces * self.ring} pieces")
        firsts = length * self.rank(), length * (2 * self.ring - 1 - self.rank())
        return jnp.concatenate([lax.dynamic_slice_in_dim(x, first, length, dim) for first in firsts], dim)

    def stream_numbers(self, first: jax.Array | int, count: int) -> jax.Array:
        return first + self.numbers(count).ravel()

    def attended_numbers(self, first: jax.Array | int, count: int) -> jax.Array:
        """The same: a device has the same positions inside attention."""
        return self.stream_numbers(first, count)

    def of_positions(self, draw: Draw, shape: tuple[int, ...]) -> jax.Array:
        return self._own(draw((shape[0] * self.ring, *shape[1:])), 0)


@dataclasses.dataclass(frozen=True)
class Ulysses(HeadParallel):
    """The devices of a context group swap their positions of all heads for all positions of their part of the heads.

    Source: DeepSpeed-Ulysses, arXiv 2309.14509.
    """

    group: ContextGroup

    @property
    def row_group(self) -> TensorGroup:
        """This device's heads: the first device of a group has the first ones."""
        axis = self.group.axis
        return TensorGroup(Axis.with_tensor_groups(axis.name, axis.size, axis.context), cuts_positions=False)

    def to_heads(self, x_BTHK: jax.Array) -> jax.Array:
        """From `(B, T / c, H, K)` to `(B, T, H / c, K)`, with positions in order."""
        return self._in_order(self._all_to_all(x_BTHK, 2, 1))

    def to_positions(self, x_BTHK: jax.Array) -> jax.Array:
        rows, positions, heads, width = x_BTHK.shape
        early, late = jnp.split(x_BTHK.reshape(rows, 2 * self.group.ring, -1, heads, width), 2, axis=1)
        by_device = jnp.stack([early, late[:, ::-1]], axis=2).reshape(rows, positions, heads, width)
        return self._all_to_all(by_device, 1, 2)

    def _all_to_all(self, x: jax.Array, split: int, concat: int) -> jax.Array:
        axis = self.group.axis
        return lax.all_to_all(x, axis.name, split, concat, tiled=True, axis_index_groups=axis.context_groups())

    def whole_rows(self, x_BT: jax.Array) -> jax.Array:
        """`(B, T)` from each device's `(B, T / c)`."""
        groups = self.group.axis.context_groups()
        return self._in_order(lax.all_gather(x_BT, self.group.axis.name, axis=1, tiled=True, axis_index_groups=groups))

    def _in_order(self, x_BT: jax.Array) -> jax.Array:
        """Positions in order, from the two pieces of each device in turn."""
        by_piece = x_BT.reshape(x_BT.shape[0], self.group.ring, 2, -1, *x_BT.shape[2:])
        return jnp.concatenate([by_piece[:, :, 0], by_piece[:, ::-1, 1]], axis=1).reshape(x_BT.shape)
