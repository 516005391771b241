"""Matrices of 8-bit floats in blocks with a scale, as DeepSeek-V3 is published: read as the float32 they stand for.

A block has 128 outputs and 128 inputs, or what is left of them at the end. Source: DeepSeek-V3, arXiv 2412.19437,
section 3.3.2.

Shapes are named by suffix: O outputs, I inputs, P and Q blocks of them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zero.base.errors import UserError
from zero.exchange.stored_tensor import Stored

_SCALE = "_scale_inv"  # ends the name of a matrix's scales, with which its elements are multiplied
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
# Other keys of a quantization_config say which modules have codes, which the tensors show, and how to make codes.
_OTHER_KEYS = {"modules_to_not_convert", "ignored_layers", "modules_to_convert", "scale_fmt", "dequantize"}
_FIXED = {"fmt": "e4m3", "activation_scheme": "dynamic", "expert_dtype": "fp8"}


class ScaledBlocks:
    """A matrix `(O, I)`, decoded when it is read, from codes and their scales `(P, Q)`."""

    def __init__(self, codes_OI: Stored, scales_PQ: Stored, block: tuple[int, int]) -> None:
        self._codes_OI = codes_OI
        self._scales_PQ = scales_PQ
        self._block = block

    def get_shape(self) -> list[int]:
        """See `Stored`."""
        return self._codes_OI.get_shape()

    def get_dtype(self) -> str:
        """See `Stored`."""
        return "F32"

    def __getitem__(self, index: Any) -> np.ndarray:
        """See `Stored`."""
        rows, columns = self._block
        read_OI = self._codes_OI[:].astype(np.float32)
        scales_PQ = self._scales_PQ[:].astype(np.float32)
        for number in range(len(scales_PQ)):
            factors_I = np.repeat(scales_PQ[number], columns)[: read_OI.shape[1]]
            read_OI[number * rows : (number + 1) * rows] *= factors_I
        part: np.ndarray = read_OI[index]
        return part


def mistakes(config: Mapping[str, Any]) -> Iterator[str]:
    """What a `quantization_config` asks for that this code does not read."""
    block = config.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        yield f"weight_block_size {block!r}; expected two numbers, such as [128, 128]"
    for key, expected in _FIXED.items():
        if config.get(key, expected) != expected:
            yield f"{key} {config[key]!r}; expected {expected!r}"
    known = {"quant_method", "weight_block_size", *_FIXED, *_OTHER_KEYS}
    for key in sorted({*config} - known):
        if config[key] not in (None, False, "", [], {}):
            yield f"{key} {config[key]!r}, which zero does not know"


def decoded(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Unread tensors by name, in which one stands for each matrix and its scales.

    Raises:
      UserError: a matrix of 8-bit floats has no scales, or not one for each block.
    """
    rows, columns = config["weight_block_size"]
    left = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.get_dtype() != "F8_E4M3":
            continue
        scales = left.pop(name + _SCALE, None)
        if scales is None:
            raise UserError(f"{tensor}: holds F8_E4M3 without a tensor {name}{_SCALE}; expected a scale for each block")
        shape = tensor.get_shape()
        expected = [-(-shape[0] // rows), -(-shape[1] // columns)] if len(shape) == 2 else "those of a matrix"
        if scales.get_shape() != expected or scales.get_dtype() not in _SCALE_DTYPES:
            raise UserError(
                f"{scales}: holds {scales.get_dtype()} {scales.get_shape()}, expected {expected} of "
                f"{', '.join(_SCALE_DTYPES)}: a scale for each {rows} x {columns} of {shape}"
            )
        left[name] = ScaledBlocks(tensor, scales, (rows, columns))
    return left
