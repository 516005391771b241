"""Reads the shuffle buffers of one corpus: opens shards, decodes their rows, and skips or reports bad data.

A row that cannot be read (its shard is missing, its sample is damaged) keeps its place in the order and has no tokens.

What the order counts as rows are the sequences that a crop makes of the rows in the shards, or examples.

Shapes: n rows of a shuffle buffer, T tokens of a row: the context, times the texts of an example.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zero.base.errors import UserError
from zero.corpus.format.crop import Crop, Draw
from zero.corpus.format.index_files import Shard, Shards
from zero.corpus.format.memory import Memory, ReadBuffer, reused
from zero.corpus.format.row_blocks import RowValues
from zero.corpus.format.shards import (
    BadData,
    Decoded,
    RowArrays,
    RowFormat,
    decode,
    one_by_one,
    open_shard,
    read_samples,
    with_neighbors,
)
from zero.corpus.reading.cache import ShardCache
from zero.corpus.reading.checksums import ShardChecksums
from zero.corpus.reading.order import Order, RowRange, ShuffleBuffer, permutation
from zero.files import storage

SKIPPED = -1  # the length of a row that could not be read
DISCARDED = 0.01  # share of the tokens that a crop may leave out without a warning
_OFFSETS = 1  # last number of the key of random offsets: keys of permutations have fewer numbers
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorpusReader:
    """The shards of one corpus and how their rows are read."""

    shards: Shards
    order: Order  # of the sequences that are used
    form: RowFormat
    crop: Crop
    skip_bad: bool
    cache: ShardCache | None
    read_buffer: ReadBuffer
    checksums: ShardChecksums
    columns: Mapping[str, RowValues] = field(default_factory=dict)  # (rows, ...), of the shards' rows in order
    _unchecked: threading.Lock = field(default_factory=threading.Lock)  # taken by the first sample with tokens

    @property
    def rows(self) -> int:
        return self.order.total

    @property
    def is_remote(self) -> bool:
        return any(storage.is_remote(paths[0]) for _, paths in self.shards.by_folder)

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return self.form.example.texts * self.form.context

    def read(self, buffer: ShuffleBuffer, used: RowArrays) -> RowArrays:
        """Permuted rows (n, T), tokens in the smallest dtype that holds them, in the memory of rows that were used."""
        count = sum(part.stop - part.start for part in buffer.ranges)
        slots = np.arange(count) if self.order.seed is None else permutation(count, *buffer.key)
        dtype = np.dtype(np.int32) if self.form.only_completions else np.min_scalar_type(self.form.vocab_size - 1)
        extra = {member: np.zeros(count, np.int32) for member in self.form.example.members}
        extra |= {name: np.empty((count, *x.shape[1:]), x.dtype) for name, x in self.columns.items()}
        rows = RowArrays(reused(used.tokens, (count, self.width), dtype), np.empty(count, np.int32), extra)
        for part in buffer.ranges:
            slots_of_part, slots = np.split(slots, [part.stop - part.start])
            for problem in self._fill(part, buffer.key, slots_of_part, rows):
                _log.warning("skipped: %s", problem)
            before = int(self.order.first_rows[part.shard])
            for name, column in self.columns.items():
                rows.extra[name][slots_of_part] = column[before + part.start : before + part.stop]
        return rows.at(slice(buffer.skip, None))

    def _fill(self, part: RowRange, key: tuple[int, ...], slots: np.ndarray, buffer: RowArrays) -> list[str]:
        """Puts the rows of a range into these slots of the buffer; returns the skipped problems."""
        shard = self.shards[part.shard]
        problems: list[str] = []
        filled = 0
        try:
            with open_shard(shard.path, (self.cache or storage).open_reader) as stream:
                data = self.read_buffer.read(stream)
                for rows in self._read(part, key, data, problems):
                    buffer.put(slots[filled : filled + len(rows.tokens)], rows)
                    filled += len(rows.tokens)
                if not problems:  # which say more than that a checksum differs
                    self.checksums.check(shard.path, data)
        except BadData as error:
            if not self.skip_bad:
                raise
            problems.append(str(error))
        buffer.tokens[slots[filled:]] = 0
        buffer.lengths[slots[filled:]] = SKIPPED
        return problems

    def _read(self, part: RowRange, key: tuple[int, ...], data: memoryview, problems: list[str]) -> Iterator[RowArrays]:
        """The rows of a range without columns, sample by sample; a bad sample joins `problems`, or is raised.

        The rows after a bad sample move up: the place of a row depends only on the contents of its shard.
        """
        shard = self.shards[part.shard]
        total = shard.rows * self.crop.sequences
        seen = 0  # sequences of the shard so far
        (seed, epoch, *_) = key

        def draw(count: int) -> np.ndarray:
            """Raw bits for the rows from `seen` on, of a generator per shard: they depend on (seed, epoch, row)."""
            generator = np.random.PCG64((seed, epoch, part.shard, 0, _OFFSETS))
            return generator.advance(seen // self.crop.sequences).random_raw(count)

        samples = with_neighbors(shard.path, read_samples(shard.path, Memory(data)))
        for decoded in self._decoded(shard.path, samples, draw):
            if isinstance(decoded, BadData):
                if not self.skip_bad:
                    raise decoded
                problems.append(str(decoded))
                continue
            self._warn_of_discarded(shard, decoded)
            part_rows = slice(max(0, part.start - seen), max(0, part.stop - seen))
            seen += len(decoded.tokens)
            if len(decoded.tokens[part_rows]):
                extra = {name: x[part_rows] for name, x in decoded.extra.items()}
                yield RowArrays(decoded.tokens[part_rows], decoded.lengths[part_rows], extra)
            if part.stop <= seen and part.stop < total:
                return  # the rest belongs to another stream
        if seen > total or (seen < total and not problems):
            rows = seen // self.crop.sequences
            message = f"shard {shard.path} holds {rows} rows, but the index file records {shard.rows}"
            if seen < total:  # zeros, which a failed disk leaves of the rest, read like the end of a tar
                raise BadData(message)
            raise UserError(message)

    def _decoded(self, path: str, samples: Iterator[dict[str, Any]], draw: Draw) -> Iterator[Decoded | BadData]:
        """The samples of a shard decoded, many rows at once if each has one, or the errors in their places."""
        try:
            for sample in samples:
                if "__keys__" in sample:
                    with suppress(BadData):
                        yield decode(sample, path, self.form, self.crop, draw)
                        continue
                for one in one_by_one(sample):  # so that the bad one of many is named
                    yield self._decoded_sample(path, one, draw)
        except BadData as error:  # after which there is no sample
            yield error

    def _decoded_sample(self, path: str, sample: dict[str, Any], draw: Draw) -> Decoded | BadData:
        try:
            return decode(sample, f"shard {path}, sample {sample['__key__']}", self.form, self.crop, draw)
        except BadData as error:
            return error

    def _warn_of_discarded(self, shard: Shard, decoded: Decoded) -> None:
        """Warns once, at the first sample with tokens, where sequences leave out much of their rows."""
        # At random all tokens are read, in the long run.
        if self.crop.name == "random" or not decoded.total or not self._unchecked.acquire(blocking=False):
            return
        left_out = 1 - int(decoded.lengths.sum()) / decoded.total
        if left_out > DISCARDED:
            corpus = storage.parent(shard.path)
            if not storage.is_remote(corpus):
                corpus = os.path.normpath(corpus)  # an index file names shards as ../corpus/NAME
            _log.warning(
                "data.crop=%s with data.max_context=%d leaves out %.1f%% of the tokens of %s, whose rows are longer; "
                "%s",
                self.crop.name,
                self.form.context,
                100 * left_out,
                corpus,
                "data.crop=all or random uses them" if self.crop.name == "first" else "data.crop=random uses them",
            )
