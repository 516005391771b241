"""A teacher's most likely next tokens at each position of a corpus, stored beside its index file.

Beside `NAME.index` are three files. `NAME.teacher-tokens.npy` holds integers `(rows, positions, K)`, the most likely
token first; `NAME.teacher-log_probabilities.npy` float32 of the same shape, in nats. `NAME.teacher.json` describes them
and is written last. A position is the token that was read last; what follows the last token of a row is predicted too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from zero.base.errors import UserError, file_error, reason
from zero.corpus.format import directory
from zero.files import storage
from zero.files.parsing import reading

TOKENS, LOG_PROBABILITIES = ARRAYS = ("tokens", "log_probabilities")


@dataclass(frozen=True)
class TopTokens:
    """What is stored beside an index file.

    Attributes:
      rows, positions, count: the shape of the arrays.
      largest: the largest token.
      contents: what identifies the shards, as `zero.corpus.reading.contents` has it.
      sha256: of all values.
    """

    rows: int
    positions: int
    count: int
    largest: int
    contents: list[Any]
    sha256: str

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, self.positions, self.count


def _stem(index: str) -> str:
    return index.removesuffix(".index") + ".teacher"


def _path(index: str, array: str) -> str:
    return f"{_stem(index)}-{array}.npy"


def write_top_tokens(
    index: str,
    shape: tuple[int, int, int],
    vocab_size: int,
    contents: list[Any],
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
) -> TopTokens:
    """Writes tokens and log-probabilities `(n, positions, K)` of the next rows, batch by batch.

    Args:
      shape: of all rows, `(rows, positions, K)`.

    Raises:
      UserError: the disk cannot be written, or the index file is in a bucket.
    """
    if storage.is_remote(index):
        raise UserError(f"{index}: a teacher's tokens are written beside an index file on a disk; copy it first")
    storage.remove(f"{_stem(index)}.json")
    dtypes = {TOKENS: np.dtype(np.min_scalar_type(vocab_size - 1)), LOG_PROBABILITIES: np.dtype(np.float32)}
    digest = hashlib.sha256()
    largest = 0
    try:
        unfinished = {name: f"{_path(index, name)}.unfinished" for name in ARRAYS}
        arrays = {
            name: np.lib.format.open_memmap(unfinished[name], mode="w+", dtype=dtype, shape=shape)
            for name, dtype in dtypes.items()
        }
        first = 0
        for batch in batches:
            for array, values in zip(arrays.values(), batch, strict=True):
                part = array[first : first + len(values)]
                part[:] = values
                digest.update(part.tobytes())
            largest = max(largest, int(batch[0].max()))
            first += len(batch[0])
        for name, array in arrays.items():
            array.flush()
            os.replace(unfinished[name], _path(index, name))
    except OSError as error:
        raise file_error(f"{_stem(index)}: a teacher's tokens cannot be written: {reason(error)}", error) from error
    described = TopTokens(*shape, largest, contents, digest.hexdigest())
    directory.write(f"{_stem(index)}.json", (json.dumps(asdict(described), indent=2) + "\n").encode())
    return described


def read_top_tokens(index: str) -> tuple[TopTokens, dict[str, np.ndarray]]:
    """The values stored beside an index file. Arrays stay on disk until they are used.

    Raises:
      UserError: there is nothing, or a file is not whole.
    """
    path = f"{_stem(index)}.json"
    if not storage.exists(path):
        raise UserError(
            f"{path}: no such file; mode=evaluate evaluate.top_tokens=32 evaluate.index={index} writes the most likely "
            "tokens of a teacher, model.model_path"
        )
    with _readable(path):
        described = TopTokens(**json.loads(directory.read(path)))
    arrays = {}
    for name in ARRAYS:
        with _readable(_path(index, name)):
            arrays[name] = np.load(_path(index, name), mmap_mode="r", allow_pickle=False)
            if arrays[name].shape != described.shape:
                raise ValueError(f"its shape {arrays[name].shape} is not {described.shape}")
    return described, arrays


@contextmanager
def _readable(path: str) -> Iterator[None]:
    remedy = "write it again by mode=evaluate evaluate.top_tokens"
    try:
        with reading(f"{path} is damaged; {remedy}"):
            yield
    except OSError as error:
        raise file_error(f"{path} cannot be read: {reason(error)}", error) from error
