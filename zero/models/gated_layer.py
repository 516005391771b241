"""A layer of gated units, and its memory of the positions before.

Shapes are named by suffix: B rows, T positions of a row, D embedding, L layers, U units of a layer
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from zero.models.elements import drop_rows, dropout, fold_keys, keys_from
from zero.models.experts import ResidualStream
from zero.models.gated_unit import UNITS, GatedUnit, GatedUnits, Memory, empty_memory
from zero.models.layer import Layer
from zero.partition.model_parallel import WHOLE, ModelParallel


class RecurrentState(NamedTuple):
    """The memory of units, and how much of a row is valid.

    Attributes:
      memory: of all units, `(L U, B, ...)`; or, within a layer in training, of its own, `(U, B, ...)`.
      known: the number of valid positions, int32; None: all are.
    """

    memory: Memory
    known: jax.Array | None


def init_recurrent(
    config: GatedUnits, rows: int, known: jax.Array | int, dtype: DTypeLike, cut: ModelParallel = WHOLE
) -> RecurrentState:
    """The state before the first of `known` valid positions, of this device's part of the values."""
    memory = empty_memory(config, (config.N * UNITS, rows), config.vq_block, dtype, cut)
    return RecurrentState(memory, jnp.asarray(known, jnp.int32))


class GatedLayer(Layer):
    """Two gated units on the residual stream; arguments as for `zero.models.transformer_layer.TransformerLayer`."""

    config: GatedUnits

    @nn.compact
    def __call__(
        self,
        carry: tuple[ResidualStream, RecurrentState | None],
        layer: jax.Array,
        keys_B: jax.Array | None,
        position: jax.Array | int,
        starts_BT: jax.Array | None = None,
    ) -> tuple[tuple[ResidualStream, RecurrentState | None], None]:
        """Raises ValueError for segments: the memory beyond the window does not separate them."""
        if starts_BT is not None:
            raise ValueError("gated units do not keep segments of a row apart")
        (x_BTD, routing), state = carry
        keys_B = fold_keys(keys_B, layer)
        for number in range(UNITS):
            unit = GatedUnit(self.config, self.dtype, self.cut, name=f"unit_{number}")
            sites = [fold_keys(keys_B, number + i * UNITS) for i in range(3)]
            if state is None:
                out_BTD, _ = unit(x_BTD, None, position, None, sites[1])
            else:
                place = (UNITS * layer + number) % len(state.memory.count_BS)
                of_unit = partial(lax.dynamic_index_in_dim, index=place, keepdims=False)
                out_BTD, memory = unit(x_BTD, jax.tree.map(of_unit, state.memory), position, state.known, sites[1])
                put = partial(lax.dynamic_update_index_in_dim, index=place, axis=0)
                state = state._replace(memory=jax.tree.map(put, state.memory, memory))
            # Masks of distances and of layers are those of the whole row, also where it comes in parts.
            own_keys_B = keys_from(sites[0], position)
            out_BTD = dropout(out_BTD, self.config.residual_drop_rate, own_keys_B, self.cut.of_positions)
            x_BTD = x_BTD + drop_rows(out_BTD, self.config.layer_dropout, sites[2])
        return ((x_BTD, routing), state), None
