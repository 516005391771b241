"""Numbers of positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def position_numbers(position: jax.Array | int, count: int) -> jax.Array:
    """Position numbers `(T,)`, counted from a first number, or given as an array `(T,)`."""
    return jnp.asarray(position) if jnp.ndim(position) else position + jnp.arange(count)
