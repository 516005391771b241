"""The norms of a model.

Shapes are named by suffix: B rows, T positions of a row, H heads, K head dimension
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from zero.base.keys import key, one_of, positive
from zero.models.axes import EMBED, Axes, named, of_axes
from zero.models.elements import Lift
from zero.models.part import ATTENTION, Sizes
from zero.partition.model_parallel import ModelParallel


class OffsetRMSNorm(nn.Module):
    """RMSNorm that multiplies by 1 + scale, as in Gemma."""

    epsilon: float
    dtype: DTypeLike
    scale_init: Any = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", self.scale_init, x.shape[-1:])
        x = nn.RMSNorm(self.epsilon, dtype=jnp.float32, use_scale=False)(x)
        return (x * (1 + scale.astype(jnp.float32)).reshape((1,) * (x.ndim - 1) + (-1,))).astype(self.dtype)


class BiasedRMSNorm(nn.Module):
    """RMSNorm with a gain and a bias, as in Transformer-VQ's branch main."""

    epsilon: float
    dtype: DTypeLike
    scale_init: Any = nn.initializers.ones
    bias_init: Any = nn.initializers.zeros

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        vector = (1,) * (x.ndim - 1) + (-1,)
        scale = self.param("scale", self.scale_init, x.shape[-1:]).astype(jnp.float32)
        bias = self.param("bias", self.bias_init, x.shape[-1:]).astype(jnp.float32)
        x = nn.RMSNorm(self.epsilon, dtype=jnp.float32, use_scale=False)(x)
        return (x * scale.reshape(vector) + bias.reshape(vector)).astype(self.dtype)


class Norm(NamedTuple):
    """A kind of norm.

    Attributes:
      module: of a norm with gains; it takes `epsilon`, `dtype`, `name`, and `starts`.
      starts: initializers of its parameters, each a number for each channel, by the names of its options.
      without_gains: the same without parameters, and its options.
    """

    module: type[nn.Module]
    starts: Mapping[str, nn.initializers.Initializer]
    without_gains: tuple[type[nn.Module], dict[str, bool]] = (nn.RMSNorm, {"use_scale": False})


_CHANNELS = Axes((EMBED,))
_ONES, _ZEROS = nn.initializers.ones, nn.initializers.zeros
_GAINS = {"scale_init": _ONES}
_WITH_BIASES = {"scale_init": _ONES, "bias_init": _ZEROS}
NORMS = {
    "layer": Norm(nn.LayerNorm, _WITH_BIASES, (nn.LayerNorm, {"use_scale": False, "use_bias": False})),
    "rms": Norm(nn.RMSNorm, _GAINS),  # arXiv 1910.07467
    "rms_biased": Norm(BiasedRMSNorm, _WITH_BIASES),
    "rms_offset": Norm(OffsetRMSNorm, {"scale_init": _ZEROS}),
}


@dataclass(frozen=True)
class Norms(Sizes):
    """The keys of norms."""

    # as in BLOOM, arXiv 2211.05100, section 3.2.3
    embedding_norm: bool = key(
        False, None, "a norm after the embedding; with it a model with ALiBi can be exported as BLOOM"
    )
    norm_epsilon: float = key(1e-6, positive(), "of every norm; weights of GPT-2 and BLOOM need 1e-5")
    norm: str = key(
        "layer",
        one_of(*NORMS),
        "layer, rms, rms_offset, whose gains are stored less 1, or in gated units rms_biased, which has biases",
    )
    norm_gains: bool = key(True, None, "norms have gains, and layer norms have biases as well")
    norm_place: str = key(
        "before",
        one_of("before", "after", "both"),
        "norms before attention and MLP, after them (before the sum with the residual stream), or both",
    )
    qk_norm: bool = key(False, None, "a norm over each head of queries and keys")
    # projection: OLMo 2, arXiv 2501.00656, section 2
    qk_norm_over: str = key("head", one_of("head", "projection"), "head, or projection: one norm over all heads")
    final_norm: bool = key(True, None, "a norm before the logits")

    def mistakes(self) -> Iterator[str]:
        """An unknown norm of projections, and norms that no mixer has."""
        if self.qk_norm_over == "projection" and not (self.qk_norm and self.norm == "rms"):
            yield "qk_norm_over: projection needs qk_norm: true and norm: rms"
        yield from self.unread({"qk_norm": self.qk_norm}, ATTENTION)


def make_norm(
    config: Norms,
    dtype: DTypeLike,
    name: str,
    lift: Lift | None = None,
    epsilon: float | None = None,
    axes: Axes = _CHANNELS,
) -> nn.Module:
    """The norm of this model with parameters of these axes, or one with another `epsilon`.

    `lift` is applied to its class if it has parameters.
    """
    kind = NORMS[config.norm]
    epsilon = config.norm_epsilon if epsilon is None else epsilon
    if not config.norm_gains:
        module, options = kind.without_gains
        made: Any = module
        return made(epsilon=epsilon, dtype=dtype, name=None if lift else name, **options)
    made = kind.module if lift is None else lift(kind.module, name)
    starts = {option: of_axes(start, axes) for option, start in kind.starts.items()}
    return made(epsilon=epsilon, dtype=dtype, name=None if lift else name, **starts)


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a projection `(B, T, H, K)`, of which this device has a part."""

    epsilon: float
    dtype: DTypeLike
    row_group: ModelParallel

    @nn.compact
    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        heads = x_BTHK.shape[2] * self.row_group.size
        width = x_BTHK.shape[3]
        gains = named(nn.initializers.ones, "channels")
        scale_HK = self.param("scale", gains, (heads * width,)).reshape(heads, width)
        x_BTHK = x_BTHK.astype(jnp.float32)
        squares_BT = self.row_group.stack(jnp.sum(jnp.square(x_BTHK), axis=(2, 3))).sum(0)
        x_BTHK = x_BTHK * lax.rsqrt(squares_BT / (heads * width) + self.epsilon)[..., None, None]
        return (x_BTHK * self.row_group.part(scale_HK, 0).astype(jnp.float32)[None, None]).astype(self.dtype)


def make_head_norm(config: Norms, dtype: DTypeLike, name: str, row_group: ModelParallel) -> nn.Module:
    """The norm of queries or keys `(B, T, H, K)`: of each head, or of the projection."""
    if config.qk_norm_over == "projection":
        return ProjectionNorm(config.norm_epsilon, dtype, row_group, name=name)
    return make_norm(config, dtype, name, axes=Axes(("head_dim",)))
