"""A teacher's most likely next tokens at each position of a corpus, stored beside its index file.

Beside `NAME.index` are three files. `NAME.teacher-tokens.npy` holds integers `(rows, positions, K)`, the most likely
token first; `NAME.teacher-log_probabilities.npy` float32 of the same shape, in nats. `NAME.teacher.json` describes
them, with a digest of each block of rows, and is written last. A position is the token that was read last; what follows
the last token of a row is predicted too.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zero.base.errors import UserError, file_error, reason
from zero.corpus.format import directory
from zero.corpus.format.row_blocks import BlockDigests, CheckedRows, rows_per_block
from zero.files import storage
from zero.files.parsing import reading
from zero.files.sole_writer import sole_writer

TOKENS, LOG_PROBABILITIES = ARRAYS = ("tokens", "log_probabilities")
_REMEDY = "restore it, or write it again by mode=evaluate evaluate.top_tokens"
_DTYPES = {TOKENS: ("|u1", "<u2", "<u4"), LOG_PROBABILITIES: ("<f4",)}  # digests do not cover the header of a .npy file
_ROUNDING = 1e-3  # by which probabilities in float32 may add up to more than 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TopTokens:
    """What is stored beside an index file.

    Attributes:
      rows, positions, count: the shape of the arrays.
      largest: the largest token.
      contents: what identifies the shards, as `zero.corpus.reading.contents` has it.
      sha256: of all values; it identifies them.
      block_rows: rows of a block.
      blocks: the SHA-256 of each block, by array; empty in files of earlier versions.
    """

    rows: int
    positions: int
    count: int
    largest: int
    contents: list[Any]
    sha256: str
    block_rows: int = 0
    blocks: Mapping[str, list[str]] = field(default_factory=dict)

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

    Earlier values stay in use until the new ones are complete.

    Args:
      shape: of all rows, `(rows, positions, K)`.

    Raises:
      UserError: another process is writing them, the values are impossible or not those of all rows, the disk cannot
        be written, or the index file is in a bucket.
    """
    if storage.is_remote(index):
        raise UserError(f"{index}: a teacher's tokens are written beside an index file on a disk; copy it first")
    place = f"{_stem(index)}: a teacher's tokens"
    lock = Path(f"{_stem(index)}.lock")
    try:
        with sole_writer(lock.with_name(f".{lock.name}"), place):
            return _write(index, shape, vocab_size, contents, batches)
    except OSError as error:
        raise file_error(f"{place} cannot be written: {reason(error)}", error) from error


def _write(
    index: str,
    shape: tuple[int, int, int],
    vocab_size: int,
    contents: list[Any],
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
) -> TopTokens:
    dtypes = {TOKENS: np.dtype(np.min_scalar_type(vocab_size - 1)), LOG_PROBABILITIES: np.dtype(np.float32)}
    paths = {name: Path(_path(index, name)) for name in ARRAYS}
    block_rows = rows_per_block(shape)
    blocks = {name: BlockDigests(block_rows) for name in ARRAYS}
    digest = hashlib.sha256()
    largest = rows = 0
    for path in paths.values():
        storage.remove_unfinished(path.parent, path.name)
    with ExitStack() as stack:
        files = {name: stack.enter_context(storage.replacing(path)) for name, path in paths.items()}
        for name, file in files.items():
            header = {"descr": np.lib.format.dtype_to_descr(dtypes[name]), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
        for batch in batches:
            if problem := _problem(batch[1]):
                raise UserError(f"{_stem(index)}: the teacher's log-probabilities: {problem}")
            rows += len(batch[0])
            for name, values in zip(ARRAYS, batch, strict=True):
                part = np.ascontiguousarray(values, dtypes[name])
                files[name].write(part.data)
                blocks[name].add(part)
                digest.update(part.data)
            largest = max(largest, int(batch[0].max()))
        if rows != shape[0]:
            raise UserError(f"{_stem(index)}: the teacher gave the tokens of {rows} rows; expected {shape[0]}")
        storage.remove(f"{_stem(index)}.json")  # the description of the arrays that are replaced now
    described = TopTokens(
        *shape,
        largest,
        contents,
        digest.hexdigest(),
        block_rows,
        {name: digests.finish() for name, digests in blocks.items()},
    )
    directory.write(f"{_stem(index)}.json", (json.dumps(asdict(described), indent=2) + "\n").encode())
    return described


def _problem(log_probabilities: np.ndarray) -> str | None:
    """What is impossible about log-probabilities `(..., K)` of different tokens."""
    if not np.isfinite(log_probabilities).all():
        return "not all are finite"
    most = np.exp(log_probabilities).sum(-1).max(initial=0)
    if most > 1 + _ROUNDING:
        return f"the probabilities of a position add up to {most:.4g}, more than 1"
    return None


def read_top_tokens(index: str) -> tuple[TopTokens, dict[str, CheckedRows]]:
    """The values stored beside an index file. Arrays stay on disk until they are used, and are compared then.

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
        if described.blocks and described.blocks.keys() != {*ARRAYS}:
            raise ValueError(f"it has digests of {', '.join(described.blocks)}; expected {', '.join(ARRAYS)}")
    if not described.blocks:
        _log.warning(
            "%s is of an earlier version, which stored no digests of rows: damage in its arrays is not noticed; "
            "mode=evaluate evaluate.top_tokens writes it again",
            path,
        )
    arrays = {}
    for name in ARRAYS:
        with _readable(_path(index, name)):
            array = np.load(_path(index, name), mmap_mode="r", allow_pickle=False)
            if array.shape != described.shape:
                raise ValueError(f"its shape {array.shape} is not {described.shape}")
            if array.dtype.str not in _DTYPES[name]:
                raise ValueError(f"its dtype is {array.dtype.str}; expected {' or '.join(_DTYPES[name])}")
            block_rows = described.block_rows or rows_per_block(described.shape)
            digests = described.blocks.get(name, ())
            if digests and len(digests) != -(-described.rows // block_rows):
                raise ValueError(f"{path} lists {len(digests)} blocks of {block_rows} of its {described.rows} rows")
            problem = _problem if name == LOG_PROBABILITIES else None
            arrays[name] = CheckedRows(array, digests, block_rows, _path(index, name), _REMEDY, problem)
    return described, arrays


@contextmanager
def _readable(path: str) -> Iterator[None]:
    remedy = "write it again by mode=evaluate evaluate.top_tokens"
    try:
        with reading(f"{path} is damaged; {remedy}"):
            yield
    except OSError as error:
        raise file_error(f"{path} cannot be read: {reason(error)}", error) from error
