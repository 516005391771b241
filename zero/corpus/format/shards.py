"""The rows of one shard: a tar file of .npy arrays in webdataset's convention, every sample checked.

A row of an example with k texts is all of them: `(n, k, R)`.

Shapes: n rows of a sample, R tokens of a row, T tokens of a sequence (the context), k sequences of a row.
"""

from __future__ import annotations

import errno
import functools
import io
import math
import os
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from zero.base.errors import UserError, file_error, first_line
from zero.corpus.format.alike import rows_alike
from zero.corpus.format.crop import Crop, Draw, cut, lengths_after
from zero.corpus.format.example import TEXT, Example
from zero.corpus.format.memory import Memory, Stream
from zero.corpus.format.tar import REMEDY, short_name, tar_files
from zero.files import storage
from zero.files.parsing import MALFORMED, reading

_NO_SUCH_PATH = {errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}
ROWS, LENGTHS, COMPLETIONS = "input_id.npy", "length.npy", "completion.npy"  # members of a sample
NPY_HEADER = 1024  # bytes to read for it; numpy writes 128
_MEMBER = re.compile(r"((?:.*/|)[^.]+)\.([^/]*)")  # the key and the suffix of a file


class RowArrays(NamedTuple):
    """Rows, with what belongs to each of them."""

    tokens: np.ndarray  # (n, T), or (n, texts * T)
    lengths: np.ndarray  # (n,), the number of tokens in each
    extra: dict[str, np.ndarray]  # (n, ...), entries of `Batch.extra`

    def at(self, places: int | slice | np.ndarray) -> RowArrays:
        """Some of the rows, or the rows of one of several batches: a view unless `places` is an array."""
        extra = {name: x[places] for name, x in self.extra.items()}
        return RowArrays(self.tokens[places], self.lengths[places], extra)

    def copy(self) -> RowArrays:
        """The same rows in memory of their own."""
        return RowArrays(self.tokens.copy(), self.lengths.copy(), {name: x.copy() for name, x in self.extra.items()})

    def put(self, places: slice | np.ndarray, rows: RowArrays) -> None:
        """Copies rows into these places."""
        self.tokens[places] = rows.tokens
        self.lengths[places] = rows.lengths
        for name, x in rows.extra.items():
            self.extra[name][places] = x

    def empty(self, count: int) -> RowArrays:
        """So many rows without tokens."""
        extra = {name: np.zeros((count, *x.shape[1:]), x.dtype) for name, x in self.extra.items()}
        return RowArrays(np.zeros((count, *self.tokens.shape[1:]), self.tokens.dtype), np.zeros(count, np.int32), extra)

    @staticmethod
    def concatenated(parts: Sequence[RowArrays]) -> RowArrays:
        """The rows of one part after the other."""
        if len(parts) == 1:
            return parts[0]
        extra = {name: np.concatenate([part.extra[name] for part in parts]) for name in parts[0].extra}
        tokens = np.concatenate([part.tokens for part in parts])
        return RowArrays(tokens, np.concatenate([part.lengths for part in parts]), extra)


class BadData(UserError):
    """A missing or damaged shard, or a sample that cannot be used; a loader can be configured to skip them."""


@contextmanager
def open_shard(
    path: str | Path, opener: Callable[[Any], BinaryIO] = storage.open_reader, missing: str = "is missing"
) -> Iterator[BinaryIO]:
    """A shard to read from.

    Raises:
      BadData: it does not exist, which `missing` describes, or is not a file, such as a directory.
      UserError: a disk fails, or access is denied.
    """
    if not storage.is_remote(path) and os.path.exists(path) and not os.path.isfile(path):
        raise BadData(f"shard {path} is not a file")  # to open a pipe would wait forever
    try:
        with opener(path) as stream:
            yield stream
    except FileNotFoundError:
        raise BadData(f"shard {path} {missing}") from None
    except OSError as error:
        if error.errno in _NO_SUCH_PATH:
            raise BadData(f"shard {path} {missing}: {error.strerror}") from error
        raise file_error(f"shard {path} cannot be read: {error}", error) from error


