"""Text to token shards, their index files and a manifest. The same input and arguments give the same bytes.

A source is cut into parts, which depend only on the source (`sources/parts.py`). Each is prepared independently and
has a manifest, which is written last: a second call makes the parts that have none. A source below one part is a
corpus with the names `train-00000.tar` and `manifest.json`, whose units are tokenized by worker processes.
docs/decisions/preparing.md and preparing.md have the reasons and the costs.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zero.base.errors import UserError
from zero.corpus.format import directory as directories
from zero.corpus.format import manifest as manifests
from zero.corpus.format.manifest import ALL_SPLITS, MANIFEST, SPLITS, TOKENIZER
from zero.corpus.preparing import corpus_files, corpus_statistics, duplicates, near_duplicates, shuffle
from zero.corpus.preparing.corpus_files import NO_HASH, REPORT, Counts, PartNames, check_rows_of_source
from zero.corpus.preparing.corpus_page import statistics_files, write_report
from zero.corpus.preparing.documents import Reader, too_many_broken
from zero.corpus.preparing.duplicates import find_duplicates, read_places, remove_passes
from zero.corpus.preparing.engines import BeamEngine, Engine, LocalEngine, local_engine
from zero.corpus.preparing.example_kinds import EXAMPLE_KINDS
from zero.corpus.preparing.filters.table import open_filters
from zero.corpus.preparing.near_duplicates import Nearness, find_near_duplicates
from zero.corpus.preparing.needs import Needs, SourceSize, measure
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.part import PartJob, WriteTexts, has_parts_of, run_tasks, write_parts
from zero.corpus.preparing.shuffle import read_shuffled, write_texts
from zero.corpus.preparing.sources.changes import digests, repeated
from zero.corpus.preparing.sources.completions import CompletionReader
from zero.corpus.preparing.sources.parts import PART_BYTES
from zero.corpus.preparing.sources.source import Source, digest_of_parts
from zero.corpus.preparing.workers import map_in_order
from zero.corpus.preparing.writer import useful_workers, write_shards
from zero.corpus.text.chat_template import load_chat_template
from zero.corpus.text.tokenizers import FileTokenizer, train_tokenizer
from zero.files import storage

_log = logging.getLogger(__name__)
_TRAINING_BYTES = 1 << 30  # of a source, from its beginning, that a tokenizer is trained on


@dataclass(frozen=True)
class SplitSummary:
    """The size of the training or the validation split."""

    documents: int
    tokens: int  # ends of text included
    bytes: int | None  # of the text in UTF-8; None if the source held token ids
    rows: int
    shards: int
    truncations: int  # ends of rows within a document


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: `directory` holds its shards and manifest.json."""

    directory: str
    train_index: str
    validation_index: str  # there is no such file if no document was set aside
    train: SplitSummary
    validation: SplitSummary
    skipped: int  # documents that cannot be read, as --skip-broken allows
    short: int = 0  # documents that --minimum-tokens has left out
    duplicates: int = 0  # documents that --deduplicate has left out
    near: int = 0  # documents that --near-duplicates has left out
    long: int = 0  # examples with a text longer than a row, and documents without a completion that ends within a row
    dropped_calls: int = 0  # messages whose tool calls the chat template leaves out
    unmatched: int = 0  # labeled answers beside which there is no answer of another prompt
    cut: int = 0  # documents of which --cut-documents kept only the first row
    test_index: str | None = None
    test: SplitSummary | None = None  # of a source that has one
    filtered: Mapping[str, int] = field(default_factory=dict)  # documents that filters have left out, by the filter


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
    part_bytes: int = PART_BYTES,
    runner: Sequence[str] | None = None,
    announce: Callable[[str], None] = _log.info,
    on_progress: Callable[[], None] | None = None,
) -> Corpus:
    """Write `directory/name/*.tar`, and `name_train.index` and `name_validation.index` into `index_directory`.

    A hash of its text decides whether a document is for validation; if it decides so for none, the document with the
    lowest hash is. Of a single text it is the last part. Documents are joined with the tokenizer's end of text and cut
    into rows without loss: the last row of a split is padded, as its length.npy records. With `pack` the documents of
    each shard are packed into rows, and shards hold about `rows_per_shard`. The tokenizer's chat template is copied.

    With `cut_documents` a document has one row, and what is beyond it is left out; of completions, the last one that is
    whole in the row ends it, and a document that has none is left out. With `begin_rows` each row begins
    with the end of text, so that all of its `row_tokens - 1` other tokens are targets of training.

    After an interruption the next call with these arguments makes the parts that are missing; a finished corpus is
    kept, if the source, which is read for that, still has the contents that it was made of. At no time does an index
    list a shard that does not exist. A few shards are held in memory, by each process.

    `announce` takes, before anything is written, a line for each option that looks at all documents, with the memory
    and the disk that it needs.

    `on_progress` is called for each unit and part that is done.

    `runner` are options of Apache Beam, ("--runner", "DataflowRunner", ...), on whose workers the parts are prepared.

    Raises:
        UserError: there is no text, it cannot be read, or a corpus of this name was made with other arguments.
    """
    options.check()
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"name {name}: expected letters, digits, and . - _ between them; --name gives another one")
    if workers is not None and workers < 1:
        raise UserError(f"workers must be at least 1, not {workers}")
    template = None
    has_prompts = options.completions or options.examples is not None
    if has_prompts and isinstance(options.tokenizer, FileTokenizer):
        template = load_chat_template(options.tokenizer.path)
        if template is not None:
            template = template.with_variables(json.loads(options.template_variables))
    reader: Reader | None = None
    if options.completions:
        reader = CompletionReader(template, options.loss_on)
    elif options.examples is not None:
        reader = EXAMPLE_KINDS[options.examples].reader(template, options)
    if part_bytes < 1:
        raise UserError(f"part_bytes must be at least 1, not {part_bytes}")
    filters = open_filters(dict(options.filters))
    text_options = (options.splits, options.normalize, options.lines, part_bytes, filters)
    tokenizer = options.tokenizer
    end_of_text = None if isinstance(tokenizer, int) else tokenizer.end_of_text
    bits = options.bits_of_tokens
    file_options = (end_of_text, options.document_bytes, bits)
    opened = Source(str(source), options.key, options.validation_fraction, reader, *text_options, *file_options)
    if not isinstance(tokenizer, int):
        for folder in opened.folders_of_ids:
            check_rows_of_source(folder, tokenizer)
    for remark in opened.remarks:
        announce(remark)
    if not opened.has_documents:
        for option in options.expects_documents():
            raise UserError(f"{source} is one long text, but {option} expects documents: a folder or JSON lines")
    if opened.has_ids and (options.near_duplicates is not None or options.shuffle):
        option = "--shuffle" if options.shuffle else "--near-duplicates"
        raise UserError(f"{source} holds tokens, but {option} expects documents of text")
    arguments: dict[str, Any] = {
        "source": str(source),
        "source_files": opened.fingerprint,
        **options.recorded(None if template is None else template.digest),
    }
    if opened.parts > 1:
        arguments[corpus_files.PART_BYTES_KEY] = part_bytes
    if bits is not None and opened.has_raw_ids:
        arguments[corpus_files.TOKEN_BITS_KEY] = bits
    elif options.token_bits is not None:
        raise UserError(f"{source}: --token-bits expects a .bin without a header; other files say their bits")
    folder = storage.join(directory, name)
    indices = {split: storage.join(index_directory, f"{name}_{split}.index") for split in ALL_SPLITS}
    if storage.is_remote(indices["train"]) and not storage.is_remote(folder):
        raise UserError(f"index_directory {index_directory}: an index in a bucket cannot list shards in {folder}")
    engine = local_engine(workers) if runner is None else BeamEngine(tuple(runner))
    if isinstance(engine, BeamEngine) and opened.parts == 1:
        raise UserError(
            f"{source} is one part, which needs no --runner; a smaller --part-bytes splits a file of lines into more"
        )
    hidden = None if progress else True  # None: hidden unless there is a terminal
    bar = _Bar(on_progress, desc=name, unit="B", unit_scale=True, disable=hidden, leave=False)
    with directories.locked(folder, announce), bar:
        manifest = _prepare_locked(
            opened,
            folder=folder,
            indices=indices,
            arguments=arguments,
            options=options,
            workers=workers,
            engine=engine,
            overwrite=overwrite,
            announce=announce,
            bar=bar,
        )
    sizes = {split: _summary(manifest[split]) for split in manifests.splits_of(manifest)}
    return Corpus(
        directory=folder,
        train_index=indices["train"],
        validation_index=indices["validation"],
        train=sizes["train"],
        validation=sizes["validation"],
        skipped=manifest.get("skipped", 0),
        short=manifest.get("short", 0),
        duplicates=manifest.get("duplicates", 0),
        near=manifest.get("near", 0),
        long=manifest.get("long", 0),
        dropped_calls=manifest.get("dropped_calls", 0),
        unmatched=manifest.get("unmatched", 0),
        cut=manifest.get("cut", 0),
        test_index=indices["test"] if "test" in sizes else None,
        test=sizes.get("test"),
        filtered=manifest.get("filtered", {}),
    )


