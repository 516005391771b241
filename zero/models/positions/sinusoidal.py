"""Sines and cosines of each position, added to embeddings.

Shapes are named by suffix: B rows, T positions, D embedding
"""

from __future__ import annotations

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from zero.base.keys import key, positive
from zero.models.axes import Role, named
from zero.models.part import Sizes
from zero.models.positions.kind import PositionKind
from zero.models.positions.numbers import position_numbers


@dataclass(frozen=True)
class Sinusoidal(Sizes):
    """The key of sines and cosines of positions, or of distances."""

    distance_base: float = key(
        10_000.0,
        positive(),
        "base of the wavelengths of distances, and of positions: sinusoidal",
    )


def sinusoids(positions: jax.Array, width: int, base: float) -> jax.Array:
    """Sines and cosines of each position, float32 `(..., width)` (Vaswani et al., arXiv 1706.03762, section 3.5).

    >>> sinusoids(jnp.arange(2), 2, 10_000.0).round(3).tolist()
    [[0.0, 1.0], [0.8410000205039978, 0.5400000214576721]]
    """
    angles = positions[..., None] * (base ** (-np.arange(0, width, 2) / width)).astype(np.float32).reshape(
        (1,) * positions.ndim + (-1,)
    )
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Sinusoids(nn.Module):
    """Sines and cosines of each position, times a learned scale (Hua et al., arXiv 2202.10447, which starts at 0)."""

    config: Sinusoidal

    @nn.compact
    def __call__(self, x_BTD: jax.Array, position: jax.Array | int, starts_BT: jax.Array | None = None) -> jax.Array:
        scale = self.param("scale", named(nn.initializers.zeros, role=Role.POSITIONS), ())
        positions_BT = position_numbers(position, x_BTD.shape[1])[None] - (0 if starts_BT is None else starts_BT)
        return x_BTD + scale * sinusoids(positions_BT, self.config.embedding_dim, self.config.distance_base)


SINUSOIDAL = PositionKind(added=Sinusoids)
