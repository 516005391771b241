"""Parts of a model: norms, activations, rotary positions, dropout.

Shapes are named by suffix:
  B rows, T positions of a row, H heads, K head dimension
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from zero.model_parallel import WHOLE, ModelParallel
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


def _clamped_swiglu(gate: jax.Array, x: jax.Array) -> jax.Array:
    gate = jnp.minimum(gate, 7)
    x = jnp.clip(x, -7, 7)
    return gate * nn.sigmoid(1.702 * gate) * (x + 1)


# Of a gate and an input, where it is not the activation of the gate times the input.
_GATED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"clamped_swiglu": _clamped_swiglu}


def gated(activation: str, gate: jax.Array, x: jax.Array) -> jax.Array:
    """The hidden values of a gated MLP."""
    return _GATED[activation](gate, x) if activation in _GATED else ACTIVATIONS[activation](gate) * x


@jax.custom_vjp
def product(x_BTX: jax.Array, w_XF: jax.Array) -> jax.Array:
    """`x @ w`, whose gradient of `w` is fast on CPU too (docs/decisions/cpu-speed.md)."""
    return x_BTX @ w_XF


def _product_forward(x_BTX: jax.Array, w_XF: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x_BTX @ w_XF, (x_BTX, w_XF)


def _product_backward(saved: tuple[jax.Array, jax.Array], grad_BTF: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTX, w_XF = saved
    x_XN = x_BTX.reshape(-1, x_BTX.shape[-1]).T
    # XLA for CPU would multiply with the transpose of its result, for which its library has no fast product.
    x_XN = lax.platform_dependent(x_XN, cpu=lax.optimization_barrier, default=lambda x_XN: x_XN)
    return grad_BTF @ w_XF.T, x_XN @ grad_BTF.reshape(-1, grad_BTF.shape[-1])


product.defvjp(_product_forward, _product_backward)


class Dense(nn.Module):
    """`nn.Dense` of inputs and outputs that may have two dimensions, heads and their width; its kernel is a matrix.

    Between a product with a matrix and a kernel of attention XLA for TPU copies heads to another place, forward and
    backward; between one with two dimensions and the kernel it does not.

    Attributes:
      features: outputs, `(D,)` or `(H, K)`.
      use_bias, dtype, kernel_init: as for `nn.Dense`.
      total: sums partial products before the bias is added; None where they are whole.
    """

    features: tuple[int, ...]
    use_bias: bool
    dtype: DTypeLike
    kernel_init: Any
    total: Callable[[jax.Array], jax.Array] | None = None

    @nn.compact
    def __call__(self, x_BTX: jax.Array) -> jax.Array:
        """`(B, T, D)` or `(B, T, H, K)` in, `(B, T, *features)` out."""
        inputs = x_BTX.shape[2:]
        kernel = self.param("kernel", self.kernel_init, (math.prod(inputs), math.prod(self.features)))
        kernel = kernel.astype(self.dtype).reshape(*inputs, *self.features)
        x_BTX = x_BTX.astype(self.dtype)
        y_BTX = product(x_BTX, kernel) if kernel.ndim == 2 else jnp.tensordot(x_BTX, kernel, len(inputs))
        y_BTX = y_BTX if self.total is None else self.total(y_BTX)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (math.prod(self.features),))
            y_BTX = y_BTX + bias.astype(self.dtype).reshape(1, 1, *self.features)
        return y_BTX


class OffsetRMSNorm(nn.Module):
    """RMSNorm that multiplies by 1 + scale, as in Gemma."""

    epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.zeros, x.shape[-1:])
        x = nn.RMSNorm(self.epsilon, dtype=jnp.float32, use_scale=False)(x)
        return (x * (1 + scale.astype(jnp.float32)).reshape((1,) * (x.ndim - 1) + (-1,))).astype(self.dtype)


class BiasedRMSNorm(nn.Module):
    """RMSNorm with a gain and a bias, as in Transformer-VQ's branch main."""

    epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        vector = (1,) * (x.ndim - 1) + (-1,)
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:]).astype(jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:]).astype(jnp.float32)
        x = nn.RMSNorm(self.epsilon, dtype=jnp.float32, use_scale=False)(x)
        return (x * scale.reshape(vector) + bias.reshape(vector)).astype(self.dtype)


