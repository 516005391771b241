"""Token shards: index files that list them, and the rows in a tar file, checked one by one (webdataset)."""

from __future__ import annotations

import functools
import io
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from webdataset.tariterators import group_by_keys

from zero.runtime import storage
from zero.runtime.errors import UserError

BROKEN = (EOFError, ValueError)  # what parsing raises for a shard that is not whole
_NPY_HEADER = 1024  # bytes to read for it; numpy writes 128
_log = logging.getLogger(__name__)
Rows = tuple[np.ndarray, np.ndarray]  # tokens (n, T), and how many of them each row has (n,)


class BadData(UserError):
    """A shard that is missing or damaged, or a sample that is none: what a loader may be told to skip."""


@dataclass(frozen=True)
class Shard:
    """One tar file and the rows it holds."""

    path: str  # or gs://bucket/name
    rows: int

    @property
    def name(self) -> str:
        """Corpus and file: what stays the same when a corpus moves to another disk or a bucket."""
        path = self.path if storage.is_remote(self.path) else os.path.abspath(self.path)
        return "/".join(path.split("/")[-2:])


def read_index(index: str | Path, skip_bad: bool = False) -> list[Shard]:
    """The shards of an .index file: one path or address a line, relative to the file; `#` begins a comment.

    A comment of `<n> rows` after a path, as data/prepare.py writes it, saves counting the rows of that shard.
    Raises UserError for a missing or empty index and for shards that cannot be counted, and BadData for shards that are
    missing, unless `skip_bad`.
    """
    try:
        lines = storage.read_bytes(index).decode().splitlines()
    except FileNotFoundError:
        raise UserError(f"index file {index}: no such file; python data/prepare.py writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"index file {index} cannot be read: {error}") from error
    found: list[tuple[str, int | None]] = []
    for line in lines:
        name, *comment = re.split(r"(?:^|\s+)#", line.strip(), maxsplit=1)
        if name:
            counted = re.match(r"\s*(\d+) rows\b", "".join(comment))
            found.append((storage.join(storage.parent(index), name), int(counted[1]) if counted else None))
    if not found:
        raise UserError(f"index file {index} lists no shards; expected one path a line")
    try:
        missing = _missing([path for path, _ in found])
    except UserError as error:
        raise UserError(f"index file {index}: shard {error}") from error
    if missing and not skip_bad:
        raise BadData(f"index file {index}: shard {missing[0]} is missing")
    return [Shard(path, count_rows(path) if rows is None else rows) for path, rows in found]


def _missing(paths: list[str]) -> list[str]:
    """Those that are not there. A bucket that may be read and not listed shows it later, when they are read."""
    missing = [path for path in paths if not storage.is_remote(path) and not os.path.isfile(path)]
    remote = [path for path in paths if storage.is_remote(path)]
    for directory in dict.fromkeys(map(storage.parent, remote)):
        try:
            there = set(storage.list_files(directory))
        except storage.AccessDenied as error:
            _log.warning("shards that are missing will show when they are read: %s", error)
            continue
        missing += [path for path in remote if storage.parent(path) == directory and path not in there]
    return missing


def count_rows(path: str | Path) -> int:
    """Rows of a shard, from the headers of its members alone; raises BadData for a shard that is not whole."""

    def count(stream: BinaryIO) -> int:
        rows = 0
        for name, data in _tar_files(stream, most=_NPY_HEADER):
            if name.lower().endswith(".input_id.npy"):
                shape = _npy_header(data).shape
                rows += shape[0] if len(shape) == 2 else 1
        return rows

    try:
        return storage.read(path, count)
    except FileNotFoundError:
        raise BadData(f"shard {path} is missing, and the index file does not say how many rows it has") from None
    except BROKEN as error:
        raise BadData(f"shard {path} is truncated or damaged: {error}") from error
    except OSError as error:
        raise UserError(f"shard {path} cannot be read: {error}") from error


def row_tokens(index: str | Path | Sequence[str | Path]) -> int:
    """Tokens of a row as the shards hold them, of the first one in the index."""
    shard = read_index(index if isinstance(index, str | Path) else index[0])[0]
    sample = storage.read(shard.path, lambda stream: next(samples(shard, stream)))
    return _array(sample, "input_id.npy", f"shard {shard.path}, sample {sample['__key__']}").shape[-1]


def samples(shard: Shard, stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """The samples of a shard in webdataset's convention: `__key__` and the bytes of each member."""
    files = ({"fname": name, "data": data, "__url__": shard.path} for name, data in _tar_files(stream))
    try:
        yield from group_by_keys(files)
    # webdataset adds its stream and its address to the arguments; the first one is the message
    except BROKEN as error:
        raise BadData(f"shard {shard.path} is truncated or damaged: {error.args[0]}") from error
    except UserError as error:
        raise UserError(error.args[0]) from error


def _tar_files(stream: BinaryIO, most: int | None = None) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a tar, as they come; of each file at most its first bytes.

    Beside tarfile this takes no damaged header for the end of the archive, and a tenth of the time.
    """
    long_name = b""  # of the next file
    while (header := _read_exactly(stream, 512)) != bytes(512):
        # The checksum is the sum of the header's bytes, its own eight taken for blanks.
        if _octal(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * 32:
            raise ValueError("a header does not match its checksum")
        size, kind = _octal(header[124:136]), header[156:157]
        wanted = size if most is None or kind not in b"0\0" else min(size, most)
        data = _read_exactly(stream, wanted)
        if wanted < size:
            stream.seek(size - wanted, os.SEEK_CUR)
        _read_exactly(stream, -size % 512)
        if kind == b"L":  # GNU tar
            long_name = data.rstrip(b"\0")
        elif kind == b"x":  # POSIX: lines of "<length> <key>=<value>"
            found = re.search(rb"^\d+ path=(.*)$", data, re.MULTILINE)
            long_name = found[1] if found else b""
        elif kind in b"0\0":
            prefix = header[345:500] if header[257:263] == b"ustar\0" else b""
            short_name = b"/".join(part for field in (prefix, header[:100]) if (part := field.partition(b"\0")[0]))
            name = (long_name or short_name).decode("utf-8", "surrogateescape")
            long_name = b""
            if not re.match(r"__[^/]*__(/|$)", name):  # webdataset's mark of what is no sample
                yield name, data


def _octal(field: bytes) -> int:
    digits = field.strip(b" \0")
    if not digits.isdigit():
        raise ValueError("this is no tar header")
    return int(digits, 8)


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("it ends too early")
    return data


class _Npy(NamedTuple):
    """What the beginning of a .npy file says."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype
    offset: int  # of the data


def _npy_header(data: bytes) -> _Npy:
    size = 2 if data[6:7] == b"\1" else 4  # of the header's length, by the format's version
    return _parse_npy_header(data[: 8 + size + int.from_bytes(data[8 : 8 + size], "little")])


@functools.lru_cache(maxsize=1024)  # members of one shape share their header, and numpy compiles it each time
def _parse_npy_header(header: bytes) -> _Npy:
    file = io.BytesIO(header)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return _Npy(*read(file), file.tell())


def _array(sample: dict[str, Any], member: str, where: str) -> np.ndarray:
    """An integer array. Nothing is unpickled: objects are refused by their type."""
    if member not in sample:
        others = ", ".join(name for name in sample if not name.startswith("__"))
        raise BadData(f"{where} has no member {member}, only {others}")
    try:
        header = _npy_header(sample[member])
        if header.dtype.kind not in "ui":
            raise BadData(f"{where}: member {member} must hold integers, not {header.dtype}")
        count = math.prod(header.shape)
        array = np.frombuffer(sample[member], header.dtype, count, header.offset)
    except ValueError as error:
        raise BadData(f"{where}: member {member} is not a whole .npy array: {error}") from error
    return array.reshape(header.shape, order="F" if header.fortran else "C")


def decode(sample: dict[str, Any], where: str, context: int, vocab_size: int) -> Rows:
    """Checked rows (n, T) and the number of tokens in each (n,), both as the sample holds them."""
    rows = _array(sample, "input_id.npy", where)
    if rows.ndim not in (1, 2):
        raise BadData(f"{where}: input_id.npy must have 1 or 2 dimensions, not {rows.ndim}")
    rows = rows.reshape(-1, rows.shape[-1])
    if rows.shape[1] < context:
        raise BadData(
            f"{where} holds rows of {rows.shape[1]} tokens, and the model reads {context}: "
            f"prepare the corpus again: python data/prepare.py <source> --row-tokens {context} --overwrite"
        )
    rows = rows[:, :context]
    lengths = np.full(len(rows), context)
    if "length.npy" in sample:
        given = _array(sample, "length.npy", where).reshape(-1)
        if given.shape != lengths.shape or (given.size and given.min() < 0):
            raise BadData(f"{where}: length.npy must hold one length for each of {len(rows)} rows")
        lengths = np.minimum(given, context)
        rows = np.where(np.arange(context) < lengths[:, None], rows, np.zeros((), rows.dtype))
    info = np.iinfo(rows.dtype)
    if rows.size and (info.min < 0 or info.max >= vocab_size):  # a byte needs no look
        low, high = 0 if info.min == 0 else int(rows.min()), int(rows.max())
        if low < 0 or high >= vocab_size:
            token = low if low < 0 else high
            raise BadData(f"{where} holds token {token}, outside the vocabulary of {vocab_size}")
    return rows, lengths
