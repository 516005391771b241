"""Tokens to shards: cuts the tokens of the workers into rows, rows into members, members into tar files.

Shapes: n rows or tokens, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from tqdm import tqdm

from zero.corpus.preparing import directory
from zero.corpus.preparing import manifest as manifests
from zero.corpus.preparing.manifest import Counts, UnitPosition
from zero.corpus.preparing.packing import PACKINGS
from zero.corpus.preparing.sources.documents import Unit
from zero.corpus.preparing.sources.source import Source
from zero.corpus.preparing.tokenize_documents import SplitTokens, UnitTokenizer, padded_rows
from zero.corpus.preparing.workers import map_in_order
from zero.corpus.text.tokenizers import ByteTokenizer, Tokenizer
from zero.files import storage

_BYTES_PER_WORKER = 4 << 20  # of text, at least: starting a process takes a second


def write_shards(
    source: Source, place: str, manifest: dict[str, Any], tokenizer: Tokenizer, workers: int | None, bar: tqdm
) -> list[Counts]:
    """Writes the missing shards; returns the totals of the splits."""
    tokenize = UnitTokenizer(
        tokenizer,
        manifest["row_tokens"] - bool(manifest.get("begin_rows")),
        manifest["one_document_per_row"],
        bool(manifest.get("completions") or manifest.get("preferences")),
        manifest["unfinished"]["threshold"],
        manifest.get("minimum_tokens") or 0,
        bool(manifest.get("preferences")),
        manifest.get("pack") is not None,
        bool(manifest.get("cut_documents")),
    )
    # Bytes and ids need less time than it takes to send them to another process.
    is_cheap = source.has_ids or isinstance(tokenizer, ByteTokenizer)
    workers = workers or (1 if is_cheap else useful_workers(source))
    bar.set_description(os.path.basename(place))
    bar.reset(source.size)
    with ThreadPoolExecutor(1) as thread:
        publisher = _ShardPublisher(place, manifest, thread)
        splits = manifests.splits_of(manifest)
        writers = [_SplitWriter(split, manifest, tokenizer, publisher) for split in splits]

        def tasks() -> Iterator[tuple[Unit, tuple[bool, ...]]]:
            for number, unit in enumerate(source.units()):
                is_missing = tuple(number >= writer.start.unit for writer in writers)
                if any(is_missing):
                    yield unit, is_missing
                else:
                    bar.update(unit.size)

        number = min(writer.start.unit for writer in writers)
        for unit, parts in map_in_order(tasks(), tokenize, workers):
            for writer, part in zip(writers, parts, strict=True):
                if part:
                    writer.add(number, part)
            number += 1
            bar.update(unit.size)
        for writer in writers:
            writer.close(number)
        publisher.wait()
    return [writer.counts for writer in writers]


def useful_workers(source: Source) -> int:
    """One process per core, fewer for a small source."""
    return max(1, min(os.cpu_count() or 1, (source.size or 1 << 62) // _BYTES_PER_WORKER))


class _ShardPublisher:
    """Writes shards and records them in the manifest, in a thread."""

    def __init__(self, place: str, manifest: dict[str, Any], thread: ThreadPoolExecutor):
        self._place = place
        self._manifest = manifest
        self._thread = thread
        self._pending: deque[Future[None]] = deque()
        self._recorded = 0

    def add(self, split: str, data: bytes, counts: dict[str, int], position: UnitPosition) -> None:
        """`counts` of a shard are recorded beside its name, its rows among them."""
        if len(self._pending) > 1:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._publish, split, data, counts, position))

    def wait(self) -> None:
        for future in self._pending:
            future.result()

    def _publish(self, split: str, data: bytes, counts: dict[str, int], position: UnitPosition) -> None:
        shards = self._manifest[split]["shards"]
        name = f"{split}-{len(shards):05d}.tar"
        directory.write(storage.join(self._place, name), data)
        shards.append({"name": name, **counts, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        self._manifest["unfinished"][split] = position
        # After each hundredth of the shards: the time to save after each shard would grow with their square.
        splits = manifests.splits_of(self._manifest)
        count = sum(len(self._manifest[split]["shards"]) for split in splits)
        if count >= 1.01 * self._recorded:
            manifests.save(self._place, self._manifest)
            self._recorded = count


class _SplitWriter:
    """Cuts the tokens of one split into rows, rows into members, members into shards."""

    def __init__(self, split: str, manifest: dict[str, Any], tokenizer: Tokenizer, publisher: _ShardPublisher):
        unit, skip, counts = manifest["unfinished"][split]
        self.start = UnitPosition(unit, skip, Counts(*counts))
        self.counts = self.start.counts
        self._split = split
        self._publisher = publisher
        self._filler = tokenizer.end_of_text
        self._begins_rows = bool(manifest.get("begin_rows"))
        self._row_tokens = manifest["row_tokens"] - self._begins_rows  # of documents
        self._rows_per_member = manifest["rows_per_member"]
        self._size = manifest["rows_per_shard"] * (1 if manifest["one_document_per_row"] else self._row_tokens)
        self._pack = PACKINGS[manifest["pack"]] if manifest.get("pack") else None
        self._waiting: list[tuple[np.ndarray | None, ...]] = []  # rows, lengths, completions, starts; less than a shard
        self._held = 0
        self._row = sum(shard["rows"] for shard in manifest[split]["shards"])

    def add(self, number: int, part: SplitTokens) -> None:
        """Appends the tokens of unit `number`; units come in order."""
        at = self.start.skip if number == self.start.unit else 0
        while at < len(part.rows):
            stop = at + self._size - self._held
            if part.starts is not None:  # a shard that is packed holds whole documents
                stop += int(np.append(part.starts[stop:], 1).argmax())
            arrays = (part.rows, part.lengths, part.completions, part.starts)
            self._waiting.append(tuple(None if array is None else array[at:stop] for array in arrays))
            count = min(stop, len(part.rows)) - at
            self._held += count
            at += count
            if self._held >= self._size:
                self._publish(UnitPosition(number, at, self.counts))
        self.counts = self.counts.plus(part.counts)

    def close(self, units: int) -> None:
        """Writes the last, shorter shard."""
        if self._held:
            self._publish(UnitPosition(units, 0, self.counts))

    def _publish(self, position: UnitPosition) -> None:
        rows, lengths, completions, starts = (_concatenated(arrays) for arrays in zip(*self._waiting, strict=True))
        assert rows is not None
        counts = {}
        if self._pack is not None:
            assert starts is not None
            packed = self._pack(starts, self._row_tokens)
            rows = packed.rows(rows, self._filler)
            lengths = packed.lengths
            completions = None if completions is None else packed.rows(completions, 0)
            counts = {"truncations": packed.truncations}
        elif rows.ndim == 1:
            rows, lengths = padded_rows(rows, self._row_tokens, self._filler)
            completions = None if completions is None else padded_rows(completions, self._row_tokens, 0)[0]
        assert lengths is not None
        if self._begins_rows:
            rows = np.insert(rows, 0, self._filler, axis=1)
            lengths = lengths + 1
            completions = None if completions is None else np.insert(completions, 0, 0, axis=1)
        self._waiting = []
        self._held = 0
        data = _tar(rows, lengths, completions, self._row, self._rows_per_member)
        self._publisher.add(self._split, data, {"rows": len(rows), **counts}, position)
        self._row += len(rows)


def _concatenated(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    present = [array for array in arrays if array is not None]
    return np.concatenate(present) if present else None


def _tar(
    rows: np.ndarray, lengths: np.ndarray, completions: np.ndarray | None, first: int, rows_per_member: int
) -> bytes:
    """Rows (n, T), or (n, 2, T), as a shard; the key of a member is the number of its first row in the split."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for start in range(0, len(rows), rows_per_member):
            of_member = slice(start, start + rows_per_member)
            arrays = {"input_id": rows[of_member]}
            if (lengths[of_member] < rows.shape[-1]).any():
                arrays["length"] = lengths[of_member]
            if completions is not None:
                arrays["completion"] = completions[of_member]
            for name, array in arrays.items():
                data = io.BytesIO()
                np.save(data, array, allow_pickle=False)
                # Time, owner and mode stay at their defaults, so that the bytes are reproducible.
                member = tarfile.TarInfo(f"{first + start:09d}.{name}.npy")
                member.size = data.tell()
                data.seek(0)
                archive.addfile(member, data)
    return buffer.getvalue()