class _Bar(tqdm):
    """A progress bar that also tells a function, where nobody sees it too."""

    def __init__(self, tell: Callable[[], None] | None, **options: Any) -> None:
        super().__init__(**options)
        self._tell = tell

    def update(self, n: float | None = 1) -> bool | None:
        if self._tell is not None:
            self._tell()
        return super().update(n)


def _summary(split: dict[str, Any]) -> SplitSummary:
    """The size of a split, of its part of the manifest."""
    return SplitSummary(**(split | {"shards": len(split["shards"])}))


def _prepare_locked(
    source: Source,
    *,
    folder: str,
    indices: dict[str, str],
    arguments: dict[str, Any],
    options: CorpusOptions,
    workers: int | None,
    engine: Engine,
    overwrite: bool,
    announce: Callable[[str], None],
    bar: tqdm,
) -> dict[str, Any]:
    """Begins a corpus, writes the missing parts, and returns its manifest."""
    tokenizer = options.tokenizer
    manifest = corpus_files.find_usable(folder, arguments, overwrite)
    if manifest is not None and not corpus_files.is_of_source(folder, manifest, source, overwrite):
        manifest = None
    if isinstance(tokenizer, int):
        tokenizer = _load_or_train_tokenizer(folder, manifest is not None, arguments, source, tokenizer, bar)
    arguments |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    arguments |= {manifests.SPECIAL_TOKENS: manifests.described(tokenizer)}
    if manifest is not None:
        manifest = corpus_files.find_usable(folder, arguments, overwrite)
    if manifest is None:
        job = PartJob(folder, arguments, tokenizer, overwrite, options.skip_broken)
        for line in describe_needs(source, arguments, folder, engine):
            announce(line)
        corpus_files.begin(folder, indices, tokenizer)
        storage.remove_unfinished(folder)
        if source.parts == 1:
            manifest = _write_only_part(source, job, indices, workers, bar)
        else:
            manifest = _write_parts(source, job, engine, bar)
        note = corpus_statistics.unread_note(corpus_statistics.load(folder, statistics_files(manifest)))
        if note is not None:
            announce(note)
    elif manifest.get("skipped", 0) > options.skip_broken:
        raise too_many_broken(manifest["skipped"], options.skip_broken, f"{storage.join(folder, REPORT)} shows them")
    for split, index in indices.items():
        storage.remove_unfinished(storage.parent(index), os.path.basename(index))
        if split in manifest and manifest[split]["rows"] and not storage.exists(index):
            directories.write(index, corpus_files.index_text(index, folder, split, manifest[split]))
    if not storage.exists(storage.join(folder, REPORT)):
        storage.remove_unfinished(folder, REPORT)
        write_report(folder, manifest)
    return manifest


