"""Text to token shards, their index files and a manifest. The same input and arguments give the same bytes.

Documents are read and tokenized by processes, in units that depend on the source alone, and joined in their order by
one. A shard is written whole, then noted in the manifest together with where in the source it ends: what begins there
is all that a second call has to do. docs/decisions/preparing.md says why, and what it costs.

Shapes: n rows or tokens, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from zero.runtime import storage
from zero.runtime.corpus import manifests
from zero.runtime.corpus.manifests import NO_HASH, SPLITS, TOKENIZER, Counts, Position
from zero.runtime.corpus.sources.documents import Source, Unit
from zero.runtime.corpus.tokenizing import Part, Tokenize, in_order, padded_rows
from zero.runtime.errors import UserError
from zero.runtime.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, train_tokenizer

_TRAINING_BYTES = 1 << 30  # of a source, from its beginning, that a tokenizer is trained on
_WORTH_A_WORKER = 4 << 20  # bytes of text: starting a process takes a second


@dataclass(frozen=True)
class Split:
    """What one half of a corpus holds."""

    documents: int
    tokens: int  # ends of text included
    bytes: int | None  # of the text in UTF-8; None where the source held token ids
    rows: int
    shards: int


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: `directory` holds its shards and manifest.json, which says all this and more."""

    directory: str
    train_index: str
    validation_index: str
    train: Split
    validation: Split
    skipped: int  # files that are not UTF-8


