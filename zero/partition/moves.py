"""Moves: the steps from a device's shard of an array to what the device computes with. Data, without devices.

A gather folds over the moves of a leaf, a scatter over their transposes in reverse (`collectives/arrays.py`). A move
is made by groups of `over` devices; in the order of a group, shards are `apart` from one to the next. For 8 shards:

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
    """Divides `split` among a group and joins what each device receives along `concat`. Transpose: the way back."""

    split: int
    concat: int
    over: int


@dataclasses.dataclass(frozen=True)
class Slice:
    """Keeps this device's part of `dim`; no communication. Transpose: zeros in the parts of the others."""

    dim: int
    over: int


Move = AllGather | AllToAll | Slice