def describe_needs(source: Source, arguments: Mapping[str, Any], folder: str, engine: Engine) -> list[str]:
    """What each option that looks at all documents needs, a line each."""
    nearness = Nearness.from_manifest(arguments)
    chosen: dict[str, Callable[[SourceSize], Needs]] = {}
    if arguments.get("deduplicate"):
        chosen["deduplicate"] = duplicates.needs
    if nearness is not None:
        chosen["near-duplicates"] = partial(near_duplicates.needs, nearness=nearness)
    if arguments["shuffle"]:
        chosen["shuffle"] = shuffle.needs
    if not chosen:
        return []
    size = measure(source, shuffle.bytes_of_lines, is_near=not storage.is_remote(arguments["source"]))
    if size is None:
        return [
            f"--{option} needs memory and disk for each document of {source}, whose size is unknown"
            for option in chosen
        ]
    processes = min(engine.workers, source.parts) if isinstance(engine, LocalEngine) else None
    return [needs(size).described(option, size, folder, processes) for option, needs in chosen.items()]


def _write_only_part(
    source: Source, job: PartJob, indices: dict[str, str], workers: int | None, bar: tqdm
) -> dict[str, Any]:
    """Writes a corpus of one part, and returns its manifest."""
    corpus_files.remove_other_parts(job.folder, ())
    if job.arguments["deduplicate"]:
        _leave_out_duplicates(source, workers, bar)
    nearness = Nearness.from_manifest(job.arguments)
    if nearness is not None:
        remove_passes(job.folder)
        find_near_duplicates(LocalEngine(1), source, job.folder, nearness)
        source.near_duplicates = read_places(job.folder, near_duplicates.NAME, 0, source.parts)
        remove_passes(job.folder)
    if job.arguments["shuffle"]:
        write_texts(job.folder, 0, source, 1)
        source.shuffled = read_shuffled(job.folder, 0, 1).units
        remove_passes(job.folder)
    threshold = job.threshold
    while True:
        bar.set_description(os.path.basename(job.folder))
        bar.reset(source.size)
        written = write_shards(
            source,
            job.folder,
            PartNames(None),
            job.arguments,
            threshold,
            job.tokenizer,
            workers,
            bar,
            job.skip_broken,
        )
        if all(count.documents for count in written.counts) or (threshold == 0 and written.counts[0].documents):
            manifest = corpus_files.finished(job.arguments, source, written.shards, written.counts)
            corpus_statistics.save(job.folder, PartNames(None), written.statistics, written.removed)
            corpus_files.save(storage.join(job.folder, MANIFEST), manifest)
            return manifest
        # With few documents one split may get none: then the document with the lowest hash is for validation.
        corpus_files.begin(job.folder, indices, job.tokenizer)
        train, validation = written.counts[: len(SPLITS)]
        lowest = min(train.lowest, validation.lowest) + 1
        if source.is_one_text or lowest in (NO_HASH + 1, threshold):
            corpus_files.remove_corpus(job.folder, indices)
            raise _too_little(job.arguments, written.counts)
        threshold = lowest


