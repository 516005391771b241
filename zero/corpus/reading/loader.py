"""Batches of token rows: one order for any number of hosts, continued exactly from a saved cursor.

`zero.corpus.reading.order` decides which row comes where, `corpus_reader` reads the rows, this file cuts batches.

Shapes: B rows of the global batch, R of them on a host, T tokens (the context), N rows of an epoch.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import os
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from zero.base.errors import UserError
from zero.base.keys import INT64
from zero.corpus.format.crop import CROPS, Crop
from zero.corpus.format.index_files import Shards, Weight, paths_of, read_index
from zero.corpus.format.memory import ReadBuffer
from zero.corpus.format.one_host import OnOneHost, alone, looked_up
from zero.corpus.format.row_blocks import JoinedRows, RowValues
from zero.corpus.format.shards import BadData, RowArrays, RowFormat, row_tokens
from zero.corpus.reading.batch_schedule import BatchSchedule
from zero.corpus.reading.cache import ShardCache
from zero.corpus.reading.checksums import ShardChecksums
from zero.corpus.reading.contents import REMEDY, IndexContents, check_contents, contents_on_one_host
from zero.corpus.reading.corpus_reader import SKIPPED, CorpusReader
from zero.corpus.reading.order import Mixture, Order, StagedMixture, exact_weights, weight_stages
from zero.corpus.reading.prefetch import RowStream

_REMOTE_THREADS = 16  # at most; they wait for the network, not for Python
_BLOCK = 1 << 18  # tokens that are cut into batches at once: 1 MiB, which stays in a core's cache
_OTHER_SHARDS = "the saved data cursor belongs to other shards"
_COUNTED = "rows_of_corpora_are_exact"  # in cursors
_log = logging.getLogger(__name__)


Cursor = dict[str, Any]  # a position in data and what identifies them, as JSON can hold it


class UsedShards(NamedTuple):
    """Shards of which rows are used, and the number of rows that are used of each, int64 (shards,)."""

    shards: Shards
    rows: np.ndarray


class HostBatch(NamedTuple):
    """One host's rows of a global batch, and the position of the data after it."""

    tokens: np.ndarray  # int32 (R, T); -1 for no token, ~t for a token t that is not predicted
    # Of examples with several texts (R, texts * T), in order.
    cursor: Cursor  # for `Loader.batches`
    is_skipped: np.ndarray  # bool (R,): which of these rows could not be read
    extra: Mapping[str, np.ndarray] = MappingProxyType({})  # (R, ...), entries of `Batch.extra`


@dataclass(frozen=True)
class Batching:
    """Which rows of each global batch a loader gives.

    Attributes:
      global_rows: rows of a batch over all hosts, or a schedule of them.
      parts: those that a loader gives, in ascending order, of the `count` equal parts that a batch is cut into.
    """

    global_rows: int | BatchSchedule
    parts: tuple[int, ...] = (0,)
    count: int = 1

    @property
    def schedule(self) -> BatchSchedule:
        """The rows of each batch over all hosts."""
        if not isinstance(self.global_rows, int):
            return self.global_rows
        return BatchSchedule(self.global_rows)

    def numbers(self, global_rows: int) -> np.ndarray:
        """The index in the global batch of each row that a loader returns.

        >>> Batching(8, parts=(1, 3), count=4).numbers(8).tolist()
        [2, 3, 6, 7]
        """
        size = global_rows // self.count
        return (np.asarray(self.parts)[:, None] * size + np.arange(size)).ravel()


@dataclass(frozen=True)
class RowOrder:
    """Which rows are read, and in which order.

    Attributes:
      seed: of the order.
      shuffle: False reads the rows in the order of the shards.
      shuffle_shards: shards of a corpus whose rows are mixed at any time, in the shuffle buffers of all streams
        together. Twice as many are in memory while the next ones are read.
      max_epochs: where to stop; None never does. Rows at the very end that do not fill a batch are dropped if the
        order is shuffled; otherwise rows of -1 fill the last batch up. A mixture stops before any of its corpora would
        be read more often.
      train_samples: rows of an epoch, the first ones of the index; None is all.
    """

    seed: int = 0
    shuffle: bool = True
    shuffle_shards: int = 16
    max_epochs: int | None = None
    train_samples: int | None = None


ONCE = RowOrder(shuffle=False, max_epochs=1)  # each row once, in the order of the shards


