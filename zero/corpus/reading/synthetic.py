"""Rows that are computed instead of read: to measure a run before there are any data, and to compare programs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from zero.corpus.format.index_files import Shards
from zero.corpus.reading.contents import IndexContents
from zero.corpus.reading.corpus_reader import CorpusReader
from zero.corpus.reading.loader import Batching, Cursor, HostBatch, Loader, check_order


def _random_row(seed: int, row: int, context: int, vocab_size: int) -> np.ndarray:
    # numpy guarantees the raw bits of a generator in all versions.
    return np.random.PCG64((seed, row)).random_raw(context) % vocab_size


def _ones(seed: int, row: int, context: int, vocab_size: int) -> np.ndarray:
    return np.ones(context, np.int32)


# Values of data.corpus, and `(seed, row, context, vocab_size)` to the tokens of a row.
SYNTHETIC: Mapping[str, Callable[[int, int, int, int], np.ndarray]] = MappingProxyType(
    {"synthetic": _random_row, "synthetic:ones": _ones}
)


@dataclass(frozen=True)
class SyntheticLoader:
    """Batches without end, of the interface of `Loader`: row r of the run depends only on `kind`, `seed` and r.

    Attributes:
      kind: a key of `SYNTHETIC`.
      batching: which rows of every batch it gives.
      context: tokens of a row.
      vocab_size: token ids are below it.
      seed: of all rows.

    >>> def rows(batching):
    ...     return next(SyntheticLoader("synthetic", batching, 3, 9).batches()).tokens
    >>> host_rows = [rows(Batching(4, parts=(host,), count=2)) for host in (0, 1)]
    >>> alone = rows(Batching(4))
    >>> bool((np.concatenate(host_rows) == alone).all()), alone.shape
    (True, (4, 3))
    """

    kind: str
    batching: Batching
    context: int
    vocab_size: int
    seed: int = 0

    total_batches: ClassVar[None] = None  # there is no last epoch
    corpora: ClassVar[tuple[CorpusReader, ...]] = ()

    def rows_seen(self, batches: int) -> dict[str, int]:
        """The rows of each corpus of a mixture: there is none."""
        return {}

    def epochs_seen(self, batches: int) -> dict[str, float]:
        """Passes over each corpus of a mixture: there is none."""
        return {}

    @property
    def contents(self) -> list[IndexContents]:
        """What identifies the contents of each index file: there is none."""
        return []

    @property
    def shards(self) -> Shards:
        """The shards of all index files: there are none."""
        return Shards.joined([])

    @property
    def identity(self) -> Cursor:
        """What the rows depend on, as every cursor has it."""
        kind = list(SYNTHETIC).index(self.kind)
        schedule = self.batching.schedule
        stages = [list(stage) for stage in schedule.stages]
        return {"synthetic": kind, "seed": self.seed, "global_rows": schedule.rows, "batch_stages": stages}

    def check(self, cursor: Cursor | None) -> None:
        """Raises UserError for a cursor of other data, and names the difference."""
        if cursor is not None:
            check_order(cursor, self.identity)

    def batches(self, cursor: Cursor | None = None) -> Generator[HostBatch, None, None]:
        """Batches from the beginning, or from just after the one that `cursor` came with.

        Raises UserError for a cursor of other data.
        """
        self.check(cursor)
        done = 0 if cursor is None else cursor["batches"]
        row_of = SYNTHETIC[self.kind]
        schedule = self.batching.schedule
        while True:
            step = done * schedule.steps_per_batch
            numbers = schedule.rows_before(step) + self.batching.numbers(schedule.rows_at(step))
            rows = [row_of(self.seed, row, self.context, self.vocab_size) for row in numbers.tolist()]
            done += 1
            is_skipped = np.zeros(len(rows), bool)
            yield HostBatch(np.stack(rows).astype(np.int32), {**self.identity, "batches": done}, is_skipped)


AnyLoader = Loader | SyntheticLoader