def _write_parts(source: Source, job: PartJob, engine: Engine, bar: tqdm) -> dict[str, Any]:
    """Writes the missing parts of a corpus, and returns its manifest."""
    part_files = [PartNames(number) for number in range(source.parts)]
    names = [files.manifest for files in part_files]
    bar.set_description(os.path.basename(job.folder))
    bar.reset(source.size)
    remove_passes(job.folder)
    if job.arguments["deduplicate"]:
        job = replace(job, duplicate_groups=find_duplicates(engine, source, job.folder))
    nearness = Nearness.from_manifest(job.arguments)
    if nearness is not None:
        find_near_duplicates(engine, source, job.folder, nearness)
        job = replace(job, near_groups=source.parts)
    if job.arguments["shuffle"]:
        for _ in run_tasks(engine, WriteTexts(job, source.parts), source, range(source.parts), job.folder):
            pass
        job = replace(job, shuffled_parts=source.parts)
    write_parts(source, job, engine, bar)
    parts = manifests.load_parts(job.folder, names)
    splits = ALL_SPLITS[: source.splits]
    used = [*names]
    for files in part_files:
        used += [files.statistics, files.removed]
    for part in parts:
        used += [shard["name"] for shard in manifests.shards_of(part)]
    corpus_files.remove_other_parts(job.folder, used)
    remove_passes(job.folder)
    skipped = sum(part["skipped"] for part in parts)
    if skipped > job.skip_broken:
        lists = storage.join(job.folder, PartNames(0).removed)
        raise too_many_broken(skipped, job.skip_broken, f"{lists}, and those of other parts, list them")
    contents = digest_of_parts(part["source_contents"] for part in parts)
    manifest = corpus_files.joined(job.arguments, contents, names, parts)
    needed = splits if job.threshold else ("train",)
    if not all(manifest[split]["documents"] for split in needed):
        raise UserError(
            f"{job.arguments['source']} holds too little text to set documents aside for validation; choose a larger "
            "--validation-fraction"
        )
    corpus_files.save(storage.join(job.folder, MANIFEST), manifest)
    return manifests.load(job.folder)


