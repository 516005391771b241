"""Matrices quantized to codes of 8 or 4 bits in blocks, each with a scale, for weights that are not trained.

A block is 64 inputs of one output: neighbors in the memory of a product's weight as PyTorch holds it. A quantized
matrix is a dict of arrays, which are sharded and gathered as they are; a layer dequantizes where it computes.

Source: QLoRA (Dettmers et al., arXiv 2305.14314), section 3: 4-bit NormalFloat and double quantization; its scales of
scales are linear here, in int8.

Shapes are named by suffix:
  I inputs, O outputs, N blocks of inputs, M blocks of outputs; leading dimensions (layers, experts) are kept
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

BLOCK, SCALE_BLOCK = 64, 256  # elements per scale, and scales per scale of scales; as in the source, section 3
# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero: the source, appendix E.
NF4 = np.asarray(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
Quantized = dict[str, jax.Array]


class Codec(NamedTuple):
    """How matrices `(..., I, O)` are quantized.

    Attributes:
      quantize: from a float matrix to a dict of arrays.
      dequantize: from that dict and the number of inputs to the float32 matrix that it stands for.
    """

    quantize: Callable[[jax.Array], Quantized]
    dequantize: Callable[[Quantized, int], jax.Array]


def _quantize_int8(x_IO: jax.Array) -> Quantized:
    """One byte per element: at most half of 1 / 127 of the block's largest off."""
    scales_NO = _largest(x_IO, BLOCK) / 127
    codes_IO = jnp.round(_divided(x_IO, scales_NO, BLOCK)).astype(jnp.int8)
    return {"codes": codes_IO, "scales": scales_NO}


def _dequantize_int8(quantized: Quantized, inputs: int) -> jax.Array:
    return quantized["codes"].astype(jnp.float32) * _spread(quantized["scales"], BLOCK, inputs)


def _quantize_nf4(x_IO: jax.Array) -> Quantized:
    """Half a byte per element, the nearest entry of `NF4`; the first half of the inputs are the upper bits."""
    scales_NO = _largest(x_IO, BLOCK)
    offset = jnp.mean(scales_NO, axis=(-2, -1), keepdims=True)
    deviations_ON = jnp.swapaxes(scales_NO - offset, -1, -2)
    steps_MN = _largest(deviations_ON, SCALE_BLOCK) / 127
    scale_codes_ON = jnp.round(_divided(deviations_ON, steps_MN, SCALE_BLOCK)).astype(jnp.int8)
    scales = {"scale_codes": scale_codes_ON, "scale_steps": steps_MN, "scale_offset": offset}
    # By the scales as they will be read, so that their rounding is not added to the rounding of the elements.
    unit_IO = _divided(x_IO, _nf4_scales(scales), BLOCK)
    numbers_IO = sum((unit_IO > middle).astype(jnp.uint8) for middle in (NF4[1:] + NF4[:-1]) / 2)
    half = -(-x_IO.shape[-2] // 2)
    upper = numbers_IO[..., :half, :]
    lower = _padded(numbers_IO[..., half:, :], half)
    return {"codes": upper << 4 | lower, **scales}


def _dequantize_nf4(quantized: Quantized, inputs: int) -> jax.Array:
    numbers_IO = jnp.concatenate([quantized["codes"] >> 4, quantized["codes"] & 15], axis=-2)[..., :inputs, :]
    unit_IO = jnp.full(numbers_IO.shape, NF4[0])
    for number, value in enumerate(NF4[1:], start=1):  # a gather from a table is slow on TPU
        unit_IO = jnp.where(numbers_IO >= number, value, unit_IO)
    return unit_IO * _spread(_nf4_scales(quantized), BLOCK, inputs)


def _nf4_scales(quantized: Quantized) -> jax.Array:
    codes_ON = quantized["scale_codes"].astype(jnp.float32)
    deviations_ON = codes_ON * _spread(quantized["scale_steps"], SCALE_BLOCK, codes_ON.shape[-2])
    return jnp.swapaxes(deviations_ON, -1, -2) + quantized["scale_offset"]


CODECS: dict[str, Codec] = {
    "int8": Codec(_quantize_int8, _dequantize_int8),
    "nf4": Codec(_quantize_nf4, _dequantize_nf4),
}


def _largest(x_IO: jax.Array, block: int) -> jax.Array:
    """The largest absolute value of each block of rows, float32."""
    blocks = -(-x_IO.shape[-2] // block)
    x_IO = _padded(jnp.abs(x_IO.astype(jnp.float32)), blocks * block)
    return x_IO.reshape(*x_IO.shape[:-2], blocks, block, x_IO.shape[-1]).max(-2)


def _spread(scales_NO: jax.Array, block: int, rows: int) -> jax.Array:
    """Each scale for all rows of its block."""
    shape = (*scales_NO.shape[:-1], block, scales_NO.shape[-1])
    return jnp.broadcast_to(scales_NO[..., None, :], shape).reshape(*shape[:-3], -1, shape[-1])[..., :rows, :]


def _divided(x_IO: jax.Array, scales_NO: jax.Array, block: int) -> jax.Array:
    spread_IO = _spread(scales_NO, block, x_IO.shape[-2])
    return x_IO.astype(jnp.float32) / jnp.where(spread_IO > 0, spread_IO, 1)


def _padded(x_IO: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x_IO, [(0, 0)] * (x_IO.ndim - 2) + [(0, rows - x_IO.shape[-2]), (0, 0)])


def quantize(params: Any, codec: str) -> Any:
    """A part of a model with its kernels quantized; other leaves, and the kernel of a router, stay as they are.

    >>> quantized = quantize({"query": {"kernel": jnp.ones((64, 2)), "bias": jnp.ones(2)}}, "int8")
    >>> jax.tree.map(lambda x: (x.dtype.name, x.shape), quantized)["query"]
    {'bias': ('float32', (2,)), 'kernel': {'codes': ('int8', (64, 2)), 'scales': ('float32', (1, 2))}}
    """
    if codec not in CODECS:
        return params

    def one(path: Any, x: Any) -> Any:
        is_quantized = path[-1].key == "kernel" and not any(key.key == "router" for key in path)
        if not is_quantized:
            return x
        return CODECS[codec].quantize(x)

    return jax.tree_util.tree_map_with_path(one, params)


def dequantize(leaf_shape: tuple[int, ...], x: Any, codec: str, dtype: DTypeLike) -> jax.Array:
    """The float array of a leaf of this shape, from what `quantize` made of it."""
    whole = CODECS[codec].dequantize(x, leaf_shape[-2]) if isinstance(x, dict) else x
    return whole.astype(dtype)
