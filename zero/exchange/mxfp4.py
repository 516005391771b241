"""Tensors of 4-bit floats in blocks with a scale, as gpt-oss is published: read as the float32 that they stand for.

Elements are E2M1, scales powers of two. Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.

Shapes are named by suffix:
  E experts, O outputs, I inputs, N blocks of 32 inputs, P pairs of elements of a block
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zero.exchange.stored_tensor import Stored

_BLOCKS, _SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.asarray([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)  # by code; its upper bit is the sign
_BIAS = 127  # of the exponents


class Mxfp4:
    """A tensor `(E, I, O)`, decoded when it is read."""

    def __init__(self, blocks_EONP: Stored, scales_EON: Stored) -> None:
        self._blocks_EONP = blocks_EONP
        self._scales_EON = scales_EON

    def get_shape(self) -> list[int]:
        """See `Stored`."""
        experts, outputs, blocks, pairs = self._blocks_EONP.get_shape()
        return [experts, blocks * pairs * 2, outputs]

    def get_dtype(self) -> str:
        """See `Stored`."""
        return "F32"

    def __getitem__(self, index: Any) -> np.ndarray:
        """See `Stored`."""
        codes_EONP = self._blocks_EONP[:]
        scales_EON = self._scales_EON[:]
        pairs = np.stack([_VALUES[codes_EONP & 15], _VALUES[codes_EONP >> 4]], axis=-1)  # the lower half comes first
        exponents_EON11 = scales_EON.astype(np.int32)[..., None, None] - _BIAS
        whole_EOI = np.ldexp(pairs, exponents_EON11).reshape(*scales_EON.shape[:2], -1)
        read: np.ndarray = whole_EOI.swapaxes(-1, -2)[index]
        return read


def decoded(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Unread tensors by name, in which one stands for each pair of blocks and scales."""
    names = [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]
    pairs = {
        name: Mxfp4(tensors[name + _BLOCKS], tensors[name + _SCALES]) for name in names if name + _SCALES in tensors
    }
    coded = {name + end for name in pairs for end in (_BLOCKS, _SCALES)}
    return {**{name: x for name, x in tensors.items() if name not in coded}, **pairs}