def _too_little(arguments: dict[str, Any], counts: Sequence[Counts]) -> UserError:
    """The error for a source that leaves a split empty."""
    if long := sum(count.long for count in counts):
        which = "examples have a text" if arguments["examples"] else "documents have a first completion"
        return UserError(
            f"{arguments['source']}: {long} {which} of more tokens than --row-tokens "
            f"{arguments['row_tokens']}, and too few are left"
        )
    lack = "no text"
    if filtered := counts[0].filtered.total():
        lack = f"only {filtered} documents, which the filters leave out"
    if any(count.documents for count in counts[: len(SPLITS)]):
        lack = "too little text to set documents aside for validation"
        if counts[0].documents + counts[1].documents > 1:
            lack = "only equal documents, but validation needs different ones from training"
        lack += "; --validation-fraction 0 sets none aside"
    return UserError(f"{arguments['source']} holds {lack}")


def _leave_out_duplicates(source: Source, workers: int | None, bar: tqdm) -> None:
    """Reads the whole source once: what comes again in a later unit is known before anything is tokenized."""
    bar.set_description("duplicates")
    bar.reset(source.size)

    def digests_by_unit() -> Iterator[list[bytes | None]]:
        for unit, unit_digests in map_in_order(source.units(), digests, workers or useful_workers(source)):
            yield unit_digests
            bar.update(unit.size)

    source.duplicates = repeated(digests_by_unit())


def _load_or_train_tokenizer(
    folder: str, is_finished: bool, arguments: dict[str, Any], source: Source, vocab_size: int, bar: tqdm
) -> FileTokenizer:
    """The tokenizer that an earlier call trained, or a new one trained on the beginning of the source."""
    path = storage.join(folder, TOKENIZER)
    if storage.exists(path) and (is_finished or has_parts_of(folder, arguments, source)):
        return FileTokenizer(path, storage.read_bytes(path))
    if source.has_ids:
        raise UserError("train_tokenizer expects text, and the source holds tokens")

    def texts() -> Iterator[str]:
        read = 0
        for unit in source.units():
            yield from (document.content for document in unit.documents())  # type: ignore[misc]
            bar.update(unit.size)
            read += unit.size
            if read >= _TRAINING_BYTES:
                return

    bar.set_description("tokenizer")
    bar.reset(source.size and min(source.size, _TRAINING_BYTES))
    return FileTokenizer(path, train_tokenizer(texts(), vocab_size))
