"""Bytes per device of parameters, optimizer state and gradients at each stage, from shapes only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from zero.base.text_table import in_columns
from zero.partition.layout import Layout, LeafLayout, PyTree, derive_layout, make_layout


class MemoryRow(NamedTuple):
    """Bytes per device at one stage.

    Attributes:
      stage: 0 to 3.
      compute_dtype: dtype of gathered parameters and of matrix products.
      parameters: master weights held between steps.
      state: optimizer state held between steps.
      gathered: gathered parameters alive during a step; at stage 3 two layers of the largest subtree.
      gradients: gradients alive at the end of the backward pass.
    """

    stage: int
    compute_dtype: str
    parameters: int
    state: int
    gathered: int
    gradients: int

    @property
    def total(self) -> int:
        return self.parameters + self.state + self.gathered + self.gradients


@dataclasses.dataclass(frozen=True)
class Memory:
    """A `MemoryRow` for each stage and precision; `print` shows a table."""

    rows: tuple[MemoryRow, ...]

    def __str__(self) -> str:
        names = ("stage", "compute", "parameters", "state", "gathered", "gradients", "total")
        return "\n".join(in_columns([names, *map(_cells, self.rows)]))


def _cells(row: MemoryRow) -> tuple[str, ...]:
    sizes = (row.parameters, row.state, row.gathered, row.gradients, row.total)
    return (str(row.stage), row.compute_dtype, *(f"{size:,}" for size in sizes))


def memory(
    tree: PyTree,
    tx: optax.GradientTransformation,
    shards: int,
    *,
    stacked: Iterable[str] = (),
    compute_dtypes: Sequence[DTypeLike] = (jnp.float32, jnp.bfloat16),
) -> Memory:
    """Bytes per device of parameters, optimizer state and gradients at stages 0 to 3, without building anything.

    Activations are not counted. If the compute dtype is the parameters' own, stage 0 has no second copy of them.

    Args:
      tree: master weights: arrays or `jax.ShapeDtypeStruct`s with whole shapes.
      tx: the optimizer, not wrapped.
      shards: the number of devices that one copy is spread over.
      stacked: as for `make_layout`.
      compute_dtypes: each has four rows.

    >>> import jax
    >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    >>> print(memory(params, optax.adam(1e-3), shards=8, compute_dtypes=[jnp.float32]))
    stage  compute  parameters      state   gathered  gradients       total
        0  float32   4,194,304  8,388,612          0  4,194,304  16,777,220
        1  float32     524,288  1,048,580  4,194,304  4,194,304   9,961,476
        2  float32     524,288  1,048,580  4,194,304    524,288   6,291,460
        3  float32     524,288  1,048,580  4,194,304    524,288   6,291,460
    """
    return memory_of(make_layout(tree, shards, stacked=stacked), tx, compute_dtypes)


def memory_of(sharded: Layout, tx: optax.GradientTransformation, compute_dtypes: Sequence[DTypeLike]) -> Memory:
    """`memory` of parameters with this layout, which may be a layout for groups."""
    rows = []
    for dtype in [np.dtype(dtype) for dtype in compute_dtypes]:
        whole = sum(math.prod(leaf.gathered_shape) * _compute_itemsize(leaf, dtype) for leaf in sharded.leaves)
        for stage in range(4):
            layout = sharded if stage else sharded.whole()
            is_cast = any(leaf.dtype != dtype for leaf in layout.leaves)
            gathered = (whole if is_cast else 0, whole, whole, min(whole, _two_layers(layout, dtype)))[stage]
            parameters = layout.bytes_per_device()
            # From whole shapes, because the state may depend on them, as Adafactor's factors do.
            state_bytes = derive_layout(tx.init, layout).bytes_per_device()
            gradients = whole if stage < 2 else parameters
            rows.append(MemoryRow(stage, dtype.name, parameters, state_bytes, gathered, gradients))
    return Memory(tuple(rows))


def _compute_itemsize(leaf: LeafLayout, dtype: np.dtype) -> int:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return dtype.itemsize
    return leaf.dtype.itemsize


def _two_layers(layout: Layout, dtype: np.dtype) -> int:
    sizes: dict[Any, int] = {}
    for leaf in layout.leaves:
        layer = leaf.gathered_shape[1:] if leaf.stacked else leaf.gathered_shape
        count = min(2, leaf.shape[0]) if leaf.stacked else 1
        sizes[leaf.path[:1]] = sizes.get(leaf.path[:1], 0) + count * math.prod(layer) * _compute_itemsize(leaf, dtype)
    return max(sizes.values(), default=0)
