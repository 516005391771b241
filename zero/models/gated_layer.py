"""A mixer that makes whole layers: two gated units, and their memory of the positions before.

Shapes are named by suffix: B rows, T positions of a row, D embedding, L layers, U units of a layer
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from zero.models.elements import drop_rows, dropout, fold_keys, keys_from
from zero.models.experts import ResidualStream
from zero.models.gated_unit import UNITS, GatedUnit, GatedUnits, Memory, empty_memory
from zero.models.layer import Layer
from zero.models.part import GATED_UNITS, own_keys
from zero.partition.model_parallel import ModelParallel


class RecurrentState(NamedTuple):
    """The memory of units, and how much of a row is valid.

    Attributes:
      memory: of all units, `(L U, B, ...)`; or, within a layer in training, of its own, `(U, B, ...)`.
      known: the number of valid positions, int32; None: all are.
    """

    memory: Memory
    known: jax.Array | None


def empty_units(
    config: GatedUnits,
    layers: int,
    rows: int,
    positions: int,
    dtype: DTypeLike,
    row_group: ModelParallel,
    known: jax.Array | int,
) -> RecurrentState:
    """The state before the first of `known` valid positions, of this device's part of the values."""
    memory = empty_memory(config, (layers * UNITS, rows), config.vq_block, dtype, row_group)
    return RecurrentState(memory, jnp.asarray(known, jnp.int32))


def memory_of_parts(config: GatedUnits, rows: int, dtype: DTypeLike, row_group: ModelParallel) -> RecurrentState:
    """The state before the first part of rows, `(L, U, B, ...)`."""
    return RecurrentState(empty_memory(config, (config.N, UNITS, rows), config.vq_block, dtype, row_group), None)


def heads_of_units(config: GatedUnits) -> dict[str, int]:
    """What tensor groups divide."""
    return {"twice embedding_dim": 2 * config.embedding_dim}


OWN_KEYS = frozenset((*(field.name for field in own_keys(GatedUnits)), "distance_base", "head_bias"))
OTHER_KEYS = frozenset(
    (
        *("embedding_dim", "vocab_size", "num_head", "block_size", "dropout", "N", "layer", "alibi_attn", "positions"),
        *("vocab_chunks", "tied", "scale_embedding", "scale_output", "output_scale", "logit_cap", "z_loss"),
        *("init", "head_init", "embedding_dropout", "residual_dropout"),
        *("embedding_norm", "norm_epsilon", "norm", "norm_gains", "final_norm"),
    )
)


def mistakes_of_units(config: Any, has_units: bool) -> Iterator[str]:
    """Positions and heads that units do not have, and a norm that only they have."""
    if has_units:
        if config.alibi_attn or config.positions not in ("none", "sinusoidal") or config.num_head != 1:
            yield f"layer: {GATED_UNITS} needs num_head: 1, alibi_attn: false and positions: none"
    elif config.norm == "rms_biased":
        yield f"norm: rms_biased needs layer: {GATED_UNITS}"


class GatedLayer(Layer):
    """Two gated units on the residual stream; arguments as for `zero.models.transformer_layer.TransformerLayer`."""

    config: GatedUnits

    @nn.compact
    def __call__(
        self,
        carry: tuple[ResidualStream, dict[str, Any] | None],
        layer: jax.Array,
        keys_B: jax.Array | None,
        position: jax.Array | int,
        starts_BT: jax.Array | None = None,
    ) -> tuple[tuple[ResidualStream, dict[str, Any] | None], None]:
        """Raises ValueError for segments: the memory beyond the window does not separate them."""
        if starts_BT is not None:
            raise ValueError("gated units do not keep segments of a row apart")
        (x_BTD, routing), caches = carry
        state = None if caches is None else caches[GATED_UNITS]
        keys_B = fold_keys(keys_B, layer)
        for number in range(UNITS):
            unit = GatedUnit(self.config, self.dtype, self.row_group, name=f"unit_{number}")
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
            out_BTD = dropout(out_BTD, self.config.residual_drop_rate, own_keys_B, self.row_group.of_positions)
            x_BTD = x_BTD + drop_rows(out_BTD, self.config.layer_dropout, sites[2])
        return ((x_BTD, routing), None if caches is None else {**caches, GATED_UNITS: state}), None
