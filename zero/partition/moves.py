"""Moves: the steps from a shard of an array to the array that a device computes with, as data.

A gather folds over the moves of a leaf, a scatter over their transposes in reverse (`collectives/arrays.py`). Groups of
`over` devices make a move; neighbors in a group hold shards that are `apart`. For 8 shards:

| leaf                              | moves                                                      |
|-----------------------------------|------------------------------------------------------------|
| split                             | `AllGather(dim, 8)`                                        |
| split, cut by tensor groups of 2  | `AllGather(dim, 4)`: the shards of one half                |
| split, experts in groups of 2     | `AllToAll(expert_dim, dim, 2)`, `AllGather(dim, 4, 2)`     |
| whole                             | none                                                       |
| whole, experts in groups of 2     | `Slice(expert_dim, 2)`                                     |
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Joins the arrays of a group along `dim`. Transpose: a reduce-scatter."""

    dim: int
    over: int
    apart: int = 1


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Divides `split` among a group and joins the received parts along `concat`. Transpose: its inverse."""

    split: int
    concat: int
    over: int


@dataclasses.dataclass(frozen=True)
class Slice:
    """Keeps this device's part of `dim`; no communication. Transpose: zeros in the parts of the others."""

    dim: int
    over: int


Move = AllGather | AllToAll | Slice
