"""The interface between models and groups of devices, which do not import each other.

A model calls these methods wherever its computation may be cut; the groups are in `zero.partition.collectives`. The
default methods are for a device that shares its rows with no group; a group overrides some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")
Draw = Callable[[tuple[int, ...]], jax.Array]  # from a shape to an array, such as random numbers


class Rounding(Protocol):
    """Numbers of few bits with one scale per line."""

    def numbers(self, x: jax.Array, largest: jax.Array) -> jax.Array:
        """`x` as numbers, from the largest magnitude of each line, float32 with size 1 along the line."""

    def scales(self, largest: jax.Array) -> jax.Array:
        """The factors of the numbers."""


class RoundedWeight(NamedTuple):
    """A matrix as devices send it for an 8-bit product: `numbers * scales`, with a scale for each output.

    Attributes:
      flow: an array of the matrix's shape that receives its gradient; its values are not read.
      numbers: `(inputs, outputs)`, of 8 bits.
      scales: float32 `(1, outputs)`.
    """

    flow: jax.Array
    numbers: jax.Array
    scales: jax.Array

    def reshaped(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> RoundedWeight:
        """The same with inputs and outputs of these dimensions."""
        shape = (*inputs, *outputs)
        scales = self.scales.reshape(*(1,) * len(inputs), *outputs)
        return RoundedWeight(self.flow.reshape(shape), self.numbers.reshape(shape), scales)


class ModelParallel(Protocol):
    """A group of devices that compute the same rows, seen from one of them.

    It may cut heads, the MLP's width and the vocabulary into parts (`size`), and positions into pieces. Between layers
    the residual stream may have other positions than inside attention and MLP.
    """

    @property
    def size(self) -> int:
        """The number of parts of heads, of the MLP's width and of the vocabulary."""
        return 1

    @property
    def pieces(self) -> int:
        """The number of contiguous runs of positions of a device inside attention."""
        return 1

    @property
    def ring(self) -> int:
        """The number of devices that keys and values visit in turn."""
        return 1

    def for_positions(self, positions: int) -> ModelParallel:
        """The same group for rows of this many positions."""
        return self

    def with_all_positions(self) -> ModelParallel:
        """The same group, with all positions on each device: for inference."""
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

    def stack(self, x: jax.Array) -> jax.Array:
        """The arrays of all devices with different parts, in a new leading dimension."""
        return x[None]

    def of_heads(self, draw: Draw, shape: tuple[int, ...]) -> jax.Array:
        """This device's heads `(H, ...)` of an array that `draw` makes for all heads."""
        return self.part(draw((shape[0] * self.size, *shape[1:])), 0)

    def of_positions(self, draw: Draw, shape: tuple[int, ...]) -> jax.Array:
        """This device's positions `(T, ...)` of the stream, of an array that `draw` makes for all positions."""
        return draw(shape)

    def input_positions(self, x_BT: jax.Array) -> jax.Array:
        """Maps whole rows to the positions of the model's inputs on this device."""
        return x_BT

    def stream_positions(self, x_BT: jax.Array) -> jax.Array:
        """Maps the positions of the model's inputs to the positions of the stream."""
        return x_BT

    def stream_numbers(self, first: jax.Array | int, count: int) -> jax.Array | int:
        """The index of the first of `count` positions of the stream; all indices, `(T,)`, if they have gaps."""
        return first

    def attended_numbers(self, first: jax.Array | int, count: int) -> jax.Array | int:
        """Like `stream_numbers`, for the positions inside attention."""
        return first

    def numbers(self, count: int, turn: jax.Array | int = 0) -> jax.Array:
        """The positions of this device's keys after this many turns of the ring, int32 `(pieces, count / pieces)`."""
        return jnp.arange(count, dtype=jnp.int32)[None]

    def gather_positions(self, x_BTD: jax.Array) -> jax.Array:
        """Maps the positions of the stream to the positions inside attention and MLP."""
        return x_BTD

    def sum_positions(self, x_BTD: jax.Array) -> jax.Array:
        """The transpose of `gather_positions`: the sum of all parts at the positions of the stream."""
        return x_BTD

    def ring_shift(self, tree: Tree) -> Tree:
        """The arrays of the previous device in the ring."""
        return tree

    def head_swap(self, *heads: int) -> HeadParallel | None:
        """The swap for these numbers of query and key heads; None if positions are not swapped for heads."""
        return None

    def zero_if_duplicate(self, x_BT: jax.Array) -> jax.Array:
        """Zeros except in this device's share of the positions that the group has in common.

        A psum then counts each position once.
        """
        return x_BT


class HeadParallel(Protocol):
    """Around attention, devices exchange their positions of all heads for all positions of some heads."""

    @property
    def row_group(self) -> ModelParallel:
        """The group inside attention, with this device's heads."""

    def to_heads(self, x_BTHK: jax.Array) -> jax.Array:
        """Maps this device's positions of all heads to all positions of its heads."""

    def to_positions(self, x_BTHK: jax.Array) -> jax.Array:
        """The inverse of `to_heads`."""

    def whole_rows(self, x_BT: jax.Array) -> jax.Array:
        """All positions, from the devices' own."""


class ExpertParallel(Protocol):
    """A group of devices with different rows, each of which computes some of the experts for all of these rows."""

    @property
    def size(self) -> int:
        """The number of devices, and of parts of the experts."""
        return 1

    def to_experts(self, x_BECD: jax.Array) -> jax.Array:
        """Maps places of all experts in this device's rows to places of its experts in the rows of the group."""
        return x_BECD

    def from_experts(self, x_BECD: jax.Array) -> jax.Array:
        """The inverse of `to_experts`."""
        return x_BECD

    def most(self, x: jax.Array) -> jax.Array:
        """The maximum over the devices of the group, or over all devices."""
        return x


class Whole(ModelParallel):
    """A device that shares its rows with no group."""


class Alone(ExpertParallel):
    """A device that has all experts."""


WHOLE = Whole()
ALONE = Alone()
