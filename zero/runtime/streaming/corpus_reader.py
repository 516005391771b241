"""Reads the shuffle buffers of one corpus: opens shards, decodes their rows, and skips or reports bad data.

A row that cannot be read (its shard is missing, its sample is damaged) keeps its place in the order and has no tokens.

Shapes: n rows of a shuffle buffer, T tokens (the context).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from zero.runtime import storage
from zero.runtime.errors import UserError, file_error
from zero.runtime.streaming.cache import ShardCache
from zero.runtime.streaming.index_files import Shard
from zero.runtime.streaming.order import Order, RowRange, ShuffleBuffer, permutation
from zero.runtime.streaming.shards import BadData, Rows, decode, read_samples

SKIPPED = -1  # the length of a row that could not be read
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorpusReader:
    """The shards of one corpus and how their rows are read."""

    shards: list[tuple[Shard, int]]  # each with the number of its rows that are used
    order: Order
    context: int
    vocab_size: int
    skip_bad: bool
    cache: ShardCache | None
    only_completions: bool

    @property
    def rows(self) -> int:
        return sum(self.order.rows)

    @property
    def is_remote(self) -> bool:
        return any(storage.is_remote(shard.path) for shard, _ in self.shards)

    def read_buffer(self, buffer: ShuffleBuffer) -> Rows:
        """Permuted rows (n, T) in the smallest dtype that holds them; the number of tokens in each (n,)."""
        count = sum(part.stop - part.start for part in buffer.ranges)
        slots = np.arange(count) if self.order.seed is None else permutation(count, *buffer.key)
        dtype = np.dtype(np.int32) if self.only_completions else np.min_scalar_type(self.vocab_size - 1)
        tokens = np.empty((count, self.context), dtype)
        lengths = np.empty(count, np.int32)
        for part in buffer.ranges:
            own, slots = np.split(slots, [part.stop - part.start])
            for problem in self._fill(part, own, tokens, lengths):
                _log.warning("skipped: %s", problem)
        return tokens[buffer.skip :], lengths[buffer.skip :]

    def _fill(self, part: RowRange, slots: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> list[str]:
        """Puts the rows of a range into these slots of `tokens` and `lengths`; returns the skipped problems."""
        shard, _ = self.shards[part.shard]
        problems: list[str] = []
        filled = 0
        try:
            with (self.cache or storage).open_reader(shard.path) as stream:
                for rows, row_lengths in self._read(part, stream, problems):
                    into = slots[filled : filled + len(rows)]
                    tokens[into], lengths[into] = rows, row_lengths
                    filled += len(rows)
        except FileNotFoundError:
            if not self.skip_bad:
                raise BadData(f"shard {shard.path} is missing") from None
            problems.append(f"shard {shard.path} is missing")
        except OSError as error:
            raise file_error(f"shard {shard.path} cannot be read: {error}", error) from error
        tokens[slots[filled:]], lengths[slots[filled:]] = 0, SKIPPED
        return problems

    def _read(self, part: RowRange, stream: BinaryIO, problems: list[str]) -> Iterator[Rows]:
        """The rows of a range and their lengths, sample by sample; a bad sample joins `problems`, or is raised.

        The rows after a bad sample move up: the place of a row depends only on the contents of its shard.
        """
        shard, _ = self.shards[part.shard]
        seen = 0  # rows of the shard so far
        samples = read_samples(shard.path, stream)
        while True:
            try:
                sample = next(samples, None)
                if sample is None:
                    break
                name = f"shard {shard.path}, sample {sample['__key__']}"
                rows, lengths = decode(sample, name, self.context, self.vocab_size, self.only_completions)
            except BadData as error:
                if not self.skip_bad:
                    raise
                problems.append(str(error))
                continue
            inside = slice(max(0, part.start - seen), max(0, part.stop - seen))
            seen += len(rows)
            if len(rows[inside]):
                yield rows[inside], lengths[inside]
            if part.stop <= seen and part.stop < shard.rows:
                return  # the rest belongs to another stream
        if seen > shard.rows or (seen < shard.rows and not problems):
            raise UserError(f"shard {shard.path} holds {seen} rows, but the index file records {shard.rows}")
