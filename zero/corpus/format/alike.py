"""Neighboring files of a tar that hold one row each, checked and read at once: rows without a loop over them.

Shapes: n files, R tokens of a row.
"""

from __future__ import annotations

import numpy as np

MOST = 4096  # files that are looked at together
_BLOCK = 512  # bytes of a header; data are padded to a multiple of it
_NAME = slice(0, 100)
_SIZE = slice(124, 136)
_CHECKSUM = slice(148, 156)
_FIELDS = (_SIZE, slice(156, 157), slice(257, 263), slice(345, 500))  # size, kind, format, and directories of a name


def rows_alike(
    data: memoryview, at: int, suffix: bytes, npy_bytes: int, dtype: np.dtype, tokens: int
) -> tuple[list[str], np.ndarray]:
    """The names and rows (n, R) of files that are like the one whose header is `at`, of which it is the first.

    They have other names than their neighbors, of the same length, with dots and slashes at the same places and the
    same suffix; the same size and the same header of .npy; and the checksums of their headers are right. The rows are a
    view of the data.

    Args:
      at: of the first header, whose file is a row.
      suffix: of the names.
      npy_bytes: of the header of .npy.
      dtype: of the row, which is all that the file holds after it.
      tokens: R.
    """
    size = npy_bytes + tokens * dtype.itemsize
    stride = _BLOCK + -(-size // _BLOCK) * _BLOCK
    count = min((len(data) - at) // stride, MOST)
    second = at + stride
    if count < 2 or data[second + 124 : second + 136] != data[at + 124 : at + 136]:  # most other files differ here
        return [], np.empty((0, tokens), dtype)
    files = np.frombuffer(data, np.uint8, count * stride, at).reshape(count, stride)
    header = files[:, :_BLOCK]
    first = files[0]
    is_alike = _has_checksum(header)
    for field in _FIELDS:
        is_alike &= (header[:, field] == first[field]).all(axis=1)
    start = slice(_BLOCK, _BLOCK + npy_bytes)
    is_alike &= (files[:, start] == first[start]).all(axis=1)
    names = header[:, _NAME]
    length = int(np.argmax(first[_NAME] == 0)) or 100
    is_alike &= (names[:, length:] == 0).all(axis=1)
    for character in b"./\n\0":
        is_alike &= ((names[:, :length] == character) == (first[:length] == character)).all(axis=1)
    end = slice(length - len(suffix), length)
    is_alike &= (names[:, end] == np.frombuffer(suffix, np.uint8)).all(axis=1)
    is_alike &= (names[:, :2] != ord("_")).any(axis=1)  # else it may be metadata
    is_alike[1:] &= (names[1:] != names[:-1]).any(axis=1)
    count = count if is_alike.all() else int(np.argmin(is_alike))
    lines = np.full((count, length + 1), ord("\n"), np.uint8)
    lines[:, :length] = names[:count, :length]
    texts = lines.tobytes().decode("utf-8", "backslashreplace").split("\n")[:-1]
    rows = files[:count, _BLOCK + npy_bytes : _BLOCK + size].view(dtype)
    return texts, rows


def _has_checksum(header: np.ndarray) -> np.ndarray:
    """Whether each header (n, 512) has the checksum that it states, with digits at the same places as in the first."""
    field = header[:, _CHECKSUM]
    is_digit = (field[0] >= ord("0")) & (field[0] <= ord("7"))
    values = field[:, is_digit].astype(np.int64) - ord("0")
    stated = values @ 8 ** np.arange(is_digit.sum())[::-1]
    total = header.sum(axis=1, dtype=np.int64) - field.sum(axis=1, dtype=np.int64) + 8 * ord(" ")
    is_same = (field[:, ~is_digit] == field[0, ~is_digit]).all(axis=1)
    return is_same & (values >= 0).all(axis=1) & (values < 8).all(axis=1) & (stated == total)
