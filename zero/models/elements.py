"""Parts of a model: norms, activations, rotary positions, dropout.

Shapes are named by suffix:
  B rows, T positions of a row, H heads, K head dimension
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zero.model_parallel import WHOLE
from zero.models.config import GPTConfig

Lift = Callable[[type[nn.Module], str], type[nn.Module]]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: nn.gelu(x, approximate=True),
    "gelu_exact": lambda x: nn.gelu(x, approximate=False),
    "relu": nn.relu,
    "squared_relu": lambda x: jnp.square(nn.relu(x)),  # Primer, arXiv 2109.08668, section 3
    "selu": nn.selu,
    "silu": nn.silu,
}


class OffsetRMSNorm(nn.Module):
    """RMSNorm that multiplies by 1 + scale, as in Gemma."""

    epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.zeros, x.shape[-1:])
        x = nn.RMSNorm(self.epsilon, dtype=jnp.float32, use_scale=False)(x)
        return (x * (1 + scale.astype(jnp.float32)).reshape((1,) * (x.ndim - 1) + (-1,))).astype(self.dtype)


def make_norm(config: GPTConfig, dtype: DTypeLike, name: str, lift: Lift | None = None) -> nn.Module:
    """The norm of this model; `lift` is applied to its class if it has parameters."""
    norms: dict[str, tuple[type[nn.Module], dict[str, bool]]] = {
        "layer": (nn.LayerNorm, {"use_scale": config.norm_gains, "use_bias": config.norm_gains}),
        "rms": (nn.RMSNorm, {"use_scale": config.norm_gains}),
        "rms_offset": (OffsetRMSNorm, {}) if config.norm_gains else (nn.RMSNorm, {"use_scale": False}),
    }
    kind, options = norms[config.norm]
    if lift is not None and config.norm_gains:
        kind = lift(kind, name)
    made: Any = kind
    return made(epsilon=config.norm_epsilon, dtype=dtype, name=None if lift else name, **options)


def dropout(
    x: jax.Array,
    rate: float,
    keys_B: jax.Array | None,
    of_whole: Callable[..., jax.Array] = WHOLE.of_positions,
) -> jax.Array:
    """Dropout with one key per row, so that a mask depends only on its sequence; without keys the identity.

    If `x` is a part of its rows, `of_whole` cuts the same part from the masks of whole rows.
    """
    if keys_B is None or rate == 0:
        return x

    def is_kept(key: jax.Array) -> jax.Array:
        return of_whole(partial(jax.random.bernoulli, key, 1 - rate), x.shape[1:])

    keep = jax.vmap(is_kept)(keys_B)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def drop_rows(x: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """Dropout of whole rows; without keys the identity (LayerDrop, arXiv 1909.11556, per row)."""
    if keys_B is None or rate == 0:
        return x
    keep_B = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate))(keys_B)
    return jnp.where(keep_B.reshape(-1, *(1,) * (x.ndim - 1)), x / (1 - rate), 0).astype(x.dtype)


def rotary_frequencies(config: GPTConfig) -> np.ndarray:
    """Radians per position, float32, one for each pair of the dimensions that are rotated.

    Source: RoFormer, arXiv 2104.09864, section 3.2.2. Scaled as in Llama 3.1 (arXiv 2407.21783, section 3.4.1):
    wavelengths beyond `original / low` are stretched by the factor, those below `original / high` are kept, and those
    between are interpolated.

    >>> rotary_frequencies(GPTConfig(8, 10, 2, 16, 0.0, 1, alibi_attn=False, positions="rotary")).tolist()
    [1.0, 0.009999999776482582]
    """
    rotated = int(config.rotary_fraction * config.head_width)
    frequencies = config.rotary_base ** -(np.arange(0, rotated, 2) / rotated)
    if config.rotary_scaling is not None:
        factor, low, high, original = config.rotary_scaling
        turns = original * frequencies / (2 * math.pi)  # in the context of the original training
        kept = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    return frequencies.astype(np.float32)


def position_numbers(position: jax.Array | int, count: int) -> jax.Array:
    """Position numbers `(T,)`, counted from a first number, or given as an array `(T,)`."""
    return jnp.asarray(position) if jnp.ndim(position) else position + jnp.arange(count)


def sinusoids(positions: jax.Array, width: int, base: float) -> jax.Array:
    """Sines and cosines of each position, float32 `(..., width)` (Vaswani et al., arXiv 1706.03762, section 3.5).

    >>> sinusoids(jnp.arange(2), 2, 10_000.0).round(3).tolist()
    [[0.0, 1.0], [0.8410000205039978, 0.5400000214576721]]
    """
    angles = positions[..., None] * (base ** (-np.arange(0, width, 2) / width)).astype(np.float32).reshape(
        (1,) * positions.ndim + (-1,)
    )
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def rotate(
    x_BTHK: jax.Array, position: jax.Array | int, frequencies: np.ndarray, starts_BT: jax.Array | None = None
) -> jax.Array:
    """Rotary positions: pairs `(i, i + R / 2)` of the first R dimensions of each head turn with the position.

    `position` as in `position_numbers`; with segments, positions count from the start of their segment.
    """
    half = len(frequencies)
    angles = position_numbers(position, x_BTHK.shape[1]).astype(jnp.float32)[None, :, None, None]
    if starts_BT is not None:
        angles = angles - starts_BT.astype(jnp.float32)[..., None, None]
    angles = angles * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = (x_BTHK[..., part].astype(jnp.float32) for part in (slice(half), slice(half, 2 * half)))
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x_BTHK.dtype), x_BTHK[..., 2 * half :]], axis=-1)
