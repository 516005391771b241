"""Parts of a layer: products with matrices, and dropout, with the keys of the residual stream.

Shapes are named by suffix:
  B rows, T positions of a row, H heads, K head dimension
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from zero.base.keys import fraction_below_one, key, positive
from zero.models.part import Sizes
from zero.partition.model_parallel import WHOLE, RoundedWeight

Lift = Callable[[type[nn.Module], str], type[nn.Module]]
# (B, T, *inputs) and (*inputs, *features) to (B, T, *features); the latter may be a `RoundedWeight`.
Product = Callable[[jax.Array, Any], jax.Array]


@dataclass(frozen=True)
class Residual(Sizes):
    """The keys of the residual stream: what enters the first layer, and what layers add."""

    # GPT-J, GPT-NeoX
    parallel_residual: bool = key(False, None, "attention and MLP read the same input and are added together")
    residual_multiplier: float = key(1.0, positive(), "factor of the outputs of attention and MLP")
    embedding_dropout: float = key(0.0, fraction_below_one(), "dropout of embeddings")
    residual_dropout: float | None = key(
        None, fraction_below_one(), "dropout of the outputs of attention and of the MLP", none="dropout"
    )

    @property
    def residual_drop_rate(self) -> float:
        """`residual_dropout`, or its default."""
        return self.dropout if self.residual_dropout is None else self.residual_dropout


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


def contraction(x_BTX: jax.Array, w_XF: jax.Array) -> jax.Array:
    """`x` contracted with a weight over all its inputs, `(B, T, *inputs)` and `(*inputs, *features)`."""
    if w_XF.ndim == 2:
        return product(x_BTX, w_XF)
    return jnp.tensordot(x_BTX, w_XF, x_BTX.ndim - 2)


class Dense(nn.Module):
    """`nn.Dense` of inputs and outputs that may have two dimensions, heads and their width; its kernel is a matrix.

    Between a product with a matrix and a kernel of attention XLA for TPU copies heads to another place, forward and
    backward; between one with two dimensions and the kernel it does not.

    Attributes:
      features: outputs, `(D,)` or `(H, K)`.
      use_bias, dtype, kernel_init, bias_init: as for `nn.Dense`.
      total: sums partial products before the bias is added; None if they are whole.
      product: multiplies inputs and the kernel, an entry of `zero.models.products.PRODUCTS`.
    """

    features: tuple[int, ...]
    use_bias: bool
    dtype: DTypeLike
    kernel_init: Any
    total: Callable[[jax.Array], jax.Array] | None = None
    product: Product = contraction
    bias_init: Any = nn.initializers.zeros

    @nn.compact
    def __call__(self, x_BTX: jax.Array) -> jax.Array:
        """`(B, T, D)` or `(B, T, H, K)` in, `(B, T, *features)` out."""
        inputs = x_BTX.shape[2:]
        kernel = self.param("kernel", self.kernel_init, (math.prod(inputs), math.prod(self.features)))
        if isinstance(kernel, RoundedWeight):
            kernel = kernel.reshaped(inputs, self.features)
        else:
            kernel = kernel.astype(self.dtype).reshape(*inputs, *self.features)
        y_BTX = self.product(x_BTX.astype(self.dtype), kernel)
        y_BTX = y_BTX if self.total is None else self.total(y_BTX)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (math.prod(self.features),))
            y_BTX = y_BTX + bias.astype(self.dtype).reshape(1, 1, *self.features)
        return y_BTX


def fold_keys(keys_B: jax.Array | None, number: jax.Array | int) -> jax.Array | None:
    """The dropout keys of a part of the model, from those of the model; None for no dropout."""
    if keys_B is None:
        return None
    return jax.vmap(jax.random.fold_in, (0, None))(keys_B, number)


def keys_from(keys_B: jax.Array | None, position: jax.Array | int) -> jax.Array | None:
    """The dropout keys of the part of a row that begins at this position: of a whole row its own."""
    if isinstance(position, int) and position == 0:
        return keys_B
    return fold_keys(keys_B, position)


def dropout(
    x: jax.Array,
    rate: float,
    keys_B: jax.Array | None,
    part_of_mask: Callable[..., jax.Array] = WHOLE.of_positions,
) -> jax.Array:
    """Dropout with one key per row, so that a mask depends only on its sequence; without keys the identity.

    If `x` is a part of its rows, `part_of_mask` cuts the same part from the masks of whole rows.
    """
    if keys_B is None or rate == 0:
        return x

    def is_kept(key: jax.Array) -> jax.Array:
        return part_of_mask(partial(jax.random.bernoulli, key, 1 - rate), x.shape[1:])

    keep = jax.vmap(is_kept)(keys_B)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def drop_rows(x: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """Dropout of whole rows; without keys the identity (LayerDrop, arXiv 1909.11556, per row)."""
    if keys_B is None or rate == 0:
        return x
    keep_B = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate))(keys_B)
    return jnp.where(keep_B.reshape(-1, *(1,) * (x.ndim - 1)), x / (1 - rate), 0).astype(x.dtype)


def row_major(x: jax.Array) -> jax.Array:
    """`x` and its gradient with the last dimension contiguous in memory, whatever else the compiler would choose."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
