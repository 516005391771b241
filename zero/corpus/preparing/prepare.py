"""Text to token shards, their index files and a manifest. The same input and arguments give the same bytes.

Worker processes read and tokenize the documents in units that depend only on the source; one process joins their
tokens in order. A shard is written whole, then recorded in the manifest together with the position in the source where
the next one begins: a second call continues from there. docs/decisions/preparing.md has the reasons and the costs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zero.corpus.preparing import directory as directories
from zero.corpus.preparing import manifest as manifests
from zero.corpus.preparing.manifest import ALL_SPLITS, NO_HASH, SPLITS, TOKENIZER
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.sources.changes import digests, repeated
from zero.corpus.preparing.sources.completions import CompletionReader
from zero.corpus.preparing.sources.documents import Reader
from zero.corpus.preparing.sources.preferences import PreferenceReader
from zero.corpus.preparing.sources.source import Source
from zero.corpus.preparing.workers import map_in_order
from zero.corpus.preparing.writer import useful_workers, write_shards
from zero.corpus.text.chat_template import load_chat_template
from zero.corpus.text.tokenizers import FileTokenizer, Tokenizer, train_tokenizer
from zero.errors import UserError
from zero.files import storage

_TRAINING_BYTES = 1 << 30  # of a source, from its beginning, that a tokenizer is trained on


@dataclass(frozen=True)
class SplitSummary:
    """The size of the training or the validation split."""

    documents: int
    tokens: int  # ends of text included
    bytes: int | None  # of the text in UTF-8; None if the source held token ids
    rows: int
    shards: int
    truncations: int | None = None  # cuts of documents that are longer than a row; None: joined without regard to rows


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: `directory` holds its shards and manifest.json."""

    directory: str
    train_index: str
    validation_index: str
    train: SplitSummary
    validation: SplitSummary
    skipped: int  # files that are not UTF-8
    short: int = 0  # documents that --minimum-tokens has left out
    duplicates: int = 0  # documents that --deduplicate has left out
    long: int = 0  # pairs that are longer than a row
    cut: int = 0  # documents of which --cut-documents has kept the first row only
    test_index: str | None = None
    test: SplitSummary | None = None  # of a source that has one


