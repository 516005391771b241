"""A learned vector for each position, added to embeddings.

Shapes are named by suffix: B rows, T positions, D embedding
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from zero.models.axes import EMBED, Role, named
from zero.models.parametrization import Initial, table_stddev
from zero.models.positions.kind import PositionKind
from zero.models.positions.numbers import position_numbers


class LearnedPositions(nn.Module):
    """The table of positions."""

    config: Initial

    @nn.compact
    def __call__(self, x_BTD: jax.Array, position: jax.Array | int, starts_BT: jax.Array | None = None) -> jax.Array:
        start = nn.initializers.normal(table_stddev(self.config, "positions"))
        init = named(start, "positions", EMBED, role=Role.POSITIONS)
        table_TD = self.param("table", init, (self.config.block_size, self.config.embedding_dim))
        if starts_BT is None and jnp.ndim(position) == 0:
            return x_BTD + lax.dynamic_slice_in_dim(table_TD, position, x_BTD.shape[1])[None]
        # In float32, because the gradient of a row is a sum over all rows of the batch.
        positions_BT = position_numbers(position, x_BTD.shape[1])[None] - (0 if starts_BT is None else starts_BT)
        return x_BTD + jnp.take(table_TD.astype(jnp.float32), positions_BT, axis=0)


LEARNED = PositionKind(added=LearnedPositions, limits_context=True)
