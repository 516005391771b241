"""A reduce-scatter of shifts: XLA for TPU runs a permutation beside products, but never its own reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax


def shifted_sum(x: jax.Array, index: jax.Array, dim: int, name: str, groups: Sequence[Sequence[int]]) -> jax.Array:
    """As `lax.psum_scatter(x, name, scatter_dimension=dim, axis_index_groups=groups, tiled=True)`.

    Partial sums go around the ring of a group, one half of every part in each direction, and each device adds its own
    summand: as many bytes as a reduce-scatter, in 2 (k - 1) permutations for k devices. Sums start at a different
    device for each part, so they round differently.

    Per device: `(..., n, ...)` in, `(..., n / k, ...)` out. Call inside pmap.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009, section 4.

    Args:
      x: this device's summand.
      index: place of this device in its group.
      dim: dimension that is divided.
      name: the pmap axis.
      groups: positions on the axis of the devices of each group, in the order of their parts.
    """
    size = len(groups[0])
    part = x.shape[dim] // size
    halves = [(1, 0, part - part // 2), (-1, part - part // 2, part // 2)] if size > 2 else [(1, 0, part)]

    def around(direction: int, first: int, length: int) -> jax.Array:
        pairs = [(group[i], group[(i + direction) % size]) for group in groups for i in range(size)]

        def own(step: int) -> jax.Array:
            number = (index - direction * step) % size
            return lax.dynamic_slice_in_dim(x, number * part + first, length, dim)

        partial_sum = own(1)
        for step in range(2, size + 1):
            partial_sum = lax.ppermute(partial_sum, name, pairs) + own(step)
        return partial_sum

    return lax.concatenate([around(*half) for half in halves if half[2]], dim)
