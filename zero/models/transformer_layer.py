"""A transformer layer: a mixer of positions, then an MLP or experts, on the residual stream.

Shapes are named by suffix:
  B rows, T positions, D embedding, F width of the MLP
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from zero.models.axes import EMBED, MLP, Axes
from zero.models.elements import dropout, fold_keys
from zero.models.experts import Experts, ResidualStream, Routing
from zero.models.layer import Layer, options_of
from zero.models.mixer import LayerContext, Transformer, TransformerPart
from zero.models.mixers import MIXERS, Caches
from zero.models.mlp import Scalars, hidden_values
from zero.models.norms import make_norm
from zero.models.part import layer_name
from zero.models.stack import MLP_GATE, MLP_IN


class TransformerLayer(TransformerPart):
    """A mixer and an MLP, each normalized and added to the residual stream.

    Attributes:
      place: its number within a period of layers.
      is_dense: the layer has an MLP in a model with experts.
    """

    place: int = 0
    is_dense: bool = False

    @nn.compact
    def __call__(
        self,
        carry: tuple[ResidualStream, Caches | None],
        layer: jax.Array,
        keys_B: jax.Array | None,
        position: jax.Array | int,
        starts_BT: jax.Array | None = None,
    ) -> tuple[tuple[ResidualStream, Caches | None], None]:
        """`starts_BT` is the column where the segment of each position starts; None for one segment per row."""
        config = self.config
        (x_BTD, routing), caches = carry
        x_BTD = self.laid_out(x_BTD)
        entry = self._routers_before + layer // config.experts_every
        layer = layer + self.first
        keys_B = fold_keys(keys_B, layer)
        site_keys = [fold_keys(keys_B, i) for i in range(4)]

        h_BTD = self.row_group.gather_positions(self._norm("norm_attention", x_BTD))
        site = LayerContext(layer, self._entry(layer), position, starts_BT, site_keys[0], site_keys[3])
        attended_BTD, caches = self._attention(h_BTD, caches, site)
        attended_BTD = self._norm("norm_attention", attended_BTD, is_after=True) * config.residual_multiplier
        sum_BTD = x_BTD + dropout(attended_BTD, config.residual_drop_rate, site_keys[1], self.row_group.of_positions)
        h_BTD = self._norm("norm_mlp", x_BTD if config.parallel_residual else sum_BTD)
        h_BTD = self.row_group.gather_positions(h_BTD)
        if config.experts is None or self.is_dense:
            h_BTD = self._mlp(h_BTD, config.dense_width, site_keys[3])
        else:
            experts_BTD, decided = self._experts(h_BTD, entry)
            routing = jax.tree.map(jnp.add, routing, decided)
            if config.shared_dim is not None:
                experts_BTD = experts_BTD + self._shared(h_BTD, config.shared_dim, site_keys[3])
            h_BTD = experts_BTD
        h_BTD = self._norm("norm_mlp", h_BTD, is_after=True) * config.residual_multiplier
        sum_BTD = sum_BTD + dropout(h_BTD, config.residual_drop_rate, site_keys[2], self.row_group.of_positions)
        return ((sum_BTD, routing), caches), None

    @property
    def _routers_before(self) -> int:
        """Layers with experts before the stack of this one."""
        return 0

    def _norm(self, name: str, x: jax.Array, *, is_after: bool = False) -> jax.Array:
        """Applies the norm before or after a sublayer, if there is one; the latter's name ends in `_after`."""
        if self.config.norm_place == ("before" if is_after else "after"):
            return x
        return make_norm(self.config, self.dtype, name + "_after" * is_after)(x)

    def _attention(
        self, h_BTD: jax.Array, caches: Caches | None, site: LayerContext
    ) -> tuple[jax.Array, Caches | None]:
        """The output of this layer's mixer, and the caches with its own."""
        mixer = MIXERS[self._mixer].module(**options_of(self))
        nn.share_scope(self, mixer)
        if caches is None:
            return mixer(h_BTD, None, site)
        out_BTD, cache = mixer(h_BTD, caches[self._mixer], site)
        return out_BTD, {**caches, self._mixer: cache}

    @property
    def _mixer(self) -> str:
        """An entry of `zero.models.mixers.MIXERS`."""
        return self.config.mixers[self.place % len(self.config.mixers)]

    def _entry(self, layer: jax.Array) -> jax.Array:
        """The number of a layer among those with its mixer."""
        pattern = self.config.mixers
        if len(pattern) == 1:
            return layer
        before = pattern[: self.place % len(pattern)].count(self._mixer)
        return layer // len(pattern) * pattern.count(self._mixer) + before

    def _shared(self, h_BTD: jax.Array, whole_width: int, adapter_keys_B: jax.Array | None) -> jax.Array:
        """The MLP beside experts."""
        gate_BT1 = None
        if self.config.shared_gate:
            gate_BT1 = nn.sigmoid(
                self.dense(h_BTD, (1,), "shared_gate", Axes((EMBED, "gate")), adapter_keys_B, use_bias=False)
            )
        return self._mlp(h_BTD, whole_width, adapter_keys_B, gate_BT1)

    def _mlp(
        self,
        h_BTD: jax.Array,
        whole_width: int,
        adapter_keys_B: jax.Array | None,
        factor_BT1: jax.Array | None = None,
    ) -> jax.Array:
        """The MLP of a layer, or the one beside its experts; `factor_BT1` multiplies its hidden values."""
        config = self.config
        width = (whole_width // self.row_group.size,)
        axes = Axes((EMBED, MLP))
        h_BTF = self.laid_out(self.dense(h_BTD, width, "mlp_in", axes, adapter_keys_B, config.mlp_bias))
        h_BTF = checkpoint_name(h_BTF, MLP_IN)
        gate_BTF = None
        if config.gated:
            gate_BTF = self.dense(h_BTD, width, "mlp_gate", axes, adapter_keys_B, config.mlp_bias)
            gate_BTF = checkpoint_name(gate_BTF, MLP_GATE)
        scalars = Scalars(config, name="activation")()
        h_BTF = hidden_values(config, h_BTF, gate_BTF, scalars)
        if factor_BT1 is not None:
            h_BTF = h_BTF * factor_BT1
        return self.residual_dense(h_BTF, "mlp_out", MLP, adapter_keys_B, config.mlp_bias)

    def _experts(self, h_BTD: jax.Array, entry: jax.Array) -> tuple[jax.Array, Routing]:
        experts = Experts(self.config, self.dtype, self.row_group, self.expert_group, name="experts")
        y_BTD, decided = experts(h_BTD, entry, drops=self.drops)
        return self.row_group.sum_positions(y_BTD), decided


class DenseLayer(TransformerLayer):
    """One of the layers before those with experts."""

    is_dense: bool = True


class MtpLayer(TransformerLayer):
    """The layer of multi-token prediction, after all others."""

    @property
    def _routers_before(self) -> int:
        return self.config.expert_layers - 1


class Period(Layer):
    """A period of layers with different parameters: those of other mixers, or the last one with experts."""

    config: Transformer

    @nn.compact
    def __call__(
        self, carry: tuple[ResidualStream, Caches | None], number: jax.Array, *arguments: Any
    ) -> tuple[tuple[ResidualStream, Caches | None], None]:
        """Like `TransformerLayer`; `number` is the number of the period."""
        config = self.config
        for place in range(config.period):
            is_dense = (place + 1) % config.experts_every > 0
            layer = TransformerLayer(**options_of(self), place=place, is_dense=is_dense, name=layer_name(place))
            carry, _ = layer(carry, number * config.period + place, *arguments)
        return carry, None
