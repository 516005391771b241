"""What a kind of positions is: where in a transformer the number of a position enters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from zero.partition.model_parallel import ModelParallel


class Place(NamedTuple):
    """Where the queries and keys of one layer are.

    Attributes:
      layer: number of the layer, which may be traced.
      numbers: numbers of the positions, as `position_numbers` takes them.
      row: positions of a whole row, or of the cache.
      starts_BT: the column where the segment of each position starts; None for one segment per row.
      kernel: the kernel of attention whose rotation may be fused; None for none.
    """

    layer: jax.Array | int
    numbers: jax.Array | int
    row: int
    starts_BT: jax.Array | None
    kernel: str | None


@dataclass(frozen=True)
class PositionKind:
    """A kind of positions: an entry of `KINDS`. What it leaves out does not happen.

    Attributes:
      added: a module, made with the model's configuration, that adds positions to embeddings `(B, T, D)`:
        `(x_BTD, position, starts_BT)` to `x_BTD`.
      turned: `(configuration, x_BTHK, y_BSGK, place)` to queries and keys that carry their positions.
      bias: `(configuration, module, row_group)` to a bias of scores by bucket of distance, `(C, H)` of this device's
        heads; its parameters are those of the module, a layer.
      has_alibi: scores fall linearly with distance.
      limits_context: there are no positions beyond `block_size`.
      mistakes: of the configuration, where this kind is chosen.
    """

    added: type[nn.Module] | None = None
    turned: Callable[[Any, jax.Array, jax.Array, Place], tuple[jax.Array, jax.Array]] | None = None
    bias: Callable[[Any, nn.Module, ModelParallel], jax.Array] | None = None
    has_alibi: bool = False
    limits_context: bool = False
    mistakes: Callable[[Any], Iterator[str]] = lambda config: iter(())

    @property
    def is_in_attention(self) -> bool:
        """Whether attention adds the positions: to queries and keys, or to scores. No other mixer does."""
        return self.turned is not None or self.bias is not None or self.has_alibi
