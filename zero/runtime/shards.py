"""Token shards to batches: in one order for any number of hosts, and exactly from where a cursor says.

The order is arithmetic on the number of rows in each shard, so a position is a single number and finding it reads
nothing (docs/decisions/data-order.md says why):

- An epoch lays all rows in a line, shard after shard in an order drawn from (seed, epoch).
- The line is cut into S *streams* of equal length, S a divisor of the global batch. Row r of every batch comes from
  stream r * S // global_rows, so a host opens the shards of its own streams only.
- A stream takes its part of the line in *windows* of a few shards, and permutes each window whole. To resume is to read
  one window a stream again.
- Streams run on from epoch to epoch. A row that does not divide goes to another stream in each epoch, so all streams
  have given the same number of rows whenever a batch is full, and no row is ever twice or missing.
- In a mixture every corpus has streams of its own, and row n of stream s is of the corpus that (weights, s, n) say.
- A row that cannot be had (a missing shard, a corrupt sample) keeps its place in this order and holds no tokens.

Shapes: B rows of the global batch, T tokens (the context), N rows of an epoch.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import io
import itertools
import logging
import math
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from webdataset.tariterators import group_by_keys

from zero.runtime import UserError, storage
from zero.runtime.cache import Cache

_BROKEN = (EOFError, ValueError)  # what parsing raises for a shard that is not whole
_SKIPPED = -1  # the length of a row that could not be had
_REMOTE_THREADS = 16  # at most; they wait for the network, not for Python
_CUT = 1 << 21  # tokens that are made int32 at once: 8 MiB; from 4 on numpy asks for huge pages, a quarter faster
_NPY_HEADER = 1024  # bytes to read for it; numpy writes 128
_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Rows = tuple[np.ndarray, np.ndarray]  # tokens (n, T), and how many of them each row has (n,)


class Batch(NamedTuple):
    """One host's rows of a global batch, and where the data is after it."""

    tokens: np.ndarray  # int32 (B / hosts, T); -1 where there is no token
    cursor: dict[str, int]  # for `Loader.batches`; plain ints, so that JSON holds it
    skipped: int  # rows of these that could not be had


class BadData(UserError):
    """A shard that is missing or damaged, or a sample that is none: what a loader may be told to skip."""


# ---- shards and the index files that list them -----------------------------------------------------------------------


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
    except _BROKEN as error:
        raise BadData(f"shard {path} is truncated or damaged: {error}") from error
    except OSError as error:
        raise UserError(f"shard {path} cannot be read: {error}") from error


def row_tokens(index: str | Path | Sequence[str | Path]) -> int:
    """Tokens of a row as the shards hold them, of the first one in the index."""
    shard = read_index(index if isinstance(index, str | Path) else index[0])[0]
    sample = storage.read(shard.path, lambda stream: next(_samples(shard, stream)))
    return _array(sample, "input_id.npy", f"shard {shard.path}, sample {sample['__key__']}").shape[-1]


def _samples(shard: Shard, stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """The samples of a shard in webdataset's convention: `__key__` and the bytes of each member."""
    files = ({"fname": name, "data": data, "__url__": shard.path} for name, data in _tar_files(stream))
    try:
        yield from group_by_keys(files)
    # webdataset adds its stream and its address to the arguments; the first one is the message
    except _BROKEN as error:
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


def _decode(sample: dict[str, Any], where: str, context: int, vocab_size: int) -> _Rows:
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


# ---- the order: arithmetic, no files ---------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Rows start to stop of a shard."""

    shard: int
    start: int
    stop: int


class _Window(NamedTuple):
    """Pieces that are permuted as one; `skip` rows of the result were already used."""

    pieces: tuple[_Piece, ...]
    key: tuple[int, ...]
    skip: int


def _permutation(n: int, *key: int) -> np.ndarray:
    # numpy promises the raw bits of a generator for ever, and the results of its shuffle for one version only.
    return np.argsort(np.random.PCG64(key).random_raw(n), kind="stable")


@dataclass(frozen=True)
class _Order:
    rows: tuple[int, ...]  # of each shard
    streams: int
    window: int  # shards in a window of one stream
    seed: int | None  # None: as the shards stand
    epochs: int | None  # None: without end

    def windows(self, stream: int, row: int) -> Iterator[_Window]:
        """The windows of a stream from its `row` on (rows are counted over all epochs)."""
        total, streams = sum(self.rows), self.streams
        # Stream s has given (e * N + s) // S rows before epoch e; over all streams that makes e * N.
        begin = row * streams // total  # or the epoch after it
        skip = row - (begin * total + stream) // streams
        for epoch in itertools.count(begin) if self.epochs is None else range(begin, self.epochs):
            before, after = (np.arange(streams) + e * total for e in (epoch, epoch + 1))
            ends = np.cumsum(after // streams - before // streams)
            first, last = (int(ends[stream - 1]) if stream else 0), int(ends[stream])
            for number, pieces in enumerate(self._cut(epoch, first, last)):
                rows = sum(piece.stop - piece.start for piece in pieces)
                if skip < rows:
                    yield _Window(pieces, (self.seed or 0, epoch, stream, number), skip)
                skip = max(0, skip - rows)

    def _cut(self, epoch: int, first: int, last: int) -> Iterator[tuple[_Piece, ...]]:
        """The windows that make up rows `first` to `last` of an epoch's line."""
        count = len(self.rows)
        order = np.arange(count) if self.seed is None else _permutation(count, self.seed, epoch)
        ends = np.cumsum(np.asarray(self.rows)[order])
        pieces = []
        for place in range(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last, "left")) + 1):
            shard = int(order[place])
            begin = int(ends[place]) - self.rows[shard]
            pieces.append(_Piece(shard, max(first - begin, 0), min(last - begin, self.rows[shard])))
        for i in range(0, len(pieces), self.window):
            yield tuple(pieces[i : i + self.window])


