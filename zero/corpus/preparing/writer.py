"""Tokens to shards: cuts the tokens of the workers into rows, rows into members, members into tar files.

Shapes: n rows or tokens, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from zero.corpus.format import directory
from zero.corpus.format.manifest import ALL_SPLITS
from zero.corpus.preparing.corpus_files import Counts, PartNames
from zero.corpus.preparing.corpus_statistics import CorpusStatistics, RemovedList, RowSample
from zero.corpus.preparing.documents import too_many_broken
from zero.corpus.preparing.example_kinds import ExampleTexts, kind_of
from zero.corpus.preparing.packing import PACKINGS
from zero.corpus.preparing.sources.source import Source
from zero.corpus.preparing.tokenize_documents import SplitTokens, UnitTokenizer, padded_rows
from zero.corpus.preparing.workers import map_in_order
from zero.corpus.text.tokenizers import ByteTokenizer, Tokenizer
from zero.files import storage

_BYTES_PER_WORKER = 4 << 20  # of text, at least: starting a process takes a second


class Written(NamedTuple):
    """What `write_shards` has written.

    Attributes:
      shards: by their split: name, rows, size and SHA-256 of each.
      counts: the totals of the splits.
    """

    shards: dict[str, list[dict[str, Any]]]
    counts: list[Counts]
    statistics: CorpusStatistics
    removed: RemovedList


def write_shards(
    source: Source,
    folder: str,
    names: PartNames,
    arguments: dict[str, Any],
    threshold: int,
    tokenizer: Tokenizer,
    workers: int | None,
    bar: tqdm,
    skip_broken: int,
) -> Written:
    """Writes the shards of a part.

    Args:
      arguments: of the corpus, as its manifest records them.
      threshold: documents with a hash below it are for validation.
      workers: None: as many as are useful; the result is the same.
      skip_broken: documents that may be left out because they cannot be read.

    Raises:
      UserError: more are broken.
    """
    splits = ALL_SPLITS[: source.splits]
    kind = kind_of(arguments)
    tokenize = UnitTokenizer(
        tokenizer,
        arguments["row_tokens"] - bool(arguments["begin_rows"]),
        arguments["one_document_per_row"],
        bool(arguments["completions"] or kind),
        threshold,
        len(splits),
        arguments["minimum_tokens"] or 0,
        0 if kind is None else kind.texts_read,
        bool(arguments["cut_documents"]),
    )
    # Bytes and ids need less time than it takes to send them to another process.
    is_cheap = source.has_ids or isinstance(tokenizer, ByteTokenizer)
    workers = workers or (1 if is_cheap else useful_workers(source))
    with ThreadPoolExecutor(1) as thread:
        publisher = _ShardPublisher(folder, names, splits, thread)
        sample = RowSample(names.part, tokenizer, ("",) if kind is None else kind.texts)
        writers = [_SplitWriter(split, arguments, tokenizer, publisher, sample) for split in splits]
        statistics = CorpusStatistics()
        removed = RemovedList()
        broken = 0
        for unit, tokens in map_in_order(source.units(), tokenize, workers):
            for writer, split_tokens in zip(writers, tokens.splits, strict=True):
                writer.add(split_tokens)
            statistics.add(tokens.statistics)
            removed.add(tokens.removed)
            broken += len(tokens.broken)
            if broken > skip_broken:
                raise too_many_broken(broken, skip_broken, tokens.broken[0])
            bar.update(unit.size)
        for writer in writers:
            writer.close()
        publisher.wait()
    statistics.rows = sample.examples()
    return Written(publisher.shards, [writer.counts for writer in writers], statistics, removed)


def useful_workers(source: Source) -> int:
    """One process per core, fewer for a small source."""
    return max(1, min(os.cpu_count() or 1, (source.size or 1 << 62) // _BYTES_PER_WORKER))


class _ShardPublisher:
    """Names shards, writes them in a thread, and describes them."""

    def __init__(self, folder: str, names: PartNames, splits: Sequence[str], thread: ThreadPoolExecutor):
        self._place = folder
        self._names = names
        self._thread = thread
        self._pending: deque[Future[None]] = deque()
        self.shards: dict[str, list[dict[str, Any]]] = {split: [] for split in splits}  # whole after `wait`

    def add(self, split: str, data: bytes, counts: dict[str, int]) -> None:
        """`counts` of a shard are recorded beside its name, its rows among them."""
        if len(self._pending) > 1:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._publish, split, data, counts))

    def wait(self) -> None:
        for future in self._pending:
            future.result()

    def _publish(self, split: str, data: bytes, counts: dict[str, int]) -> None:
        split_shards = self.shards[split]
        name = self._names.shard(split, len(split_shards), sum(map(len, self.shards.values())))
        directory.write(storage.join(self._place, name), data)
        split_shards.append({"name": name, **counts, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})


class _SplitWriter:
    """Cuts the tokens of one split into rows, rows into members, members into shards."""

    def __init__(
        self,
        split: str,
        arguments: dict[str, Any],
        tokenizer: Tokenizer,
        publisher: _ShardPublisher,
        sample: RowSample,
    ):
        self.counts = Counts()
        self._split = split
        self._publisher = publisher
        self._sample = sample
        self._filler = tokenizer.end_of_text
        self._begins_rows = bool(arguments["begin_rows"])
        self._row_tokens = arguments["row_tokens"] - self._begins_rows  # of documents
        self._rows_per_member = arguments["rows_per_member"]
        self._size = arguments["rows_per_shard"] * (1 if arguments["one_document_per_row"] else self._row_tokens)
        self._pack = PACKINGS[arguments["pack"]] if arguments["pack"] else None
        self._kind = kind_of(arguments)
        # Rows, lengths, completions, starts, members; less than a shard.
        self._waiting: list[tuple[np.ndarray | None, ...]] = []
        self._held = 0
        self._row = 0
        self._before: ExampleTexts | None = None  # the examples of the shard before, as they were read

    def add(self, part: SplitTokens) -> None:
        """Appends the tokens of a unit; units come in order."""
        at = 0
        while at < len(part.rows):
            stop = at + self._size - self._held
            if self._pack is not None and part.starts is not None:  # a shard that is packed holds whole documents
                stop += int(np.append(part.starts[stop:], 1).argmax())
            arrays = (part.rows, part.lengths, part.completions, part.starts, part.members)
            self._waiting.append(tuple(None if array is None else array[at:stop] for array in arrays))
            count = min(stop, len(part.rows)) - at
            self._held += count
            at += count
            if self._held >= self._size:
                self._publish()
        self.counts = self.counts.plus(part.counts)

    def close(self) -> None:
        """Writes the last, shorter shard."""
        if self._held:
            self._publish()

    def _publish(self) -> None:
        joined = (_concatenated(arrays) for arrays in zip(*self._waiting, strict=True))
        rows, lengths, completions, starts, members = joined
        assert rows is not None
        counts = {}
        if self._pack is not None and starts is not None:
            packed = self._pack(starts, self._row_tokens)
            rows = packed.rows(rows, self._filler)
            lengths = packed.lengths
            completions = None if completions is None else packed.rows(completions, 0)
            counts = {"truncations": packed.truncations}
        elif starts is not None:
            counts = {"truncations": int((starts[:: self._row_tokens] == 0).sum())}
            rows, lengths = padded_rows(rows, self._row_tokens, self._filler)
            completions = None if completions is None else padded_rows(completions, self._row_tokens, 0)[0]
        assert lengths is not None
        if self._kind is not None:
            assert completions is not None
            read = ExampleTexts(rows, lengths, completions)
            rows, lengths, completions = self._kind.all_texts(read, self._before)
            self._before = read
            unmatched = int((~completions[:, self._kind.texts_read :].any(axis=2)).sum())
            self.counts = self.counts._replace(unmatched=self.counts.unmatched + unmatched)
        if self._begins_rows:
            rows = np.insert(rows, 0, self._filler, axis=1)
            lengths = lengths + 1
            completions = None if completions is None else np.insert(completions, 0, 0, axis=1)
        self._waiting = []
        self._held = 0
        self._sample.add(self._split, self._row, rows, lengths)
        arrays = {"input_id": rows, "length": lengths}
        if completions is not None:
            arrays["completion"] = completions
        if self._kind is not None and members is not None:
            arrays |= zip(self._kind.example.members, members.T, strict=True)
        data = _tar(arrays, self._row, self._rows_per_member)
        self._publisher.add(self._split, data, {"rows": len(rows), **counts})
        self._row += len(rows)


def _concatenated(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    return np.concatenate(present)


def _tar(arrays: Mapping[str, np.ndarray], first: int, rows_per_member: int) -> bytes:
    """Arrays of rows (n, ...) as a shard; the key of a member is the number of its first row in the split.

    Lengths are left out if all rows are full.
    """
    rows = arrays["input_id"]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for start in range(0, len(rows), rows_per_member):
            member_rows = slice(start, start + rows_per_member)
            for name, array in arrays.items():
                if name == "length" and (array[member_rows] == rows.shape[-1]).all():
                    continue
                data = io.BytesIO()
                np.save(data, array[member_rows], allow_pickle=False)
                # Time, owner and mode stay at their defaults, so that the bytes are reproducible.
                member = tarfile.TarInfo(f"{first + start:09d}.{name}.npy")
                member.size = data.tell()
                data.seek(0)
                archive.addfile(member, data)
    return buffer.getvalue()