def prepare(
    source: str | Path,
    name: str,
    options: CorpusOptions,
    *,
    directory: str | Path,
    index_directory: str | Path,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Corpus:
    """Write `directory/name/*.tar`, and `name_train.index` and `name_validation.index` into `index_directory`.

    A hash of its text decides whether a document is for validation; if it decides so for none, the document with the
    lowest hash is. Of a single text it is the last part. Documents are joined with the tokenizer's end of text and cut
    into rows without loss: the last row of a split is padded, as its length.npy records. With `pack` the documents of
    each shard are packed into rows, and shards hold about `rows_per_shard`. The tokenizer's chat template is copied.

    With `cut_documents` a document has one row, and what is beyond it is left out. With `begin_rows` each row begins
    with the end of text, so that all of its `row_tokens - 1` other tokens are targets of training.

    After an interruption the next call with these arguments continues after the finished shards; a finished corpus is
    kept, if the source, which is read for that, still has the contents that it was made of. At no time does an index
    list a shard that does not exist. A few shards are held in memory.

    Raises:
        UserError: there is no text, it cannot be read, or a corpus of this name was made with other arguments.
    """
    options.check()
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"name {name}: expected letters, digits, and . - _ between them; --name gives another one")
    if workers is not None and workers < 1:
        raise UserError(f"workers must be at least 1, not {workers}")
    template = None
    if (options.completions or options.preferences) and isinstance(options.tokenizer, FileTokenizer):
        template = load_chat_template(options.tokenizer.path)
    reader: Reader | None = None
    if options.completions:
        reader = CompletionReader(template, options.loss_on)
    elif options.preferences:
        reader = PreferenceReader(template)
    of_text = (options.splits, options.normalise, options.lines)
    opened = Source(str(source), options.key, options.validation_fraction, reader, *of_text)
    if not opened.has_documents:
        for option in options.expects_documents():
            raise UserError(f"{source} is one long text, and {option} expects documents: a folder or JSON lines")
    arguments: dict[str, Any] = {
        "source": str(source),
        "source_files": opened.fingerprint,
        **options.recorded(None if template is None else template.digest),
    }
    place = storage.join(directory, name)
    indices = {split: storage.join(index_directory, f"{name}_{split}.index") for split in ALL_SPLITS}
    if storage.is_remote(indices["train"]) and not storage.is_remote(place):
        raise UserError(f"index_directory {index_directory}: an index in a bucket cannot list shards in {place}")
    hidden = None if progress else True  # None: hidden unless there is a terminal
    with directories.locked(place), tqdm(desc=name, unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
        manifest = _prepare_locked(opened, place, indices, arguments, options.tokenizer, workers, overwrite, bar)
    sizes = {split: _summary(manifest[split]) for split in manifests.splits_of(manifest)}
    return Corpus(
        directory=place,
        train_index=indices["train"],
        validation_index=indices["validation"],
        train=sizes["train"],
        validation=sizes["validation"],
        skipped=manifest.get("skipped", 0),
        short=manifest.get("short", 0),
        duplicates=manifest.get("duplicates", 0),
        long=manifest.get("long", 0),
        cut=manifest.get("cut", 0),
        test_index=indices["test"] if "test" in sizes else None,
        test=sizes.get("test"),
    )


def _summary(split: dict[str, Any]) -> SplitSummary:
    """The size of a split, of its part of the manifest."""
    return SplitSummary(**(split | {"shards": len(split["shards"])}))


def _prepare_locked(
    source: Source,
    place: str,
    indices: dict[str, str],
    arguments: dict[str, Any],
    tokenizer: Tokenizer | int,
    workers: int | None,
    overwrite: bool,
    bar: tqdm,
) -> dict[str, Any]:
    """Continues or begins a corpus, writes the missing shards, and returns its manifest."""
    manifest = manifests.find_usable(place, arguments, source.state, overwrite)
    if manifest is not None and "unfinished" not in manifest:
        is_same = manifests.is_of_source(place, manifest, arguments["source"], source.contents, overwrite)
        if not is_same:
            manifest = None
    if isinstance(tokenizer, int):
        tokenizer = _load_or_train_tokenizer(place, manifest is not None, source, tokenizer, bar)
    arguments |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    arguments |= {manifests.SPECIAL_TOKENS: manifests.described(tokenizer)}
    if manifest is not None:
        manifest = manifests.find_usable(place, arguments, source.state, overwrite)
    threshold = int(arguments["validation_fraction"] * 2**64)
    splits = ALL_SPLITS[: source.splits]
    if manifest is None:
        manifest = manifests.begin(place, indices, arguments, source, threshold, tokenizer, splits)
    storage.remove_unfinished(place)
    for index in indices.values():
        storage.remove_unfinished(storage.parent(index), os.path.basename(index))
    if "unfinished" in manifest and arguments["deduplicate"]:
        _leave_out_duplicates(source, workers, bar)
    while "unfinished" in manifest:
        counts = write_shards(source, place, manifest, tokenizer, workers, bar)
        train, validation = counts[: len(SPLITS)]
        if all(count.documents for count in counts):
            manifests.finish(place, manifest, counts, source.has_ids)
            break
        # With few documents one split may get none: then the document with the lowest hash is for validation.
        threshold = min(train.lowest, validation.lowest) + 1
        if source.is_one_text or threshold in (NO_HASH + 1, manifest["unfinished"]["threshold"]):
            manifests.remove_corpus(place, indices)
            if long := sum(count.long for count in counts):
                raise UserError(
                    f"{arguments['source']}: {long} pairs have a text of more tokens than --row-tokens "
                    f"{arguments['row_tokens']}, and too few are left"
                )
            lack = "no text"
            if train.documents + validation.documents:
                lack = "too little text to set documents aside for validation"
            raise UserError(f"{arguments['source']} holds {lack}")
        manifest = manifests.begin(place, indices, arguments, source, threshold, tokenizer, splits)
    for split, index in indices.items():
        if split in manifest and not storage.exists(index):
            directories.write(index, manifests.index_text(index, place, split, manifest[split]))
    return manifest


def _leave_out_duplicates(source: Source, workers: int | None, bar: tqdm) -> None:
    """Reads the whole source once: what comes again in a later unit is known before anything is tokenized."""
    bar.set_description("duplicates")
    bar.reset(source.size)

    def digests_by_unit() -> Iterator[list[bytes | None]]:
        tasks = ((unit, ()) for unit in source.units())
        for unit, of_unit in map_in_order(tasks, digests, workers or useful_workers(source)):
            yield of_unit
            bar.update(unit.size)

    source.duplicates = repeated(digests_by_unit())


def _load_or_train_tokenizer(
    place: str, is_continued: bool, source: Source, vocab_size: int, bar: tqdm
) -> FileTokenizer:
    """The tokenizer that an earlier call has trained, or one that is trained on the beginning of the source."""
    path = storage.join(place, TOKENIZER)
    if is_continued and storage.exists(path):
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