@dataclass(frozen=True)
class _Mixture:
    """Which corpus each row of a stream is from."""

    weights: tuple[Fraction, ...]  # of each corpus; they sum to 1
    streams: int

    def counts(self, stream: int, row: int, count: int = 0) -> np.ndarray:
        """(corpora, 1 + count): how many rows of each corpus are among the first row, row + 1, ... of a stream.

        The first corpus takes its share of the rows, rounded down, the second its share of what that leaves, and so on:
        no count ever falls, and none drifts. Streams round at different rows, so that batches mix alike.
        """
        left, weight = row + np.arange(1 + count), Fraction(1)
        counts = []
        for own in self.weights[:-1]:
            share = own / weight
            step, whole = share.numerator * self.streams, share.denominator * self.streams
            first = int(left[0])  # exact, however large: Python's integers
            taken, rest = divmod(first * step + stream * share.denominator, whole)
            counts.append(taken + (rest + (left - first) * step) // whole)
            left, weight = left - counts[-1], weight - own
        return np.stack([*counts, left])


# ---- the loader ------------------------------------------------------------------------------------------------------


class Loader:
    """Batches of token rows from the shards of one or several index files.

    The sequence of global batches depends on the index files, `global_rows`, `seed`, `window`, `shuffle` and
    `train_samples` alone. Each of `hosts` loaders gives its own contiguous part of every batch.

    Args:
        index: the .index file, here or in a bucket; several that count as one; or a mixture, index files with weights.
        global_rows: rows of a batch over all hosts.
        context: tokens read of each row; longer rows are cut.
        vocab_size: tokens must lie below it.
        seed: of the order.
        shuffle: False reads the rows as the shards stand.
        max_epochs: where to stop; None never does. Rows at the very end that fill no batch are dropped where the order
            is shuffled; else the last batch is filled up with rows of -1. A mixture stops before any of its corpora
            has been read more often.
        train_samples: rows of an epoch, the first ones of the index; None is all.
        host: this loader's place among `hosts`.
        hosts: how many loaders share each batch.
        window: shards of a corpus that are mixed at any time. Twice as many are held in memory while the next ones are
            read.
        skip_bad: goes on without what is missing, damaged or no sample: its rows are -1, logged and counted in each
            batch. The index files must say how many rows each shard has.
        cache: where shards of a bucket are kept on this machine.

    Raises:
        UserError: what is wrong with the data, by file and sample; a batch that does not divide over the hosts.
    """

    def __init__(
        self,
        index: str | Path | Sequence[str | Path] | Mapping[str, float],
        *,
        global_rows: int,
        context: int,
        vocab_size: int,
        seed: int = 0,
        shuffle: bool = True,
        max_epochs: int | None = None,
        train_samples: int | None = None,
        host: int = 0,
        hosts: int = 1,
        window: int = 16,
        skip_bad: bool = False,
        cache: Cache | None = None,
    ):
        if global_rows % hosts:
            raise UserError(f"a global batch of {global_rows} rows does not divide over {hosts} hosts")
        mixture = index if isinstance(index, Mapping) else None
        if mixture is not None and not (shuffle and train_samples is None):
            raise UserError("a mixture of index files is shuffled, and takes no train_samples")
        indices = list(mixture) if mixture is not None else [index] if isinstance(index, str | Path) else list(index)
        groups = [[one] for one in indices] if mixture is not None else [indices]
        used = [_first_rows([s for one in group for s in read_index(one, skip_bad)], train_samples) for group in groups]
        for group, shards in zip(groups, used, strict=True):
            if not shards:
                raise UserError(f"index file {', '.join(map(str, group))}: the shards hold no samples")
        # As many streams as there are shards to mix, so that hosts share as few shards as can be.
        most = min(window, max(map(len, used))) if shuffle else 1
        streams = max(s for s in range(1, most + 1) if global_rows % s == 0)
        self.corpora = [
            _Corpus(
                shards,
                _Order(
                    tuple(rows for _, rows in shards), streams, max(1, window // streams) if shuffle else 1,
                    seed if shuffle else None, max_epochs,
                ),
                context, vocab_size, skip_bad, cache,
            )
            for shards in used
        ]  # fmt: skip
        self.rows = sum(corpus.rows for corpus in self.corpora)
        self._names = [Path(str(one)).stem for one in mixture or ()]
        self._mixture = _Mixture(_normalised(list(mixture.values()) if mixture is not None else [1]), streams)
        self._global_rows, self._host, self._hosts, self._context = global_rows, host, hosts, context
        self._streams, self._rows_a_stream = streams, global_rows // streams
        self.total_batches = None if max_epochs is None else self._batches_of(max_epochs, fill_up=not shuffle)
        if self.total_batches == 0:
            raise UserError(f"{max_epochs} epochs of {self.rows} rows do not fill one batch of {global_rows}")
        self._dropped = 0
        if max_epochs is not None and shuffle and mixture is None:
            self._dropped = max_epochs * self.rows % global_rows
        listing = "\n".join(
            [f"{shard.name} {shard.rows} {rows}" for shards in used for shard, rows in shards]
            + [f"{len(shards)} {weight}" for shards, weight in zip(used, self._mixture.weights, strict=True) if mixture]
        )
        self._identity = {
            "shards": int.from_bytes(hashlib.sha256(listing.encode()).digest()[:6]),
            "global_rows": global_rows,
            "seed": seed,
            "shuffle": int(shuffle),
            "window": window,
        }

    def _batches_of(self, epochs: int, fill_up: bool) -> int:
        """Batches until a stream has given `epochs` times its part of a corpus, or all of it in a batch filled up."""
        if fill_up:
            return -(-epochs * self.rows // self._global_rows)

        def fits(batches: int) -> bool:
            for stream in range(self._streams):
                counts = self._mixture.counts(stream, batches * self._rows_a_stream)[:, 0]
                for corpus, count in zip(self.corpora, counts.tolist(), strict=True):
                    if count > (epochs * corpus.rows + stream) // self._streams:
                        return False
            return True

        return bisect.bisect_left(
            range(1, epochs * self.rows // self._global_rows + 1), True, key=lambda k: not fits(k)
        )

    def rows_seen(self, batches: int) -> dict[str, int]:
        """Rows of each corpus of a mixture, by the name of its index file, that so many batches hold."""
        rows = batches * self._rows_a_stream
        counts = sum(self._mixture.counts(stream, rows)[:, 0] for stream in range(self._streams))
        return dict(zip(self._names, np.asarray(counts).tolist(), strict=bool(self._names)))

    def batches(self, cursor: dict[str, int] | None = None) -> Generator[Batch, None, None]:
        """Batches from the beginning, or from just after the one that `cursor` came with.

        Raises UserError for a cursor of other data or another order, by name.
        """
        done = self._position(cursor)
        part = self._rows_a_stream
        first = self._host * self._global_rows // self._hosts
        last = (self._host + 1) * self._global_rows // self._hosts
        mine = range(first // part, -(-last // part))
        first, last = first - mine.start * part, last - mine.start * part
        # More threads than cores only fight over Python's lock, unless they wait for a network.
        readers = len(mine) * len(self.corpora)
        is_remote = any(corpus.is_remote for corpus in self.corpora)
        pool = ThreadPoolExecutor(
            min(readers, _REMOTE_THREADS if is_remote else os.cpu_count() or 1), thread_name_prefix="shards"
        )
        try:
            streams = [
                [
                    _Stream(corpus.order.windows(stream, int(row)), corpus.load, pool)
                    for corpus, (row,) in zip(self.corpora, self._mixture.counts(stream, done * part), strict=True)
                ]
                for stream in mine
            ]
            a_batch = [float(weight * part) for weight in self._mixture.weights]  # rows of a stream
            while self.total_batches is None or done < self.total_batches:
                # Several batches are cut at once, where the rows are at hand: copying many costs little more than one.
                several = min(
                    int(reader.at_hand / rows)
                    for readers in streams
                    for reader, rows in zip(readers, a_batch, strict=True)
                )
                several = max(1, min(several, _CUT // (len(mine) * part * self._context)))
                if self.total_batches is not None:
                    several = min(several, self.total_batches - done)
                tokens = np.empty((several, len(mine), part, self._context), np.int32)
                lengths = np.empty((several, len(mine), part), np.int32)
                for i, stream in enumerate(mine):
                    self._take(stream, done * part, streams[i], tokens[:, i], lengths[:, i])
                if lengths.min() < self._context:
                    tokens[np.arange(self._context) >= lengths[..., None]] = -1
                skipped = (lengths.reshape(several, -1)[:, first:last] == _SKIPPED).sum(axis=1).tolist()
                for batch, without in zip(tokens.reshape(several, -1, self._context), skipped, strict=True):
                    done += 1
                    yield Batch(batch[first:last], {**self._identity, "batches": done}, without)
        finally:
            pool.shutdown(cancel_futures=True)
        if self._dropped:
            _log.info("end of the data: the last %d rows do not fill a batch and were not used", self._dropped)

    def _take(self, stream: int, row: int, readers: list[_Stream], tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Fills (batches, rows, T) and (batches, rows) with the rows of a stream from its `row` on."""
        count = lengths.size
        if len(readers) == 1:
            rows, row_lengths = readers[0].take(count)
            tokens[:], lengths[:] = rows.reshape(tokens.shape), row_lengths.reshape(lengths.shape)
            return
        is_own = np.diff(self._mixture.counts(stream, row, count)).astype(bool)
        for reader, own in zip(readers, is_own.reshape(-1, *lengths.shape), strict=True):
            if own.any():
                tokens[own], lengths[own] = reader.take(int(own.sum()))

    def _position(self, cursor: dict[str, int] | None) -> int:
        if cursor is None:
            return 0
        for name, now in self._identity.items():
            if cursor.get(name) != now:
                if name == "shards":
                    raise UserError("the saved data cursor belongs to other shards than the index file lists now")
                raise UserError(f"the saved data cursor belongs to {name}={cursor.get(name)}, not to {name}={now}")
        return cursor["batches"]


def _normalised(weights: list[float]) -> tuple[Fraction, ...]:
    """Weights that sum to 1, exactly: as they are written, to a millionth."""
    exact = [Fraction(str(weight)).limit_denominator(10**6) for weight in weights]
    if min(exact) <= 0:
        raise UserError(f"the weights of a mixture must be positive, not {min(weights)}")
    return tuple(weight / sum(exact) for weight in exact)


@dataclass(frozen=True)
class _Corpus:
    """Shards that count as one, and how their rows are read."""

    shards: list[tuple[Shard, int]]  # and how many rows of each are used
    order: _Order
    context: int
    vocab_size: int
    skip_bad: bool
    cache: Cache | None

    @property
    def rows(self) -> int:
        return sum(self.order.rows)

    @property
    def is_remote(self) -> bool:
        return any(storage.is_remote(shard.path) for shard, _ in self.shards)

    def load(self, window: _Window) -> _Rows:
        """Rows (n, T) of a window, permuted, in the smallest type that holds the vocabulary; tokens in each (n,)."""
        count = sum(piece.stop - piece.start for piece in window.pieces)
        slots = np.arange(count) if self.order.seed is None else _permutation(count, *window.key)
        tokens = np.empty((count, self.context), np.min_scalar_type(self.vocab_size - 1))
        lengths = np.empty(count, np.int32)
        for piece in window.pieces:
            own, slots = np.split(slots, [piece.stop - piece.start])
            for trouble in self._fill(piece, own, tokens, lengths):
                _log.warning("skipped: %s", trouble)
        return tokens[window.skip :], lengths[window.skip :]

    def _fill(self, piece: _Piece, slots: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> list[str]:
        """Puts the rows of a piece into these slots; what had to be skipped."""
        shard, _ = self.shards[piece.shard]

        def fill(stream: BinaryIO) -> list[str]:
            troubles: list[str] = []
            filled = 0
            for rows, row_lengths in self._read(piece, stream, troubles):
                into = slots[filled : filled + len(rows)]
                tokens[into], lengths[into] = rows, row_lengths
                filled += len(rows)
            tokens[slots[filled:]], lengths[slots[filled:]] = 0, _SKIPPED
            return troubles

        try:
            return storage.read(shard.path, fill, self.cache.reading if self.cache else storage.reading)
        except FileNotFoundError:
            if not self.skip_bad:
                raise BadData(f"shard {shard.path} is missing") from None
            tokens[slots], lengths[slots] = 0, _SKIPPED
            return [f"shard {shard.path} is missing"]
        except OSError as error:
            raise UserError(f"shard {shard.path} cannot be read: {error}") from error

    def _read(self, piece: _Piece, stream: BinaryIO, troubles: list[str]) -> Iterator[_Rows]:
        """The rows of a piece and their lengths, a member at a time; what is bad joins `troubles`, or is raised.

        What comes after a bad sample moves up: the place of a row depends on nothing but what its shard holds.
        """
        shard, _ = self.shards[piece.shard]
        seen = 0  # rows of the shard so far
        samples = _samples(shard, stream)
        while True:
            try:
                sample = next(samples, None)
                if sample is None:
                    break
                where = f"shard {shard.path}, sample {sample['__key__']}"
                rows, lengths = _decode(sample, where, self.context, self.vocab_size)
            except BadData as error:
                if not self.skip_bad:
                    raise
                troubles.append(str(error))
                continue
            inside = slice(max(0, piece.start - seen), max(0, piece.stop - seen))
            seen += len(rows)
            if len(rows[inside]):
                yield rows[inside], lengths[inside]
            if piece.stop <= seen and piece.stop < shard.rows:
                return  # the rest belongs to another stream
        if seen > shard.rows or (seen < shard.rows and not troubles):
            raise UserError(f"shard {shard.path} holds {seen} rows where the index file says {shard.rows}")


def _first_rows(shards: list[Shard], train_samples: int | None) -> list[tuple[Shard, int]]:
    """Shards with the rows to use of each: all, or the first `train_samples` of the index."""
    left = math.inf if train_samples is None else train_samples
    used = []
    for shard in shards:
        rows = int(min(shard.rows, left))
        left -= rows
        if rows:
            used.append((shard, rows))
    return used


class _Stream:
    """The rows of one stream in order. The next window is read while one is in use."""

    def __init__(self, plan: Iterator[_Window], load: Callable[[_Window], _Rows], pool: ThreadPoolExecutor):
        self._plan, self._load, self._pool = plan, load, pool
        self._next = self._read_ahead()
        self._tokens, self._lengths = np.empty((0, 0)), np.empty(0)

    def _read_ahead(self) -> Future[_Rows] | None:
        window = next(self._plan, None)
        return None if window is None else self._pool.submit(self._load, window)

    @property
    def at_hand(self) -> int:
        """Rows that can be taken without waiting."""
        return len(self._tokens)

    def take(self, count: int) -> _Rows:
        """The next rows; where the data has ended, rows of no tokens."""
        parts: list[_Rows] = []
        while count:
            if not len(self._tokens) and self._next is None:
                parts.append((np.zeros((count, self._tokens.shape[1]), self._tokens.dtype), np.zeros(count, np.int32)))
                break
            if not len(self._tokens) and self._next is not None:
                self._tokens, self._lengths = self._next.result()
                self._next = self._read_ahead()
            parts.append((self._tokens[:count], self._lengths[:count]))
            self._tokens, self._lengths = self._tokens[count:], self._lengths[count:]
            count -= len(parts[-1][0])
        tokens, lengths = zip(*parts, strict=True)
        return (np.concatenate(tokens), np.concatenate(lengths)) if len(parts) > 1 else parts[0]


def prefetch(iterator: Iterator[_Item], depth: int = 2) -> Generator[_Item, None, None]:
    """The same items, up to `depth` of them made ahead in a background thread.

    What the iterator raises is raised here, in its place. When the consumer stops, so do the thread and the iterator.

    >>> list(prefetch(iter("abc")))
    ['a', 'b', 'c']
    """
    end: Any = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead = deque(pool.submit(next, iterator, end) for _ in range(depth))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(next, iterator, end))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
        if isinstance(iterator, Generator):
            iterator.close()
