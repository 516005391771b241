"""Units of arrays of token ids: .npy, nanoGPT's and llm.c's .bin, Megatron's .bin with its .idx.

An array without documents is one text: its last part is for validation. Each document of a Megatron corpus counts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zero.base.errors import UserError
from zero.corpus.format.shards import NPY_HEADER, npy_header
from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import TRAIN, VALIDATION, Document, Unit
from zero.corpus.preparing.sources.files import open_file
from zero.files import storage
from zero.files.parsing import reading

_LLM_C = 20240520, 1024  # the first integer of a file of llm.c, and the size of its header in bytes
_LLM_C_DTYPES = {1: "<u2", 7: "<u4"}  # by the version, its second integer: GPT-2's and Llama 3's tokens
_SEEN = 1 << 16  # bytes of a file by which tokens of 32 bits are noticed
_FEWEST_PAIRS = 4
_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class _Array(NamedTuple):
    """A one-dimensional array of integers in a file."""

    path: str
    dtype: str
    offset: int  # in bytes
    tokens: int


TOKEN_BITS = (16, 32)  # of a token in a .bin without a header


def array_units(path: str, validation_fraction: float | None, token_bits: int | None = None) -> Iterator[Unit]:
    """The tokens of a file; of an array without documents the last part is for validation, unless that is None.

    `token_bits` are those of each token of a .bin without a header; None: 16, as nanoGPT writes them.

    Raises:
      UserError: 16 bits are not said, and the file looks like one of 32.
    """
    index = megatron_index(path)
    if index is not None:
        return _megatron_units(path, index)
    array = _npy(path) if path.lower().endswith(".npy") else _bin(path, token_bits)
    return _flat_units(array, validation_fraction)


def is_raw(path: str) -> bool:
    """Whether a file is an array of tokens that does not say how many bits each has."""
    if not path.lower().endswith(".bin") or megatron_index(path) is not None:
        return False
    with open_file(path) as file:
        return not _is_of_llm_c(file.read(12))


def _is_of_llm_c(head: bytes) -> bool:
    return len(head) == 12 and struct.unpack("<i", head[:4]) == (_LLM_C[0],)


def megatron_index(path: str) -> str | None:
    """The Megatron-LM index beside a .bin file; None if there is none."""
    index = path[:-4] + ".idx"
    return index if path.lower().endswith(".bin") and storage.exists(index) else None


def _npy(path: str) -> _Array:
    with open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        with reading(f"{path} is not a complete .npy file; copy or write it again"):
            header = npy_header(file.read(NPY_HEADER))
            count = math.prod(header.shape)
            if header.dtype.kind not in "ui":
                raise UserError(
                    f"{path} holds {header.dtype}; expected token ids, integers: np.save(path, ids.astype(np.uint32))"
                )
            if header.is_fortran and len(header.shape) > 1:
                raise UserError(
                    f"{path} stores its array column by column (Fortran order); expected row after row: "
                    "np.save(path, np.ascontiguousarray(ids))"
                )
            if size != header.offset + count * header.dtype.itemsize:
                raise ValueError(f"it has {size} bytes, and the shape {header.shape}")
    return _Array(path, header.dtype.str, header.offset, count)


def _bin(path: str, token_bits: int | None) -> _Array:
    with open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(_SEEN)
    _, offset = _LLM_C
    if _is_of_llm_c(head[:12]):
        _, version, count = struct.unpack("<3i", head[:12])
        dtype = _LLM_C_DTYPES.get(version)
        if dtype is None or size != offset + count * np.dtype(dtype).itemsize:
            raise UserError(
                f"{path}: a header of llm.c with version {version} and {count} tokens, in {size} bytes; expected "
                "version 1 or 7, and all tokens: copy or write it again"
            )
        return _Array(path, dtype, offset, count)
    width = (token_bits or TOKEN_BITS[0]) // 8
    if size % width:
        raise UserError(
            f"{path} has {size} bytes: expected tokens of {width} bytes each, as nanoGPT writes them, or Megatron's "
            f"{path[:-4]}.idx beside it; --token-bits sets the width"
        )
    pairs = np.frombuffer(head, "<u2", len(head) // 4 * 2).reshape(-1, 2)
    if token_bits is None and len(pairs) >= _FEWEST_PAIRS and not pairs[:, 1].any() and pairs[:, 0].any():
        raise UserError(
            f"{path}: every second number of 16 bits is 0, so its tokens have 32 bits: --token-bits 32 reads them (16 "
            "reads it as it is)"
        )
    return _Array(path, f"<u{width}", 0, size // width)


def _flat_units(array: _Array, validation_fraction: float | None) -> Iterator[Unit]:
    if validation_fraction is None:
        parts = [(TRAIN, 0, array.tokens)]  # the source assigns another split
    else:
        cut = int(array.tokens * (1 - validation_fraction))
        parts = [(TRAIN, 0, cut), (VALIDATION, cut, array.tokens)]
    itemsize = np.dtype(array.dtype).itemsize
    step = max(1, documents.UNIT_BYTES // itemsize)
    extra = array.offset  # the header belongs to the first unit
    for split, first, last in parts:
        for start in range(first, last, step):
            stop = min(start + step, last)
            size = (stop - start) * itemsize + extra
            yield Unit(size, partial(_flat_part, array, start, stop, split, stop == last))
            extra = 0


def _flat_part(array: _Array, start: int, stop: int, split: int, ends: bool) -> Iterator[Document]:
    name = f"{array.path}, tokens {start} to {stop}"
    yield Document(_tokens(array, start, stop), split, ends, name)


def _tokens(array: _Array, start: int, stop: int) -> np.ndarray:
    itemsize = np.dtype(array.dtype).itemsize
    with open_file(array.path) as file:
        file.seek(array.offset + start * itemsize)
        data = file.read((stop - start) * itemsize)
    if len(data) < (stop - start) * itemsize:
        raise UserError(f"{array.path} has shrunk while it was read")
    return np.frombuffer(data, array.dtype).astype(np.int64)


def _megatron_units(path: str, index: str) -> Iterator[Unit]:
    """The documents of a corpus, from the beginnings of its documents in the index."""
    with open_file(index) as file:
        head = file.read(34)
        rest = file.read()
    with open_file(path) as file:
        size = file.seek(0, 2)
    with reading(f"{index} is not an index of Megatron-LM for {path}; copy or write both again", struct.error):
        if head[:9] != _MEGATRON:
            raise ValueError("expected MMIDIDX at its beginning; indices before Megatron-LM 2.0 are not read")
        version, code, sequences, count = struct.unpack("<QBQQ", head[9:])
        if version != 1 or code not in _MEGATRON_DTYPES:
            raise ValueError(f"version {version} with type {code}; expected version 1 with integers")
        if len(rest) < 12 * sequences + 8 * count:
            raise ValueError("it is truncated")
        lengths = np.frombuffer(rest, "<i4", sequences)
        starts = np.frombuffer(rest, "<i8", count, 12 * sequences)
        if (
            lengths.min(initial=0) < 0
            or (np.diff(starts) < 0).any()
            or (count and (starts[0], starts[-1]) != (0, sequences))
        ):
            raise ValueError("its documents are not in order")
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        dtype = _MEGATRON_DTYPES[code]
        if ends[-1] * np.dtype(dtype).itemsize != size:
            raise ValueError(f"it lists {ends[-1]} tokens of {dtype}, and {path} has {size} bytes")
    array = _Array(path, dtype, 0, int(ends[-1]))
    bounds = ends[starts]
    itemsize = np.dtype(dtype).itemsize
    first = 0
    for number in range(1, len(bounds)):
        unit_bytes = int(bounds[number] - bounds[first]) * itemsize
        if unit_bytes >= documents.UNIT_BYTES or number == len(bounds) - 1:
            yield Unit(unit_bytes, partial(_megatron_documents, array, first, bounds[first : number + 1]))
            first = number


def _megatron_documents(array: _Array, number: int, bounds: np.ndarray) -> Iterator[Document]:
    tokens = _tokens(array, int(bounds[0]), int(bounds[-1]))
    for ids in np.split(tokens, bounds[1:-1] - bounds[0]):
        yield Document(ids, name=f"{array.path}, document {number}")
        number += 1