def count_rows(path: str | Path) -> int:
    """Rows of a shard, from only the headers of its members; raises BadData for a truncated or damaged shard."""
    rows, missing = 0, "is missing, and the index file does not record its number of rows"
    is_empty = True
    with reading(f"shard {path} is truncated or damaged", kind=BadData), open_shard(path, missing=missing) as stream:
        others = set()
        for name, data, size in tar_files(path, stream, most=NPY_HEADER):
            is_empty = False
            others.add(name.rpartition(".")[2])
            if name.lower().endswith(".input_id.npy"):
                with reading(f"shard {path}: {name} is not a complete .npy array", kind=BadData):
                    shape = npy_header(data).shape
                if len(shape) > 1 and shape[0] > size:  # a row is a byte at least
                    raise ValueError(f"{name} has the shape {shape} and {size} bytes")
                rows += shape[0] if len(shape) > 1 else 1
        if is_empty:  # of zeros, which mark the end of an archive, and which a lost disk leaves of a file
            raise ValueError("it holds no files")
    if not rows and not is_empty and "npy" not in others:
        raise UserError(f"shard {path} holds no {ROWS}, only .{', .'.join(sorted(others))}; {REMEDY.format(path)}")
    return rows


def row_tokens(path: str) -> int:
    """The number of tokens per row, or per text of an example, according to the first sample of a shard.

    Raises:
      BadData: the shard is missing, or its first sample holds no rows.
    """
    with open_shard(path) as stream:
        sample = next(read_samples(path, stream), None)
    if sample is None:
        raise BadData(f"shard {path} holds no sample")
    name = f"shard {path}, sample {sample['__key__']}"
    rows = _array(sample, ROWS, name)
    return rows.shape[-1] if rows.ndim == 3 else rows_of(sample, name, TEXT).shape[1]


def read_samples(path: str, stream: Stream) -> Iterator[dict[str, Any]]:
    """The samples of a shard: `__key__` and the bytes of each member, by its suffix in lower case; or views of them.

    As in webdataset, neighboring files are members of one sample if their paths agree up to the first dot of the file
    name, and files without a suffix are left out.

    Of a shard in memory, neighboring samples that are one row each, alike in shape, come as one with all their rows,
    and with their keys as `__keys__`; `one_by_one` takes them apart.
    """
    sample: dict[str, Any] = {}
    try:
        for name, data, _ in tar_files(path, stream):
            match = _MEMBER.fullmatch(name)
            if match is None:
                continue
            key = match[1]
            suffix = match[2].lower()
            if sample and key != sample["__key__"]:
                yield sample
                sample = {}
            if suffix in sample:
                raise ValueError(f"{name} appears twice")
            sample |= {"__key__": key, suffix: data}
            if isinstance(stream, Memory) and match[2] == ROWS and len(sample) == 2:
                rows = _rows_alike(stream, name, key, data)
                if rows is not None:
                    yield rows
                    sample = {}
        if sample:
            yield sample
    except MALFORMED as error:
        raise BadData(f"shard {path} is truncated or damaged: {first_line(error)}; copy it again") from error


def _rows_alike(memory: Memory, name: str, key: str, data: bytes | memoryview) -> dict[str, Any] | None:
    """The sample that begins with this file and those after it, as one, if each is one row; the memory is after them.

    None if there is no other: the last file that is like the first may have more members after it.
    """
    try:
        header = npy_header(data)
    except MALFORMED:
        return None
    is_whole = len(data) == header.offset + math.prod(header.shape) * header.dtype.itemsize
    if not is_whole or len(header.shape) != 1 or header.dtype.kind not in "ui" or "\n" in name:
        return None
    padding = -len(data) % 512
    begin = memory.at - padding - len(data) - 512
    if name != short_name(bytes(memory.data[begin : begin + 512])).decode("utf-8", "backslashreplace"):
        return None  # it is a long name, of a file before
    suffix = f".{ROWS}".encode()
    names, rows = rows_alike(memory.data, begin, suffix, header.offset, header.dtype, header.shape[0])
    if len(names) < 3:
        return None
    folder = name.removesuffix(names[0])
    keys = [folder + other.removesuffix(f".{ROWS}") for other in names[:-1]]
    memory.at = begin + len(keys) * (512 + len(data) + padding)
    return {"__key__": key, "__keys__": keys, ROWS: rows[:-1]}


