"""How a model is cut over a group of devices that compute on the same rows. By default it is not."""

from __future__ import annotations

from typing import Any

import jax

# `Whole`, or something with its attributes and methods: `zero.partition.collectives.tensor_group.TensorGroup`.
Cut = Any


class Whole:
    """A group of one device. What each method does on more is said there.

    Attributes:
      size: the number of parts into which heads, the MLP's width and the vocabulary are cut.
    """

    size = 1

    def for_positions(self, positions: int) -> Cut:
        """The cut of rows of so many positions."""
        return self

    def with_all_positions(self) -> Cut:
        """The same without a cut of positions, for inference."""
        return self

    def part_size(self, size: int) -> int:
        """The size of a part of `size`."""
        return size

    def first(self, part_size: int) -> jax.Array | int:
        """Where this device's part begins."""
        return 0

    def part(self, x: jax.Array, dim: int) -> jax.Array:
        """This device's part along a dimension."""
        return x

    def first_position(self, own_positions: int) -> jax.Array | int:
        """Where this device's positions begin."""
        return 0

    def own_positions(self, x_BT: jax.Array) -> jax.Array:
        """This device's positions of all."""
        return x_BT

    def of_positions(self, draw: Any, shape: tuple[int, ...]) -> jax.Array:
        """This device's positions `(T, ...)` of what `draw` makes for all of them."""
        drawn: jax.Array = draw(shape)
        return drawn

    def of_heads(self, draw: Any, shape: tuple[int, ...]) -> jax.Array:
        """This device's heads `(H, ...)` of what `draw` makes for all of them."""
        drawn: jax.Array = draw(shape)
        return drawn

    def gather_positions(self, x_BTD: jax.Array) -> jax.Array:
        """All positions, from each device's."""
        return x_BTD

    def sum_positions(self, x_BTD: jax.Array) -> jax.Array:
        """This device's positions of the sum over the group."""
        return x_BTD

    def stack(self, x: jax.Array) -> jax.Array:
        """That of each device of the group, in a new leading dimension."""
        return x[None]

    def counted_once(self, x_BT: jax.Array) -> jax.Array:
        """Of what all devices of the group have alike, this device's share of the positions; 0 elsewhere."""
        return x_BT


WHOLE = Whole()
