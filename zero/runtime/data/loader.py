"""Token shards to batches: in one order for any number of hosts, and exactly from where a cursor says.

`zero.runtime.data.order` says which row stands where. A row that cannot be read (a missing shard, a corrupt sample)
keeps its place in this order and holds no tokens.

Shapes: B rows of the global batch, T tokens (the context), N rows of an epoch.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from zero.runtime import storage
from zero.runtime.data.cache import Cache
from zero.runtime.data.order import Mixture, Order, Piece, Window, normalised, permutation
from zero.runtime.data.shards import BadData, Rows, Shard, decode, read_index, samples
from zero.runtime.errors import UserError

_SKIPPED = -1  # the length of a row that could not be had
_REMOTE_THREADS = 16  # at most; they wait for the network, not for Python
_CUT = 1 << 21  # tokens that are made int32 at once: 8 MiB; from 4 on numpy asks for huge pages, a quarter faster
_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")


class Batch(NamedTuple):
    """One host's rows of a global batch, and where the data is after it."""

    tokens: np.ndarray  # int32 (B / hosts, T); -1 where there is no token
    cursor: dict[str, int]  # for `Loader.batches`; plain ints, so that JSON holds it
    skipped: int  # rows of these that could not be had


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
                Order(
                    tuple(rows for _, rows in shards), streams, max(1, window // streams) if shuffle else 1,
                    seed if shuffle else None, max_epochs,
                ),
                context, vocab_size, skip_bad, cache,
            )
            for shards in used
        ]  # fmt: skip
        self.rows = sum(corpus.rows for corpus in self.corpora)
        self._names = [Path(str(one)).stem for one in mixture or ()]
        self._mixture = Mixture(normalised(list(mixture.values()) if mixture is not None else [1]), streams)
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


@dataclass(frozen=True)
class _Corpus:
    """Shards that count as one, and how their rows are read."""

    shards: list[tuple[Shard, int]]  # and how many rows of each are used
    order: Order
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

    def load(self, window: Window) -> Rows:
        """Rows (n, T) of a window, permuted, in the smallest type that holds the vocabulary; tokens in each (n,)."""
        count = sum(piece.stop - piece.start for piece in window.pieces)
        slots = np.arange(count) if self.order.seed is None else permutation(count, *window.key)
        tokens = np.empty((count, self.context), np.min_scalar_type(self.vocab_size - 1))
        lengths = np.empty(count, np.int32)
        for piece in window.pieces:
            own, slots = np.split(slots, [piece.stop - piece.start])
            for trouble in self._fill(piece, own, tokens, lengths):
                _log.warning("skipped: %s", trouble)
        return tokens[window.skip :], lengths[window.skip :]

    def _fill(self, piece: Piece, slots: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> list[str]:
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

    def _read(self, piece: Piece, stream: BinaryIO, troubles: list[str]) -> Iterator[Rows]:
        """The rows of a piece and their lengths, a member at a time; what is bad joins `troubles`, or is raised.

        What comes after a bad sample moves up: the place of a row depends on nothing but what its shard holds.
        """
        shard, _ = self.shards[piece.shard]
        seen = 0  # rows of the shard so far
        unread = samples(shard, stream)
        while True:
            try:
                sample = next(unread, None)
                if sample is None:
                    break
                where = f"shard {shard.path}, sample {sample['__key__']}"
                rows, lengths = decode(sample, where, self.context, self.vocab_size)
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

    def __init__(self, plan: Iterator[Window], load: Callable[[Window], Rows], pool: ThreadPoolExecutor):
        self._plan, self._load, self._pool = plan, load, pool
        self._next = self._read_ahead()
        self._tokens, self._lengths = np.empty((0, 0)), np.empty(0)

    def _read_ahead(self) -> Future[Rows] | None:
        window = next(self._plan, None)
        return None if window is None else self._pool.submit(self._load, window)

    @property
    def at_hand(self) -> int:
        """Rows that can be taken without waiting."""
        return len(self._tokens)

    def take(self, count: int) -> Rows:
        """The next rows; where the data has ended, rows of no tokens."""
        parts: list[Rows] = []
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


def prefetch(iterator: Iterator[_Item], depth: int = 2, stop: Sequence[Any] = ()) -> Generator[_Item, None, None]:
    """The same items, up to `depth` of them made ahead in a background thread.

    What the iterator raises is raised here, in its place. When the consumer stops, so do the thread and the iterator.
    Where something comes to lie in `stop`, no item is waited for: it ends, and leaves them to end later.

    >>> list(prefetch(iter("abc")))
    ['a', 'b', 'c']
    """
    end: Any = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead = deque(pool.submit(next, iterator, end) for _ in range(depth))
        while True:
            next_one = ahead.popleft()
            while not wait([next_one], timeout=0.1).done:
                if stop:
                    return
            if (item := next_one.result()) is end:
                return
            ahead.append(pool.submit(next, iterator, end))
            yield item
    finally:
        pool.shutdown(wait=not stop, cancel_futures=True)
        if isinstance(iterator, Generator) and not stop:
            iterator.close()