def make_norm(config: GPTConfig, dtype: DTypeLike, name: str, lift: Lift | None = None) -> nn.Module:
    """The norm of this model; `lift` is applied to its class if it has parameters."""
    norms: dict[str, tuple[type[nn.Module], dict[str, bool]]] = {
        "layer": (nn.LayerNorm, {"use_scale": config.norm_gains, "use_bias": config.norm_gains}),
        "rms": (nn.RMSNorm, {"use_scale": config.norm_gains}),
        "rms_biased": (BiasedRMSNorm, {}) if config.norm_gains else (nn.RMSNorm, {"use_scale": False}),
        "rms_offset": (OffsetRMSNorm, {}) if config.norm_gains else (nn.RMSNorm, {"use_scale": False}),
    }
    kind, options = norms[config.norm]
    if lift is not None and config.norm_gains:
        kind = lift(kind, name)
    made: Any = kind
    return made(epsilon=config.norm_epsilon, dtype=dtype, name=None if lift else name, **options)


def fold_keys(keys_B: jax.Array | None, number: jax.Array | int) -> jax.Array | None:
    """The dropout keys of a part of the model, from those of the model; None for no dropout."""
    return None if keys_B is None else jax.vmap(jax.random.fold_in, (0, None))(keys_B, number)


def keys_from(keys_B: jax.Array | None, position: jax.Array | int) -> jax.Array | None:
    """The dropout keys of the part of a row that begins at this position: of a whole row its own."""
    return keys_B if isinstance(position, int) and position == 0 else fold_keys(keys_B, position)


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


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a projection `(B, T, H, K)`, of which this device has a part."""

    epsilon: float
    dtype: DTypeLike
    cut: ModelParallel

    @nn.compact
    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        heads = x_BTHK.shape[2] * self.cut.size
        width = x_BTHK.shape[3]
        scale_HK = self.param("scale", nn.initializers.ones, (heads * width,)).reshape(heads, width)
        x_BTHK = x_BTHK.astype(jnp.float32)
        squares_BT = self.cut.stack(jnp.sum(jnp.square(x_BTHK), axis=(2, 3))).sum(0)
        x_BTHK = x_BTHK * lax.rsqrt(squares_BT / (heads * width) + self.epsilon)[..., None, None]
        return (x_BTHK * self.cut.part(scale_HK, 0).astype(jnp.float32)[None, None]).astype(self.dtype)


def make_head_norm(config: GPTConfig, dtype: DTypeLike, name: str, cut: ModelParallel) -> nn.Module:
    """The norm of queries or keys `(B, T, H, K)`: of each head, or of the projection."""
    if config.qk_norm_over == "projection":
        return ProjectionNorm(config.norm_epsilon, dtype, cut, name=name)
    return make_norm(config, dtype, name)


def row_major(x: jax.Array) -> jax.Array:
    """`x` and its gradient with the last dimension contiguous in memory, whatever else the compiler would choose."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


class Rotation(NamedTuple):
    """Rotary positions of one layer.

    Attributes:
      frequencies_R: radians per position, float32, for each pair of the dimensions that are rotated.
      length: factor of cosines and sines.
    """

    frequencies_R: jax.Array | np.ndarray
    length: jax.Array | float


def rotation_of(config: GPTConfig, layer: jax.Array | int, positions: int) -> Rotation:
    """The rotary positions of a layer, whose number may be traced, in rows of this many positions.

    >>> rotation_of(GPTConfig(8, 10, 2, 16, 0.0, 1, alibi_attn=False, positions="rotary"), 0, 16).frequencies_R.tolist()
    [1.0, 0.009999999776482582]
    """
    period = math.lcm(len(config.windows) if config.local_rotary_base else 1, config.unrotated_every or 1)
    kinds = [_rotation(config, number, positions) for number in range(period)]
    if period == 1:
        return kinds[0]
    frequencies_LR = np.stack([kind.frequencies_R for kind in kinds])
    length_L = np.asarray([x.length for x in kinds])
    return Rotation(jnp.asarray(frequencies_LR)[layer % period], jnp.asarray(length_L, jnp.float32)[layer % period])


def _rotation(config: GPTConfig, layer: int, positions: int) -> Rotation:
    """Source: RoFormer, arXiv 2104.09864, section 3.2.2; SmolLM3's layers without positions: arXiv 2501.18795."""
    rotated = int(config.rotary_fraction * config.head_width)
    is_local = config.local_rotary_base is not None and config.windows[layer % len(config.windows)] > 0
    base = config.local_rotary_base if is_local and config.local_rotary_base else config.rotary_base
    frequencies_R = base ** -(np.arange(0, rotated, 2) / rotated)
    length = 1.0
    if config.unrotated_every is not None and (layer + 1) % config.unrotated_every == 0:
        return Rotation(np.zeros_like(frequencies_R, np.float32), 1.0)  # to turn by nothing is exact
    if config.rotary_scaling is not None and not is_local:
        length_of_row = () if config.rotary_switch is None else (positions,)
        scaled = SCALINGS[str(config.rotary_kind)]
        frequencies_R, length = scaled(frequencies_R, base, *length_of_row, *config.rotary_numbers)
    return Rotation(frequencies_R.astype(np.float32), length)