def one_by_one(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The samples that `read_samples` gives as one."""
    keys = sample.get("__keys__")
    if keys is None:
        yield sample
        return
    for key, row in zip(keys, sample[ROWS], strict=True):
        yield {"__key__": key, ROWS: row}


def with_neighbors(path: str, samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same samples, whose members have to be neighbors in the shard: one would be read without the others.

    Several samples may have the same key, as in shards that were joined, if they share a member.

    Raises:
      UserError: the members of a sample are apart. No skipping helps, because the first of them has been read.
    """
    members: dict[str, set[str]] = {}
    for sample in samples:
        suffixes = sample.keys() - {"__key__", "__keys__"}
        for key in sample.get("__keys__", [sample["__key__"]]):
            earlier = members.setdefault(key, suffixes)
            if earlier is not suffixes and not earlier & suffixes:
                first, second = (", ".join(sorted(names)) for names in (earlier, suffixes))
                raise UserError(
                    f"shard {path}, sample {key}: its members are not adjacent ({first} and {second} are apart); write "
                    "all members of a sample one after the other, as webdataset does"
                )
        yield sample


def rows_of(sample: dict[str, Any], name: str, example: Example) -> np.ndarray:
    """The rows (n, R) of a sample; of one of several texts per row, these in turn, (texts * n, R).

    Raises UserError, not BadData, for a corpus of another kind of examples: it is not damaged.
    """
    rows = _array(sample, ROWS, name)
    has_texts = rows.ndim == 3
    members = {key for key in sample if not key.startswith("__")} - {ROWS, LENGTHS, COMPLETIONS}
    is_example = rows.shape[1:2] == (example.texts,) and members == {f"{name}.npy" for name in example.members}
    if example.is_whole and not (has_texts and is_example):
        arrays = "".join(f" and {member}.npy of (rows,)" for member in example.members)
        raise UserError(
            f"{name}: input_id.npy has the shape {rows.shape}; the objective expects "
            f"(rows, {example.texts}, tokens){arrays}, which zero-prepare {example.option} writes"
        )
    if has_texts and not example.is_whole and (rows.shape[1] > 1 or members):
        raise UserError(f"{name} holds {rows.shape[1]} texts per row, but the objective reads rows of running text")
    if rows.ndim not in (1, 2) and not example.is_whole:
        raise BadData(f"{name}: input_id.npy must have 1 or 2 dimensions, not {rows.ndim}")
    return rows.reshape(-1, rows.shape[2]) if example.is_whole else np.atleast_2d(rows)


def lengths_of(sample: dict[str, Any], name: str, rows: np.ndarray) -> np.ndarray:
    """The number of tokens in each row of a sample (n,) that are not padding."""
    lengths = np.full(len(rows), rows.shape[1])
    if LENGTHS in sample:
        recorded = _array(sample, LENGTHS, name).reshape(-1)
        if recorded.shape != lengths.shape or (recorded.size and recorded.min() < 0):
            raise BadData(f"{name}: {LENGTHS} must hold one length for each of {len(rows)} rows")
        lengths = np.minimum(recorded, rows.shape[1]).astype(np.int64)
    return lengths


class Decoded(NamedTuple):
    """The sequences (n * k, T) of a sample, and the number of tokens in each (n * k,)."""

    tokens: np.ndarray
    lengths: np.ndarray
    total: int  # tokens of the rows that they were cut from, without padding
    extra: dict[str, np.ndarray]  # (n,), the members of an example beside its tokens


@dataclass(frozen=True)
class RowFormat:
    """What a row of a corpus becomes.

    Attributes:
      context: tokens of a sequence.
      vocab_size: token ids must be below it.
      crop: how longer rows are cut: "first", their first `context` tokens; "all", floor(R / context) sequences of a row
        of R tokens, each of which counts as a row of the order; "random", one sequence at an offset that depends on the
        seed, the epoch and the row.
      only_completions: tokens that completion.npy does not count among the completions are not predicted.
      example: what a row holds; several texts are for `only_completions` and the crop "first".
    """

    context: int
    vocab_size: int
    crop: str = "first"
    only_completions: bool = False
    example: Example = TEXT


def decode(
    sample: dict[str, Any],
    name: str,
    form: RowFormat,
    crop: Crop,
    draw: Draw,
) -> Decoded:
    """The sequences of a sample, in its dtype; of a sample with several texts per row, int32 (n, texts * T).

    With `only_completions` a token t for which completion.npy has 0 is ~t, and they are int32. Every token id that
    the model would read is checked here: BadData, with `name`, for one outside the vocabulary.
    """
    context = form.context
    rows = rows_of(sample, name, form.example)
    if rows.shape[1] < context:
        raise BadData(
            f"{name} has rows of {rows.shape[1]} tokens, but the model reads {context}; prepare the corpus again: "
            f"zero-prepare <source> --row-tokens {context} --overwrite"
        )
    is_learned = _completions(sample, name, rows.shape) if form.only_completions else None
    lengths = lengths_of(sample, name, rows)
    total = int(lengths.sum())
    with reading(f"{name}: data.crop={crop.name} expects rows of one length; these give", kind=BadData):
        starts = crop.starts(lengths, rows.shape[1], context, draw)
    rows = cut(rows, starts, context)
    lengths = lengths_after(lengths, starts, context)
    if LENGTHS in sample:
        rows = np.where(np.arange(context) < lengths[:, None], rows, np.zeros((), rows.dtype))
    info = np.iinfo(rows.dtype)
    if rows.size and (info.min < 0 or info.max >= form.vocab_size):  # else no value of this dtype is outside
        low = 0 if info.min == 0 else int(rows.min())
        high = int(rows.max())
        if low < 0 or high >= form.vocab_size:
            token = low if low < 0 else high
            raise BadData(f"{name} holds token {token}, outside the vocabulary of {form.vocab_size}")
    if is_learned is not None:
        rows = rows.astype(np.int32)
        rows = np.where(cut(is_learned, starts, context), rows, ~rows)
    extra = {}
    for member in form.example.members:
        extra[member] = _array(sample, f"{member}.npy", name)
        if extra[member].shape != (len(rows) // form.example.texts,):
            raise BadData(f"{name}: {member}.npy must hold one number for each row, not {extra[member].shape}")
        _check_below(extra[member], form.example.below, f"{name}: {member}.npy")
    if form.example.is_whole:  # a row of whole texts is full, the shorter ones end in -1
        width = form.example.texts * context
        discarded = total - int(lengths.sum())
        rows = np.where(np.arange(context) < lengths[:, None], rows, -1).reshape(-1, width)
        return Decoded(rows, np.full(len(rows), width), rows.size + discarded, extra)
    return Decoded(rows, lengths, total, extra)


def _check_below(values: np.ndarray, below: int | None, name: str) -> None:
    """Raises UserError, not BadData, for a value that the objective does not have: the shard is not damaged."""
    if below is None or not values.size or (values.min() >= 0 and values.max() < below):
        return
    outside = int(values.max()) if values.max() >= below else int(values.min())
    raise UserError(f"{name} holds {outside}; the objective expects 0 to {below - 1}")


def _completions(sample: dict[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Whether each token of a sample is to be learned, bool of the shape of its rows.

    Raises UserError, not BadData, if it is not recorded: a corpus of another kind is not damaged.
    """
    if COMPLETIONS not in sample:
        raise UserError(
            f"{name} has no member completion.npy, which marks the completions: training.loss_on=completion needs "
            "a corpus of zero-prepare --completions"
        )
    marks = _array(sample, COMPLETIONS, name)
    if marks.shape[-1:] != shape[-1:] or marks.size != math.prod(shape):
        raise BadData(f"{name}: completion.npy must have the shape {shape} of input_id.npy, not {marks.shape}")
    return marks.reshape(shape) != 0


# ---- npy -------------------------------------------------------------------------------------------------------------


class NpyHeader(NamedTuple):
    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype
    offset: int  # of the data, in bytes


def npy_header(data: bytes | memoryview) -> NpyHeader:
    """The header of a .npy file, from its beginning."""
    size = 2 if data[6:7] == b"\1" else 4  # of the header's length, by the version of the format
    return _parse_npy_header(bytes(data[: 8 + size + int.from_bytes(data[8 : 8 + size], "little")]))


@functools.lru_cache(maxsize=1024)  # members of one shape share their header, which numpy takes long to parse
def _parse_npy_header(header: bytes) -> NpyHeader:
    file = io.BytesIO(header)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        parsed = NpyHeader(*read(file), file.tell())
    except tokenize.TokenError as error:  # numpy parses it as a Python literal
        raise ValueError(f"cannot parse its header: {error}") from error
    if min(parsed.shape, default=0) < 0:
        raise ValueError(f"its shape is {parsed.shape}")
    return parsed


def _array(sample: dict[str, Any], member: str, name: str) -> np.ndarray:
    """An integer array. Nothing is unpickled: object arrays are refused by their dtype."""
    if member not in sample:
        others = ", ".join(key for key in sample if not key.startswith("__"))
        raise BadData(
            f"{name} has no member {member}, only {others}; zero-prepare converts text and other token files to shards"
        )
    if isinstance(sample[member], np.ndarray):  # of samples that come as one
        return sample[member]
    with reading(f"{name}: member {member} is not a complete .npy array", kind=BadData):
        header = npy_header(sample[member])
        if header.dtype.kind not in "ui":
            raise BadData(f"{name}: member {member} must hold integers, not {header.dtype}")
        array = np.frombuffer(sample[member], header.dtype, math.prod(header.shape), header.offset)
    return array.reshape(header.shape, order="F" if header.is_fortran else "C")
