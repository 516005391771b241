"""The parts of a transformer layer, and the interface of mixers.

Shapes are named by suffix:
  B rows, T positions, D embedding, X any other dimension
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax import lax

from zero.models.adapters import AdaptedDense
from zero.models.attention.tpu_kernels import TPU_KERNELS
from zero.models.axes import EMBED, Axes, Role, named
from zero.models.delta_keys import Delta
from zero.models.elements import Dense, Residual, row_major
from zero.models.experts import Mixture
from zero.models.latent_keys import Latent
from zero.models.layer import Layer
from zero.models.linear_keys import Linear
from zero.models.norms import Norms
from zero.models.parametrization import kernel_init


@dataclass(frozen=True)
class Transformer(Latent, Delta, Linear, Norms, Residual, Mixture):
    """The keys of a transformer layer: the keys of its parts."""


class TransformerPart(Layer):
    """A part of a transformer layer with its own products."""

    config: Transformer

    def laid_out(self, x: jax.Array) -> jax.Array:
        """`x` as products and kernels on TPU read it, forward and backward; source: docs/decisions/attention.md."""
        if self.kernel not in TPU_KERNELS:
            return x
        return row_major(x)

    def dense(
        self,
        x_BTX: jax.Array,
        features: tuple[int, ...],
        name: str,
        axes: Axes,
        keys_B: jax.Array | None,
        use_bias: bool,
        total: Any = None,
    ) -> jax.Array:
        """The output of a dense layer; arguments as for `Dense`, axes of its kernel, `keys_B` are for its adapter."""
        options: Any = {"dtype": self.dtype, "name": name, "total": total}
        options["kernel_init"] = kernel_init(self.config, name, replace(axes, adaptable=True))
        options["bias_init"] = named(nn.initializers.zeros, axes.names[-1])
        if self.adapters is not None and self.adapters.covers(name) and not axes.fresh:
            options |= {
                "adapters": self.adapters,
                "keys_B": keys_B,
                "stack": None if total is None else self.row_group.stack,
            }
            y_BTX = AdaptedDense(math.prod(features), use_bias, **options)(lax.collapse(x_BTX, 2))
            return y_BTX.reshape(*y_BTX.shape[:2], *features)
        return Dense(features, use_bias, product=self.product, **options)(x_BTX)

    def residual_dense(
        self, x_BTX: jax.Array, name: str, inputs: str, keys_B: jax.Array | None, use_bias: bool
    ) -> jax.Array:
        """The output of a dense layer whose input is cut, along the axis `inputs`."""
        axes = Axes((inputs, EMBED), Role.RESIDUAL_OUT)
        return self.dense(
            x_BTX, (self.config.embedding_dim,), name, axes, keys_B, use_bias, self.row_group.sum_positions
        )


class LayerContext(NamedTuple):
    """The place of a mixer, and the rows that it sees.

    Attributes:
      layer: the number of its layer.
      entry: its number among the layers with the same mixer, in their cache.
      position: of the first column of the rows.
      starts_BT: the column where the segment of each position starts; None for one segment per row.
      keys_B: dropout keys; None for no dropout.
      adapter_keys_B: the same for the inputs of adapters.
    """

    layer: jax.Array | int
    entry: jax.Array | int
    position: jax.Array | int
    starts_BT: jax.Array | None
    keys_B: jax.Array | None
    adapter_keys_B: jax.Array | None


class Mixer(TransformerPart):
    """The part of a layer in which positions see each other. Its parameters are the layer's own.

    It maps the normalized residual stream `(B, T, D)`, its cache or None, and a `LayerContext` to an addition to the
    stream and the cache with these positions.
    """