def _linear(frequencies_R: np.ndarray, base: float, factor: float) -> tuple[np.ndarray, float]:
    """Positions are divided by the factor (arXiv 2306.15595, section 2.3)."""
    return frequencies_R / factor, 1.0


def _llama3(
    frequencies_R: np.ndarray, base: float, factor: float, low: float, high: float, original: float
) -> tuple[np.ndarray, float]:
    """As in Llama 3.1 (arXiv 2407.21783, section 3.4.1).

    Wavelengths beyond `original / low` are stretched by the factor, those below `original / high` are kept, and those
    between are interpolated.
    """
    turns_R = original * frequencies_R / (2 * math.pi)  # in the context of the original training
    kept_R = np.clip((turns_R - low) / (high - low), 0, 1)
    return frequencies_R * (kept_R + (1 - kept_R) / factor), 1.0


def _yarn(
    frequencies_R: np.ndarray,
    base: float,
    factor: float,
    original: float,
    fast: float,
    slow: float,
    length: float,
    *,
    is_rounded: bool = True,
) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071, sections 3.2 and 3.3), with the ends of its ramp rounded outwards, as in its own code.

    Pairs that turn more than `fast` times in the original context are kept, those that turn less than `slow` times are
    stretched by the factor.
    """
    pairs = len(frequencies_R)

    def pair_of(turns: float) -> float:
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    ends = pair_of(fast), pair_of(slow)
    ends = (math.floor(ends[0]), math.ceil(ends[1])) if is_rounded else ends
    first = max(ends[0], 0)
    last = min(ends[1], 2 * pairs - 1)
    stretched_R = np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0, 1)
    return frequencies_R * (1 - stretched_R + stretched_R / factor), length


def _dynamic(
    frequencies_R: np.ndarray, base: float, positions: int, factor: float, original: float
) -> tuple[np.ndarray, float]:
    """The base grows with the positions beyond the original context, as transformers has it (NTK-aware, dynamic)."""
    rotated = 2 * len(frequencies_R)
    growth = (factor * max(positions, original) / original - (factor - 1)) ** (rotated / (rotated - 2))
    return frequencies_R * growth ** -(np.arange(0, rotated, 2) / rotated), 1.0


def _longrope(
    frequencies_R: np.ndarray, base: float, positions: int, original: float, length: float, *divisors: float
) -> tuple[np.ndarray, float]:
    """LongRoPE (arXiv 2402.13753, section 3.2): divisors for rows of up to the original context, then for longer."""
    pairs = len(frequencies_R)
    chosen_R = divisors[pairs:] if positions > original else divisors[:pairs]
    return frequencies_R / np.asarray(chosen_R), length


# From frequencies, base and the numbers of a scaling to scaled frequencies and the factor of cosines and sines; the
# last two take the number of positions as well, before the numbers.
SCALINGS: dict[str, Callable[..., tuple[np.ndarray, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "yarn_unrounded": partial(_yarn, is_rounded=False),
    "dynamic": _dynamic,
    "longrope": _longrope,
}


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


def cosines_and_sines(
    positions: int, position: jax.Array | int, rotation: Rotation, starts_BT: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angle of each position and pair, float32 `(B, T, 1, R)`; B is 1 without segments.

    `position` as in `position_numbers`; with segments, positions count from the start of their segment.
    """
    angles = position_numbers(position, positions).astype(jnp.float32)[None, :, None, None]
    if starts_BT is not None:
        angles = angles - starts_BT.astype(jnp.float32)[..., None, None]
    angles = angles * rotation.frequencies_R[None, None, None]
    return jnp.cos(angles) * rotation.length, jnp.sin(angles) * rotation.length


def rotate(x_BTHK: jax.Array, cos_BT1R: jax.Array, sin_BT1R: jax.Array) -> jax.Array:
    """Rotary positions: pairs `(i, i + R)` of the first 2 R dimensions of each head turn by an angle."""
    half = cos_BT1R.shape[-1]
    first, second = (x_BTHK[..., part].astype(jnp.float32) for part in (slice(half), slice(half, 2 * half)))
    turned = [first * cos_BT1R - second * sin_BT1R, second * cos_BT1R + first * sin_BT1R]
    rotated = jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)
    return jnp.concatenate([rotated, x_BTHK[..., 2 * half :]], axis=-1)
