"""A tensor of a safetensors file that is read when it is used (safetensors)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

# safetensors does not give these to numpy, which has no such dtypes itself.
_EIGHT_BITS = {"F8_E4M3": jnp.dtype("float8_e4m3fn"), "F8_E8M0": jnp.dtype("float8_e8m0fnu")}


class Stored(Protocol):
    """An unread tensor: of a file, or decoded from several of one."""

    def get_shape(self) -> list[int]:
        """Its shape."""

    def get_dtype(self) -> str:
        """Its dtype by safetensors' name, as "F32"."""

    def __getitem__(self, index: Any) -> np.ndarray:
        """Reads it, or some rows of it."""


class StoredTensor:
    """A tensor of a file that safetensors has opened; `str` names file and tensor for messages."""

    def __init__(self, path: Path, file: Any, key: str) -> None:
        self._path = path
        self._key = key
        self._slice = file.get_slice(key)

    def get_shape(self) -> list[int]:
        """See `Stored`."""
        return list(self._slice.get_shape())

    def get_dtype(self) -> str:
        """See `Stored`."""
        return str(self._slice.get_dtype())

    def __getitem__(self, index: Any) -> np.ndarray:
        """See `Stored`."""
        dtype = _EIGHT_BITS.get(self.get_dtype())
        if dtype is None:
            return np.asarray(self._slice[index])
        return np.asarray(self._mapped(dtype)[index])

    def _mapped(self, dtype: np.dtype) -> np.ndarray:
        """The bytes of the file, by the offset in its header (the format's page in safetensors' documentation)."""
        with self._path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begin, _ = json.loads(file.read(length))[self._key]["data_offsets"]
        return np.memmap(self._path, dtype, "r", offset=8 + length + begin, shape=tuple(self.get_shape()))

    def __str__(self) -> str:
        return f"{self._path}, tensor {self._key}"