def prepare(
    source: str | Path,
    name: str,
    *,
    directory: str | Path,
    index_directory: str | Path,
    tokenizer: Tokenizer | int,
    row_tokens: int,
    one_document_a_row: bool = False,
    validation_fraction: float = 0.05,
    rows_per_member: int = 256,
    rows_per_shard: int = 8192,
    key: str = "text",
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Corpus:
    """Write `directory/name/*.tar`, and `name_train.index` and `name_validation.index` into `index_directory`.

    A document is in the validation split where the hash of its text says so, or the one with the lowest hash where no
    other is; of a lone text it is the last part. Documents are joined with the tokenizer's end of text and cut into
    rows without loss: the last row of a split is padded, and a length.npy says so.

    Whenever this is killed, no index lists a shard that is missing, and the next call with these arguments goes on
    behind the shards that are finished. What stands whole is kept.

    Args:
        source: as `zero.runtime.corpus.sources.documents.Source` takes it.
        name: of the corpus.
        directory: where corpora lie, a path or a gs:// URL.
        index_directory: where index files lie, a path or a gs:// URL; they name the shards relative to it if they can.
        tokenizer: as `zero.runtime.tokenizers.load_tokenizer` gives it, or the number of tokens of one that is trained
            on the source and saved as `directory/name/tokenizer.json`.
        row_tokens: length of a row, a training sample; the longest context that a model can be trained with.
        one_document_a_row: instead of joining documents, give each its own row, or rows, and pad the last of them.
        validation_fraction: of the documents, above 0 and below 1.
        rows_per_member: rows in one array. Reading pays per array, hardly per row.
        rows_per_shard: a multiple of `rows_per_member`. A few shards are held in memory.
        key: of the text in a JSON object or a row of a dataset, of the token ids in a TFRecord.
        workers: processes that read and tokenize; None is one a core where that pays. Changes no byte.
        overwrite: replace what was made with other arguments.
        progress: draw a bar on a terminal.

    Raises:
        UserError: there is no text, it cannot be read, or a corpus of this name that was made otherwise.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"validation_fraction must lie between 0 and 1, not {validation_fraction}")
    if row_tokens < 2 or rows_per_member < 1 or rows_per_shard < 1 or rows_per_shard % rows_per_member:
        raise UserError(
            f"row_tokens {row_tokens} must be at least 2 and rows_per_shard {rows_per_shard} a multiple of "
            f"rows_per_member {rows_per_member}"
        )
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"name {name}: expected letters, digits, and . - _ between them")
    if workers is not None and workers < 1:
        raise UserError(f"workers must be at least 1, not {workers}")
    opened = Source(str(source), key, validation_fraction)
    if opened.is_one_text and one_document_a_row:
        raise UserError(f"{source} is one document, and one_document_a_row expects several: a folder or JSON lines")
    arguments: dict[str, Any] = {
        "source": str(source),
        "source_files": opened.fingerprint,
        "key": key,
        "train_tokenizer": tokenizer if isinstance(tokenizer, int) else None,
        "row_tokens": row_tokens,
        "one_document_a_row": one_document_a_row,
        "validation_fraction": validation_fraction,
        "rows_per_member": rows_per_member,
        "rows_per_shard": rows_per_shard,
    }
    place = storage.join(directory, name)
    indices = {split: storage.join(index_directory, f"{name}_{split}.index") for split in SPLITS}
    if storage.is_remote(indices["train"]) and not storage.is_remote(place):
        raise UserError(f"index_directory {index_directory}: an index in a bucket cannot list shards in {place}")
    hidden = None if progress else True  # None: hidden where there is no terminal
    with manifests.locked(place), tqdm(desc=name, unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
        manifest = manifests.standing(place, arguments, opened.state, overwrite)
        if isinstance(tokenizer, int):
            tokenizer = _own_tokenizer(place, manifest is not None, opened, tokenizer, bar)
        arguments |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
        manifest = manifest and manifests.standing(place, arguments, opened.state, overwrite)
        threshold = int(validation_fraction * 2**64)
        if manifest is None:
            manifest = manifests.begin(place, indices, arguments, opened.state, threshold, tokenizer)
        manifests.sweep(place, "*")
        for index in indices.values():
            manifests.sweep(storage.parent(index), manifests.last_name(index))
        while "unfinished" in manifest:
            train, validation = _write(opened, place, manifest, tokenizer, workers, bar)
            if train.documents and validation.documents:
                manifests.finish(place, manifest, (train, validation), opened.has_ids)
                break
            # A few documents: the one with the lowest hash is for validation.
            threshold = min(train.lowest, validation.lowest) + 1
            if opened.is_one_text or threshold in (NO_HASH + 1, manifest["unfinished"]["threshold"]):
                manifests.clear(place, indices)
                some = "too little text to set documents aside for validation"
                raise UserError(f"{source} holds {some if train.documents + validation.documents else 'no text'}")
            manifest = manifests.begin(place, indices, arguments, opened.state, threshold, tokenizer)
        for split, index in indices.items():
            if not storage.exists(index):
                manifests.save(index, manifests.index_text(index, place, split, manifest[split]))
    train_split, validation_split = (
        Split(**(manifest[split] | {"shards": len(manifest[split]["shards"])})) for split in SPLITS
    )
    return Corpus(
        place, indices["train"], indices["validation"], train_split, validation_split, skipped=manifest["skipped"]
    )


def verify(place: str, tokenizer: Tokenizer | None = None, progress: bool = True) -> list[str]:
    """What is not as the manifest says, one line each: shards that are missing, damaged or nobody's, the tokenizer.

    Args:
        place: the directory of a corpus, or one of its index files, which is then compared as well.
        tokenizer: the one that the corpus should have been made with; None is any.
        progress: draw a bar on a terminal.

    Raises:
        UserError: no prepared corpus is there.
    """
    found = []
    index = place if place.endswith(".index") else None
    if index:
        text = manifests.read(index).decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        if not lines:
            raise UserError(f"{index} lists no shards")
        place = storage.parent(storage.join(storage.parent(index), lines[0].partition(" ")[0]))
    manifest = manifests.load(place)
    if "unfinished" in manifest:
        raise UserError(f"{place} is not finished; the call of data/prepare.py that began it goes on")
    if index:
        split = index.removesuffix(".index").rpartition("_")[2]
        if split not in SPLITS or manifests.read(index) != manifests.index_text(index, place, split, manifest[split]):
            found.append(f"{index} does not list the shards of {place} as its manifest does")
    standing = manifests.names(place)
    listed = {shard["name"]: shard for split in SPLITS for shard in manifest[split]["shards"]}
    nobodys = sorted(manifests.ours(standing) - set(listed))
    found += [f"{storage.join(place, name)} is not in the manifest" for name in nobodys]
    hidden = None if progress else True
    for name, shard in tqdm(listed.items(), desc="verifying", unit="shard", disable=hidden, leave=False):
        path = storage.join(place, name)
        if name not in standing:
            found.append(f"{path} is missing")
        elif len(data := manifests.read(path)) != shard["size"]:
            found.append(f"{path} has {len(data)} bytes; expected {shard['size']}")
        elif hashlib.sha256(data).hexdigest() != shard["sha256"]:
            found.append(f"{path} does not match its checksum")
    if manifest["tokenizer"] != "bytes":
        path = storage.join(place, TOKENIZER)
        if TOKENIZER not in standing:
            found.append(f"{path} is missing")
        elif hashlib.sha256(manifests.read(path)).hexdigest()[:16] != manifest["tokenizer"].rpartition(":")[2]:
            found.append(f"{path} is not the tokenizer of this corpus, {manifest['tokenizer']}")
    if tokenizer and tokenizer.name.rpartition(":")[2] != manifest["tokenizer"].rpartition(":")[2]:
        found.append(f"{place} was prepared with tokenizer {manifest['tokenizer']}, not {tokenizer.name}")
    return found


def _own_tokenizer(place: str, stands: bool, source: Source, vocab_size: int, bar: tqdm) -> FileTokenizer:
    """A tokenizer that is trained on the beginning of the source, or the one that an earlier call has left."""
    path = storage.join(place, TOKENIZER)
    if stands and storage.exists(path):
        return FileTokenizer(path, storage.read_bytes(path))
    if source.has_ids:
        raise UserError("train_tokenizer expects text, and the source holds tokens")

    def texts() -> Iterator[str]:
        read = 0
        for unit in source.units():
            yield from (document.content for document in unit.documents() if document)  # type: ignore[misc]
            bar.update(unit.size)
            read += unit.size
            if read >= _TRAINING_BYTES:
                return

    bar.set_description("tokenizer")
    bar.reset(source.size and min(source.size, _TRAINING_BYTES))
    return FileTokenizer(path, train_tokenizer(texts(), vocab_size))


def _write(
    source: Source, place: str, manifest: dict[str, Any], tokenizer: Tokenizer, workers: int | None, bar: tqdm
) -> list[Counts]:
    """Write the shards that are missing; what the splits hold in all."""
    tokenize = Tokenize(
        tokenizer, manifest["row_tokens"], manifest["one_document_a_row"], manifest["unfinished"]["threshold"]
    )
    if workers is None:
        # Bytes and ids are ready before they could be handed to another process.
        cheap = source.has_ids or isinstance(tokenizer, ByteTokenizer)
        worth = 1 if cheap else (source.size or 1 << 62) // _WORTH_A_WORKER
        workers = max(1, min(os.cpu_count() or 1, worth))
    bar.set_description(manifests.last_name(place))
    bar.reset(source.size)
    with _Publisher(place, manifest) as publisher:
        writers = [_Writer(split, manifest, tokenizer, publisher) for split in SPLITS]

        def tasks() -> Iterator[tuple[Unit, tuple[bool, ...]]]:
            for number, unit in enumerate(source.units()):
                wanted = tuple(number >= writer.start.unit for writer in writers)
                if any(wanted):
                    yield unit, wanted
                else:
                    bar.update(unit.size)

        number = min(writer.start.unit for writer in writers)
        for unit, parts in in_order(tasks(), tokenize, workers):
            for writer, part in zip(writers, parts, strict=True):
                if part:
                    writer.add(number, part)
            number += 1
            bar.update(unit.size)
        for writer in writers:
            writer.close(number)
    return [writer.counts for writer in writers]


class _Publisher:
    """Writes shards and notes them in the manifest, beside the tokenizing."""

    def __init__(self, place: str, manifest: dict[str, Any]):
        self._place, self._manifest = place, manifest
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()
        self._noted = 0

    def __enter__(self) -> _Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:
            for future in self._pending:
                future.result()

    def add(self, split: str, data: bytes, rows: int, position: Position) -> None:
        if len(self._pending) > 1:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._publish, split, data, rows, position))

    def _publish(self, split: str, data: bytes, rows: int, position: Position) -> None:
        shards = self._manifest[split]["shards"]
        name = f"{split}-{len(shards):05d}.tar"
        manifests.save(storage.join(self._place, name), data)
        shards.append({"name": name, "rows": rows, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        self._manifest["unfinished"][split] = position
        # Each hundredth at the latest: to note every shard of very many takes a time that grows with their square.
        count = sum(len(self._manifest[split]["shards"]) for split in SPLITS)
        if count >= 1.01 * self._noted:
            manifests.note(self._place, self._manifest)
            self._noted = count


class _Writer:
    """Cuts what the units give to a split into rows, rows into members, members into shards."""

    def __init__(self, split: str, manifest: dict[str, Any], tokenizer: Tokenizer, publisher: _Publisher):
        unit, skip, counts = manifest["unfinished"][split]
        self.start = Position(unit, skip, Counts(*counts))
        self.counts = self.start.counts
        self._split, self._publisher, self._filler = split, publisher, tokenizer.end_of_text
        self._row_tokens, self._rows_per_member = manifest["row_tokens"], manifest["rows_per_member"]
        self._size = manifest["rows_per_shard"] * (1 if manifest["one_document_a_row"] else self._row_tokens)
        self._waiting: list[tuple[np.ndarray, np.ndarray | None]] = []  # less than a shard
        self._held = 0
        self._row = sum(shard["rows"] for shard in manifest[split]["shards"])

    def add(self, number: int, part: Part) -> None:
        """The part of a unit, which the next one follows."""
        at = self.start.skip if number == self.start.unit else 0
        while at < len(part.rows):
            stop = at + self._size - self._held
            rows, lengths = part.rows[at:stop], None if part.lengths is None else part.lengths[at:stop]
            self._waiting.append((rows, lengths))
            self._held += len(rows)
            at += len(rows)
            if self._held == self._size:
                self._publish(Position(number, at, self.counts))
        self.counts = self.counts.plus(part.counts)

    def close(self, units: int) -> None:
        """Ends the last shard."""
        if self._held:
            self._publish(Position(units, 0, self.counts))

    def _publish(self, position: Position) -> None:
        rows = np.concatenate([rows for rows, _ in self._waiting])
        if rows.ndim == 1:
            rows, lengths = padded_rows(rows, self._row_tokens, self._filler)
        else:
            lengths = np.concatenate([lengths for _, lengths in self._waiting if lengths is not None])
        self._waiting, self._held = [], 0
        self._publisher.add(self._split, _tar(rows, lengths, self._row, self._rows_per_member), len(rows), position)
        self._row += len(rows)


def _tar(rows: np.ndarray, lengths: np.ndarray, first: int, rows_per_member: int) -> bytes:
    """Rows (n, T) as a shard; keys are the number that a member's first row has in its split."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for start in range(0, len(rows), rows_per_member):
            some = slice(start, start + rows_per_member)
            arrays = {"input_id": rows[some]}
            if (lengths[some] < rows.shape[1]).any():
                arrays["length"] = lengths[some]
            for name, array in arrays.items():
                data = io.BytesIO()
                np.save(data, array, allow_pickle=False)
                # Time, owner and mode stay at their defaults, so that bytes repeat.
                member = tarfile.TarInfo(f"{first + start:09d}.{name}.npy")
                member.size = data.tell()
                data.seek(0)
                archive.addfile(member, data)
    return buffer.getvalue()
