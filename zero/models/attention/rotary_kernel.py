"""Rotary positions in a kernel for TPU, written in Pallas.

It reads and writes queries or keys as their product makes them and as the kernels of attention read them: `(B, T, H K)`
with whole tiles for each head. XLA would turn the halves of a head as arrays of their own, in another layout, and copy
all heads on the way in and out.

Shapes are named by suffix: B rows, T positions, H heads, K head dimension.
Source: RoFormer, arXiv 2104.09864, section 3.4.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_ELEMENTS = 2**19  # of a block in VMEM, in which the output and the next block lie as well


def fused_rotate(x_BTHK: jax.Array, cos_BTR: jax.Array, sin_BTR: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Turns pairs `(i, i + R)` of each head; K is 2 R and a multiple of 128.

    Args:
      x_BTHK: queries or keys; T is a multiple of 8.
      cos_BTR, sin_BTR: of the angles, float32; B may be 1, for the same positions in all rows.
      interpret: whether to emulate the kernel on CPU.
    """
    cos_BTK = jnp.concatenate([cos_BTR, cos_BTR], axis=-1)
    sin_BTK = jnp.concatenate([-sin_BTR, sin_BTR], axis=-1)
    turned = _turn(lax.collapse(x_BTHK, 2), cos_BTK, sin_BTK, interpret)
    return turned.reshape(x_BTHK.shape)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _turn(x_BTX: jax.Array, cos_BTK: jax.Array, sin_BTK: jax.Array, interpret: bool) -> jax.Array:
    """`x cos + swapped x sin` for each head, where `swapped` exchanges its halves."""
    rows, positions, columns = x_BTX.shape
    width = cos_BTK.shape[-1]
    shares_angles = len(cos_BTK) == 1
    most = min(512, _ELEMENTS // columns)
    size = next(size for size in (512, 256, 128, 64, 32, 16, 8) if positions % size == 0 and size <= most)
    block = pl.BlockSpec((1, size, columns), lambda b, t: (b, t, 0))
    angles = pl.BlockSpec((1, size, width), lambda b, t: (0 if shares_angles else b, t, 0))

    def kernel(x_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any) -> None:
        cos = cos_ref[0]
        sin = sin_ref[0]
        for head in range(columns // width):
            at = pl.ds(head * width, width)
            x = x_ref[0, :, at].astype(jnp.float32)
            out_ref[0, :, at] = (x * cos + pltpu.roll(x, width // 2, 1) * sin).astype(out_ref.dtype)

    return pl.pallas_call(
        kernel,
        grid=(rows, positions // size),
        in_specs=[block, angles, angles],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x_BTX.shape, x_BTX.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="zero_rotary",
    )(x_BTX, cos_BTK, sin_BTK)


def _forward(x_BTX: jax.Array, cos_BTK: jax.Array, sin_BTK: jax.Array, interpret: bool) -> Any:
    return _turn(x_BTX, cos_BTK, sin_BTK, interpret), (cos_BTK, sin_BTK)


def _backward(interpret: bool, angles: Any, grad_BTX: jax.Array) -> Any:
    """Turns the gradient back. Angles follow from positions, so they have no gradient."""
    cos_BTK, sin_BTK = angles
    return _turn(grad_BTX, cos_BTK, -sin_BTK, interpret), jnp.zeros_like(cos_BTK), jnp.zeros_like(sin_BTK)


_turn.defvjp(_forward, _backward)
