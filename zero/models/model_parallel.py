"""How a model is cut over a group of devices that compute on the same rows. By default it is not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

# `Whole`, or something with its attributes and methods: `TensorGroup` and `ContextGroup` of zero.partition.collectives.
Cut = Any


class Whole:
    """A group of one device. `TensorGroup` and `ContextGroup` say what each method does on several.

    Attributes:
      size: the number of parts into which heads, the MLP's width and the vocabulary are cut.
      pieces: of a row that is cut, on each device; each is of neighbouring positions.
      ring: the number of devices that have different positions, and whose keys and values all of them need.
    """

    size = 1
    pieces = 1
    ring = 1

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

    def numbers(self, count: int, turn: jax.Array | int = 0) -> jax.Array:
        """The positions of the keys here after so many steps of the ring, int32 `(pieces, count / pieces)`."""
        return jnp.arange(count, dtype=jnp.int32)[None]

    def head_swap(self, *heads: int) -> Any:
        """How devices swap their positions of all heads for all positions of their heads; None where they do not."""
        return None

    def input_positions(self, x_BT: jax.Array) -> jax.Array:
        """The positions of whole rows that are this device's input of the model."""
        return x_BT

    def stream_positions(self, x_BT: jax.Array) -> jax.Array:
        """This device's positions of the stream between layers, of what the model takes."""
        return x_BT

    def stream_numbers(self, first: jax.Array | int, count: int) -> jax.Array | int:
        """The number of the first of the `count` positions of the stream, or `(T,)`, of each where they have gaps."""
        return first

    def attended_numbers(self, first: jax.Array | int, count: int) -> jax.Array | int:
        """The number of the first of the `count` positions inside attention, or `(T,)`, of each."""
        return first

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
        """This device's share of the positions of what all devices of the group hold, and 0 elsewhere.

        So a psum counts each position once.
        """
        return x_BT


WHOLE = Whole()