class Loader:
    """Batches of token rows from the shards of one or several index files.

    The sequence of global batches depends only on the index files, `global_rows`, the order and the crop.

    Args:
        index: the .index file, local or in a bucket; several that count as one; or a mixture, index files with weights,
            which may change over training: [[step, weight], ...] with the steps, from 0 on, at which a weight begins.
        skip_bad: continue without data that is missing or damaged: its rows are -1, logged, and counted in each
            batch. The index files must record the number of rows of each shard.
        cache: keeps shards of a bucket on this machine.
        columns: of each index file, by its name, arrays `(rows, ...)` that become entries of `Batch.extra`.
        on_one_host: looks things up in buckets for all hosts, which then make their loaders in the same order.

    Raises:
        UserError: the data is wrong (file and sample are named), or a batch does not divide into its parts.
    """

    def __init__(
        self,
        index: str | Path | Sequence[str | Path] | Mapping[str, Weight],
        batching: Batching,
        form: RowFormat,
        order: RowOrder = RowOrder(),
        *,
        skip_bad: bool = False,
        cache: ShardCache | None = None,
        columns: Mapping[str, Mapping[str, RowValues]] | None = None,
        on_one_host: OnOneHost = alone,
    ):
        schedule = batching.schedule
        for global_rows in schedule.sizes:
            if global_rows % batching.count:
                raise UserError(f"a global batch of {global_rows} rows cannot be split into {batching.count} parts")
        mixture: Mapping[str, Weight] = index if isinstance(index, Mapping) else {}
        if mixture and not (order.shuffle and order.train_samples is None):
            raise UserError("a mixture of index files is shuffled and cannot be combined with train_samples")
        # In a mixture each index file is its own corpus; otherwise all files form one.
        groups = [paths_of(name) for name in mixture] if mixture else [paths_of(index)]
        self._by_index: list[tuple[str, UsedShards]] = []
        sequences: list[UsedShards] = []  # of each corpus: its shards, and how many of their sequences are used
        crops = []
        for group in groups:
            shards_by_index = _used_shards(group, order.train_samples, skip_bad, on_one_host)
            self._by_index += shards_by_index
            shards = Shards.joined(used.shards for _, used in shards_by_index)
            rows = np.concatenate([used.rows for _, used in shards_by_index])
            crop = _crop(form.crop, shards.paths, form.context, skip_bad, on_one_host)
            sequences.append(UsedShards(shards, rows * crop.sequences))
            crops.append(crop)
        # One stream per shard to mix, so that hosts share as few shards as possible.
        most_streams = 1
        if order.shuffle:
            most_streams = min(order.shuffle_shards, max(len(used.shards) for used in sequences))
        streams = max(count for count in range(1, most_streams + 1) if schedule.divisor % count == 0)
        buffer_shards = max(1, order.shuffle_shards // streams) if order.shuffle else 1
        order_seed = order.seed if order.shuffle else None
        self.corpora = []
        memory = ReadBuffer()
        checksums = ShardChecksums(is_warning=skip_bad)
        for group, (shards, rows), crop in zip(groups, sequences, crops, strict=True):
            corpus_order = Order(tuple(rows.tolist()), streams, buffer_shards, order_seed, order.max_epochs)
            joined = _joined([] if columns is None else [columns[name] for name in group])
            self.corpora.append(
                CorpusReader(shards, corpus_order, form, crop, skip_bad, cache, memory, checksums, joined)
            )
        self.rows = sum(corpus.rows for corpus in self.corpora)
        self._names = [Path(name).stem for name in mixture]
        self._batching = batching
        self._schedule = schedule
        self._width = self.corpora[0].width
        self._streams = streams
        stages = []
        for step, weights in weight_stages(list(mixture.values()) if mixture else [1]):
            stages.append((self._rows_of_stream(step), Mixture(exact_weights(weights), streams)))
        self._mixture = StagedMixture(tuple(stages))
        self.total_batches = None
        self._dropped = 0
        if order.max_epochs is not None:
            self.total_batches = self._batches_of(order.max_epochs, fill_up=not order.shuffle)
            if order.shuffle and not mixture:
                self._dropped = order.max_epochs * self.rows - self._rows_before(self.total_batches)
        if self.total_batches == 0:
            first = schedule.rows_at(0)
            raise UserError(f"{order.max_epochs} epochs of {self.rows} rows do not fill one batch of {first}")
        self._skip_bad = skip_bad
        self._on_one_host = on_one_host
        self._order = {
            "global_rows": schedule.rows,
            "batch_stages": [list(stage) for stage in schedule.stages],
            "seed": order.seed,
            "shuffle": int(order.shuffle),
            "shuffle_shards": order.shuffle_shards,
            "crop": list(CROPS).index(form.crop),
        }
        self._shards = _fingerprint(sequences, self._mixture if mixture else None)
        shares = [[first, *map(str, stage.weights)] for first, stage in self._mixture.stages]
        self._composition = {"weights": shares, "sequences_per_row": [crop.sequences for crop in crops]}
        rows_of_stream = max(schedule.sizes) // streams
        # Such a mixture marks its cursors, because those of earlier versions come with wrong batches.
        self._overflowed = any(stage.overflowed_at(rows_of_stream) for _, stage in self._mixture.stages)

    @cached_property
    def contents(self) -> list[IndexContents]:
        """What identifies the contents of each index file; all hosts ask for it first in the same order."""
        return [
            IndexContents(name, *contents_on_one_host(name, shards, self._on_one_host, rows))
            for name, (shards, rows) in self._by_index
        ]

    @property
    def shards(self) -> Shards:
        """The shards of all index files."""
        return Shards.joined(corpus.shards for corpus in self.corpora)

    @property
    def is_remote(self) -> bool:
        """Whether a shard is in a bucket."""
        return any(corpus.is_remote for corpus in self.corpora)

    @cached_property
    def identity(self) -> Cursor:
        """What the rows and their order depend on, as every cursor has it."""
        identity = {
            "shards": self._shards,
            **self._order,
            "contents": [list(contents) for contents in self.contents],
            "composition": self._composition,
        }
        if self._overflowed:
            identity[_COUNTED] = True
        return identity

    def _rows_before(self, batch: int) -> int:
        """The rows of all batches before this one."""
        return self._schedule.rows_before(batch * self._schedule.steps_per_batch)

    def _rows_of_stream(self, step: int) -> int:
        """The rows of each stream before the batch of a step."""
        return self._schedule.rows_before(step) // self._streams

    def _batches_of(self, epochs: int, fill_up: bool) -> int:
        """Batches until a stream has given `epochs` times its part of a corpus, or, filled up, all of the corpus."""
        if fill_up:
            return self._schedule.step_of(epochs * self.rows - 1) // self._schedule.steps_per_batch + 1

        def fits(batches: int) -> bool:
            for stream in range(self._streams):
                counts = self._mixture.counts(stream, self._rows_before(batches) // self._streams)[:, 0]
                for corpus, count in zip(self.corpora, counts.tolist(), strict=True):
                    if count > (epochs * corpus.rows + stream) // self._streams:
                        return False
            return True

        most = self._schedule.step_of(epochs * self.rows) // self._schedule.steps_per_batch
        return bisect.bisect_left(range(1, most + 1), True, key=lambda batches: not fits(batches))

    def rows_seen(self, batches: int) -> dict[str, int]:
        """Rows of each corpus of a mixture in that many batches, by the name of its index file."""
        rows = self._rows_before(batches) // self._streams
        counts = sum(self._mixture.counts(stream, rows)[:, 0] for stream in range(self._streams))
        return dict(zip(self._names, np.asarray(counts).tolist(), strict=bool(self._names)))

    def epochs_seen(self, batches: int) -> dict[str, float]:
        """Passes over each corpus of a mixture in that many batches, by the name of its index file."""
        rows = self.rows_seen(batches)
        return {name: seen / corpus.rows for (name, seen), corpus in zip(rows.items(), self.corpora, strict=False)}

    def check(self, cursor: Cursor | None) -> None:
        """Raises UserError for a cursor of other data or another order, and names the difference."""
        if cursor is None:
            return
        check_order(cursor, self._order)
        before = [IndexContents(*contents) for contents in cursor["contents"]]
        is_compared = check_contents(before, self.contents, _OTHER_SHARDS, is_warning=self._skip_bad)
        if cursor["composition"] != self._composition:
            changes = f"{cursor['composition']}, not {self._composition}"
            raise UserError(f"the saved data cursor belongs to other weights or crops of its index files: {changes}")
        if not is_compared and cursor["shards"] != self._shards:
            raise UserError(f"{_OTHER_SHARDS} than the index file lists now (compared by names and rows); {REMEDY}")
        if self._overflowed and _COUNTED not in cursor:
            _log.warning(
                "the weights of the mixture of %s have so many decimals that the version which saved this position "
                "exceeded 64-bit integers: among the %d batches before it, some may have more rows than asked for, and "
                "a corpus another share than its weight. From here on all batches are right; they continue where a "
                "right run would be, so that some rows of this epoch come again and others are left out. Only a new "
                "run is right from its beginning",
                ", ".join(self._names),
                cursor["batches"],
            )

    def batches(self, cursor: Cursor | None = None) -> Generator[HostBatch, None, None]:
        """Batches from the beginning, or from just after the one that `cursor` came with.

        Raises UserError for a cursor of other data or another order, and names the difference.
        """
        self.check(cursor)
        done = 0 if cursor is None else cursor["batches"]
        own_streams = sorted({*self._places(done)[0].tolist()})  # the same in every batch
        # More threads than cores only compete for Python's lock, unless they wait for a network.
        most = _REMOTE_THREADS if self.is_remote else os.cpu_count() or 1
        threads = min(len(own_streams) * len(self.corpora), most)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="shards")
        try:
            first = self._rows_before(done) // self._streams
            streams = [self._open_stream(number, first, pool) for number in own_streams]
            while self.total_batches is None or done < self.total_batches:
                first = self._rows_before(done) // self._streams
                numbers, places, part = self._places(done)
                count = 1
                if len(self.corpora) == 1:  # small batches are cut several at once, as many as are read already
                    left = min(stream.left for (stream,) in streams) // part
                    count = self._alike(done, min(left, _BLOCK // (len(numbers) * self._width)))
                # The places of these rows among the rows of the streams that hold them.
                places = np.searchsorted(own_streams, numbers) * part + places
                is_whole = np.array_equal(places, np.arange(len(own_streams) * part))
                taken = [
                    self._take(number, first, count * part, stream)
                    for number, stream in zip(own_streams, streams, strict=True)
                ]
                block = _by_batch(taken, count)
                if block.lengths.shape[1] != len(own_streams) * part:
                    raise RuntimeError(
                        f"batch {done} has {block.lengths.shape[1]} rows, expected {len(own_streams) * part}: the "
                        f"order of the corpora {self._composition['weights']} is wrong; please report these weights"
                    )
                if block.lengths.min() < self._width:
                    block.tokens[np.arange(self._width) >= block.lengths[..., None]] = -1
                for batch in map(block.at, range(count)):
                    batch = batch if is_whole else batch.at(places)
                    done += 1
                    cursor = {**self.identity, "batches": done}
                    yield HostBatch(batch.tokens, cursor, batch.lengths == SKIPPED, batch.extra)
        finally:
            pool.shutdown(cancel_futures=True)
        if self._dropped:
            _log.info("end of the data: the last %d rows do not fill a batch and are not used", self._dropped)

    def _places(self, batch: int) -> tuple[np.ndarray, np.ndarray, int]:
        """For each row of a batch that is given: its stream, and its place in it; and the rows of each stream."""
        global_rows = self._schedule.rows_at(batch * self._schedule.steps_per_batch)
        part = global_rows // self._streams
        streams, places = np.divmod(self._batching.numbers(global_rows), part)
        return streams, places, part

    def _alike(self, batch: int, most: int) -> int:
        """The number of batches from this one on, at least one and at most `most`, that have as many rows and exist."""
        if self.total_batches is not None:
            most = min(most, self.total_batches - batch)
        steps = self._schedule.steps_per_batch
        rows = self._schedule.rows_at(batch * steps)
        others = (number for number in range(1, most) if self._schedule.rows_at((batch + number) * steps) != rows)
        return next(others, max(1, most))

    def _open_stream(self, number: int, row: int, pool: ThreadPoolExecutor) -> list[RowStream]:
        """One stream from its `row` on: a `RowStream` for each corpus."""
        counts = self._mixture.counts(number, row)[:, 0].tolist()
        return [
            RowStream(corpus.order.buffers(number, count), corpus.read, pool)
            for corpus, count in zip(self.corpora, counts, strict=True)
        ]

    def _take(self, number: int, row: int, count: int, group: list[RowStream]) -> RowArrays:
        """So many rows of a stream from its `row` on."""
        if len(group) == 1:
            return group[0].take(count)
        is_of_corpus = np.diff(self._mixture.counts(number, row, count)).astype(bool)
        corpora = [(stream, places) for stream, places in zip(group, is_of_corpus, strict=True) if places.any()]
        rows = RowArrays.concatenated([stream.take(int(places.sum())) for stream, places in corpora])
        order = np.concatenate([np.flatnonzero(places) for _, places in corpora])
        return rows.at(np.argsort(order))


def _by_batch(streams: Sequence[RowArrays], batches: int) -> RowArrays:
    """The next rows of each stream, as rows of several batches: arrays `(batches, rows of a batch, ...)`.

    Tokens become int32.
    """

    def joined(arrays: Sequence[np.ndarray], dtype: np.dtype | type) -> np.ndarray:
        per_batch = [x.reshape(batches, -1, *x.shape[1:]) for x in arrays]
        return np.concatenate(per_batch, axis=1, dtype=dtype, casting="unsafe")

    first = streams[0]
    tokens = joined([rows.tokens for rows in streams], np.int32)
    lengths = joined([rows.lengths for rows in streams], np.int32)
    extra = {name: joined([rows.extra[name] for rows in streams], x.dtype) for name, x in first.extra.items()}
    return RowArrays(tokens, lengths, extra)


def check_order(cursor: Cursor, order: Cursor) -> None:
    """Raises UserError naming the key if the cursor was saved for a different order."""
    for key, value in order.items():
        before = cursor.get(key)
        if before != value:
            raise UserError(f"the saved data cursor belongs to {key}={before}, not to {key}={value}")


def _joined(columns: Sequence[Mapping[str, RowValues]]) -> dict[str, RowValues]:
    """The columns of a corpus, from the columns of its index files."""
    names = columns[0] if columns else {}
    return {name: JoinedRows([columns_by_name[name] for columns_by_name in columns]) for name in names}


def _used_shards(
    indices: list[str], train_samples: int | None, skip_bad: bool, on_one_host: OnOneHost
) -> list[tuple[str, UsedShards]]:
    """Each index file of a corpus with its shards and the rows to use of each: all, or the first `train_samples`."""
    left = INT64
    if train_samples is not None:
        left = min(train_samples, INT64)
    by_index: list[tuple[str, UsedShards]] = []
    for index in indices:
        shards = read_index(index, skip_bad, on_one_host)
        before = np.cumsum(shards.rows) - shards.rows
        rows = np.clip(left - before, 0, shards.rows)
        left -= int(rows.sum())
        by_index.append((index, UsedShards(shards.only(rows > 0), rows[rows > 0])))
    if not any(used.shards for _, used in by_index):
        raise UserError(f"index file {', '.join(indices)}: the shards hold no rows")
    return by_index


def _crop(name: str, paths: Sequence[str], context: int, skip_bad: bool, on_one_host: OnOneHost) -> Crop:
    """The cut of a corpus; what depends on the length of its rows is known from the first one that can be read."""
    if name != "all":
        return Crop(name)
    tokens = looked_up(on_one_host, f"data.crop={name}", paths, lambda: _row_tokens(name, paths, skip_bad))
    return Crop.of_rows(name, tokens, context)


def _row_tokens(crop: str, paths: Sequence[str], skip_bad: bool) -> int:
    """The tokens of the first row that can be read."""
    for path in paths:
        try:
            return row_tokens(path)
        except BadData:
            if not skip_bad:
                raise
    raise UserError(f"data.crop={crop}: none of {len(paths)} shards holds a row that can be read")


def _fingerprint(used: list[UsedShards], mixture: StagedMixture | None) -> int:
    """48 bits that change with the shards, their rows, or the weights of a mixture."""
    lines = [
        f"{name} {of_shard} {rows}"
        for shards, used_rows in used
        for name, of_shard, rows in zip(shards.names, shards.rows.tolist(), used_rows.tolist(), strict=True)
    ]
    if mixture is not None:
        for first, stage in mixture.stages:
            at = f" from {first}" if first else ""
            lines += [f"{len(shards)} {weight}{at}" for (shards, _), weight in zip(used, stage.weights, strict=True)]
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:6])
