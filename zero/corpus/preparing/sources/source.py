"""A source of documents by its name: opens files, datasets and token arrays, and cuts them into units."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from operator import methodcaller

from zero.base.errors import UserError
from zero.base.plural import counted
from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import TEST, TRAIN, VALIDATION, Reader, TextReader, Unit
from zero.corpus.preparing.filters.table import NO_FILTERS, Filters
from zero.corpus.preparing.sources.arrays import is_raw, megatron_index
from zero.corpus.preparing.sources.changes import FORMS, as_duplicate, as_near_duplicate, changed, normalized, without
from zero.corpus.preparing.sources.files import SourceFile, digest_of_contents, find_files
from zero.corpus.preparing.sources.formats import LINES, Options, format_of, is_in_folders
from zero.corpus.preparing.sources.hub import HubDataset
from zero.corpus.preparing.sources.joined_rows import JoinedRows
from zero.corpus.preparing.sources.markup import markup_remarks
from zero.corpus.preparing.sources.parts import PART_BYTES, part_bounds, pieces
from zero.corpus.preparing.sources.splits import (
    ALL,
    OFFICIAL,
    described_splits,
    official_splits,
    part_sizes,
    split_of_data,
)
from zero.corpus.preparing.sources.text import text_parts, whole_files
from zero.files import storage


class Source:
    """A file, folder or glob, here or in a bucket; `hf:` and a dataset; or `"stdlib"`, the library of this Python.

    Args:
        name: the suffix of a file decides its format (`formats.py`); without one of these it is one text.
        key: of the text in an object of JSON or a row of a table, of the ids in a TFRecord.
        validation_fraction: how much of a single text, or of an array of tokens, is set aside, its last part.
        splits: None, which leaves files alone whose names say validation or test; "official", by the names of its files
            or of the splits of a dataset; "all", whatever the names; or the sizes of the parts of one text, in bytes.
        normalize: a key of `FORMS`, the Unicode normalization form of all text; None: as it is.
        reader: of objects of JSON and rows of a table, where they are not a text under `key`; then the source holds
            nothing else.
        has_lines: whether each line of a text is a document. Then all files of a folder are read.
        part_bytes: of the files of a part, about.
        filters: leave out documents of text.
        token_bits: of each token of a .bin without a header; None: 16.
        end_of_text: divides documents in rows of token ids that another program has joined; None: is not known.
        document_bytes: a longer document is broken.

    Raises:
        UserError: there is no such source, or nothing in it can be read.
    """

    def __init__(
        self,
        name: str,
        key: str,
        validation_fraction: float,
        reader: Reader | None = None,
        splits: str | None = None,
        normalize: str | None = None,
        has_lines: bool = False,
        part_bytes: int = PART_BYTES,
        filters: Filters = NO_FILTERS,
        end_of_text: int | None = None,
        document_bytes: int = documents.DOCUMENT_BYTES,
        token_bits: int | None = None,
    ):
        self._filters = filters
        self._name = name
        self._has_lines = has_lines
        self._validation_fraction = validation_fraction
        self._form = None if normalize is None else FORMS[normalize]
        is_official = splits == OFFICIAL
        entry_reader = reader or TextReader(key, filters.fields)
        self._end_of_text = end_of_text
        self._sizes = part_sizes(splits) if splits not in (None, OFFICIAL, ALL) else None
        self.remarks: list[str] = []  # for the user, before anything is written
        # The places of documents that `units` marks as duplicates, by the number of their unit.
        self.duplicates: Mapping[int, frozenset[int]] = {}
        self.near_duplicates: Mapping[int, frozenset[int]] = {}
        # Replaces the source's own units when documents were shuffled across parts.
        self.shuffled: Callable[[], Iterator[Unit]] | None = None
        is_hub = name.startswith("hf:") and not name.startswith("hf://")
        opened = HubDataset(name.removeprefix("hf:"), entry_reader, is_official) if is_hub else None
        self._hub = opened
        left_out: list[str] = []
        whole_files = [] if is_hub else find_files(name, partial(is_in_folders, has_lines=has_lines), left_out)
        if left_out and name != "stdlib":
            named = ", ".join([*left_out[:5], *(["..."] if len(left_out) > 5 else [])])
            self.remarks.append(
                f"left out {counted(len(left_out), 'file')} that {'is' if len(left_out) == 1 else 'are'} not text, "
                f"judging by the suffix: {named}; to read one anyway, pass it as the source, or a glob"
            )
        if opened is not None and opened.left_alone:
            self.remarks.append(
                f"{name}: only its split train is read, not {', '.join(opened.left_alone)}; --splits official reads all"
            )
        if splits is None:
            whole_files = self._without_held_out(whole_files)
        self._files = list(pieces(whole_files, part_bytes, self._is_cut))
        if name != "stdlib":
            texts = [file.path for file in whole_files if format_of(file.path, has_lines) in (None, LINES)]
            self.remarks += markup_remarks(texts)
        formats = [format_of(file.path, has_lines) for file in self._files]
        if reader is not None:
            for file, file_format in zip(self._files, formats, strict=True):
                if file_format is None or not file_format.has_objects:
                    raise UserError(
                        f"{file.path}: expected JSON lines, as --completions and options of examples read their objects"
                    )
        holds_ids = [_holds_ids(file) for file in self._files]
        if any(holds_ids) and not all(holds_ids):
            raise UserError(f"{name} holds both token files and text files; expected one or the other")
        self.has_ids = any(holds_ids)
        self.is_one_text = formats == [None]
        self.has_documents = not self.is_one_text and all(map(_holds_documents, self._files))
        if self._sizes and not self.is_one_text:
            raise UserError(f"{name}: --splits with numbers of bytes expects one file of text")
        if normalize and (self.has_ids or reader is not None):
            contents = "tokens" if self.has_ids else "completions, which are marked in the text as it is"
            raise UserError(f"{name}: --normalize expects text; the source holds {contents}")
        if filters.judges and (self.has_ids or reader is not None):
            raise UserError(f"{name}: --{filters.judges[0][0]} expects documents of text, not tokens, prompts or chats")
        self._split_of_file: list[int] = []
        if is_official and not is_hub:
            self._split_of_file = official_splits(name, (file.relative for file in self._files))
        official = opened.splits if opened else self._split_of_file
        # Where a source has a training split and no validation, a fraction of the former is set aside.
        fraction = None if VALIDATION in official else validation_fraction
        self._options = Options(key, entry_reader, fraction, JoinedRows(end_of_text), document_bytes, token_bits)
        self.splits = len(self._sizes) if self._sizes else 1 + max([VALIDATION, *official])
        self._bounds = part_bounds(opened.sizes if opened else [file.size for file in self._files], part_bytes)

    @property
    def size(self) -> int | None:
        """In bytes; None is unknown."""
        if self._hub:
            return None
        return sum(file.size for file in self._files)

    @property
    def parts(self) -> int:
        """How many parts there are; a part of a source has one."""
        return len(self._bounds)

    def part(self, number: int) -> Source:
        """The source of one part: its files, and its units."""
        first, last = self._bounds[number]
        if self._hub is not None and self.parts == 1:
            return self
        part = copy.copy(self)
        part.__dict__.pop("contents", None)  # the digest of all parts, if it is known already
        part._files = self._files[first:last]
        part._split_of_file = self._split_of_file[first:last]
        part._bounds = [(0, last - first)]
        part._hub = None if self._hub is None else self._hub.files(first, last)
        return part

    def __str__(self) -> str:
        """The files of a part, for messages."""
        if self._hub is not None:
            return f"{self._name}: {self._hub.fingerprint}"
        first = self._files[0].relative
        last = self._files[-1].relative
        if first == last:
            return f"{self._name}: {first}"
        return f"{self._name}: {first} to {last}"

    @property
    def fingerprint(self) -> str:
        """A hash of names and sizes, known at once."""
        if self._hub:
            return self._hub.fingerprint
        return _digest([(file.relative, file.size) for file in self._files])

    @cached_property
    def contents(self) -> str:
        """A digest of the contents, for which files of this machine are read once; a copy shares it."""
        if self._hub and self.parts == 1:
            return self._hub.fingerprint
        if self.parts == 1:
            return digest_of_contents(self._files + self._companions())
        return digest_of_parts(self.part(number).contents for number in range(self.parts))

    @property
    def folders_of_ids(self) -> list[str]:
        """The folders whose files hold token ids: perhaps of a corpus of zero's own, with a manifest."""
        if not self.has_ids:
            return []
        return sorted({storage.parent(file.path) for file in self._files})

    @property
    def has_raw_ids(self) -> bool:
        """Whether a file holds ids and does not say how many bits each has."""
        return self.has_ids and any(is_raw(file.path) for file in self._files)

    def _without_held_out(self, files: list[SourceFile]) -> list[SourceFile]:
        """The files, except those of a validation or test split beside others: test sets never leak into training."""
        by_split: dict[int | None, list[SourceFile]] = {}
        for file in files:
            is_data = format_of(file.path) is not None or file.path.lower().endswith(".txt")
            by_split.setdefault(split_of_data(file.relative, is_data), []).append(file)
        held_out = {VALIDATION, TEST} & by_split.keys()
        if not held_out or held_out == by_split.keys():
            return files
        counts = {split: len(split_files) for split, split_files in by_split.items()}
        self.remarks.append(
            f"{self._name} has files of {described_splits(counts, 'files')}: files of validation and test splits are "
            "skipped; --splits official uses them as splits, --splits all reads them like the others"
        )
        return [file for split, split_files in by_split.items() if split not in held_out for file in split_files]

    def _is_cut(self, path: str) -> bool:
        file_format = format_of(path, self._has_lines)
        return file_format is not None and file_format.is_cut(path)

    def _companions(self) -> list[SourceFile]:
        """The index of each Megatron array: it decides where documents begin."""
        if not self.has_ids:
            return []
        companions = []
        for file in self._files:
            index = megatron_index(file.path)
            if index:
                (companion,) = find_files(index, lambda path: True)
                companions.append(companion._replace(relative=f"{file.relative} index"))
        return companions

    def units(self) -> Iterator[Unit]:
        """All units, the same on every call."""
        if self.shuffled is not None:
            return self.shuffled()
        if self._hub:
            units = changed(self._hub.units(), methodcaller("_replace", source=self._name))
            units = changed(units, partial(documents.limited, self._options.document_bytes))
        elif self.is_one_text:
            path = self._files[0].path
            units = text_parts(path, self._validation_fraction, self._sizes)
            units = changed(units, methodcaller("_replace", source=os.path.basename(path)))
        else:
            units = changed(self._file_units(), partial(documents.limited, self._options.document_bytes))
        if self._form:
            units = changed(units, partial(normalized, self._form))
        if self._filters.judges:
            units = changed(units, self._filters)
        return without(without(units, self.duplicates, as_duplicate), self.near_duplicates, as_near_duplicate)

    def _file_units(self) -> Iterator[Unit]:
        if not self._split_of_file:
            yield from self._units_of(self._files)
        for split in sorted(set(self._split_of_file)):
            is_in_split = [file_split == split for file_split in self._split_of_file]
            files = list(itertools.compress(self._files, is_in_split))
            if split == TRAIN and self._options.validation_fraction is not None:
                yield from self._units_of(files)
            else:
                units = self._units_of(files, is_whole=True)
                yield from changed(units, methodcaller("_replace", split=split))

    def _units_of(self, files: list[SourceFile], is_whole: bool = False) -> Iterator[Unit]:
        """The units of files; no part of a token array is set aside if all files belong to one split."""
        group: list[SourceFile] = []
        size = 0
        rows = JoinedRows(self._end_of_text)
        options = self._options._replace(rows=rows)
        if is_whole:
            options = options._replace(validation_fraction=None)
        for file in files:
            file_format = format_of(file.path, self._has_lines)
            if group and (file_format is not None or size >= documents.UNIT_BYTES):
                yield _texts(group, options.document_bytes)
                group = []
                size = 0
            if file_format is not None:
                counted = methodcaller("_replace", source=_group(file))
                yield from changed(file_format.units(file, options), counted)
            else:
                group.append(file)
                size += file.size
        if group:
            yield _texts(group, options.document_bytes)
        rest = tuple(document._replace(source=_group(files[-1])) for document in rows.close())
        if rest:
            yield Unit(0, partial(iter, rest))


def _holds_ids(file: SourceFile) -> bool:
    file_format = format_of(file.path)
    return file_format is not None and file_format.has_ids(file.path)


def _holds_documents(file: SourceFile) -> bool:
    file_format = format_of(file.path)
    return file_format is None or file_format.has_documents(file.path)


def _texts(files: list[SourceFile], most: int) -> Unit:
    """Files that are one document each, of at most `most` bytes."""
    paths = tuple((file.path, _group(file, is_document=True)) for file in files)
    return Unit(sum(file.size for file in files), partial(whole_files, paths, most))


def _group(file: SourceFile, is_document: bool = False) -> str:
    """What a file is counted under: its first folder, or its name; files that are one document each by their suffix.

    >>> [_group(SourceFile(f"gs://b/s/{name}", name, 1, 1), True) for name in ("web/en/a.txt", "b.txt")]
    ['web/', '*.txt']
    >>> _group(SourceFile("gs://b/s/c.jsonl", "c.jsonl bytes 10 to 20", 10, 1))
    'c.jsonl'
    """
    if file.folders:
        return f"{file.folders[0]}/"
    name = os.path.basename(file.path)
    if not is_document:
        return name
    return f"*{os.path.splitext(name)[1]}"


def digest_of_parts(contents: Iterable[str]) -> str:
    """The digest of the contents of a source, from the digests of its parts.

    >>> digest_of_parts(["a", "b"])
    '3b6d0c40639aa293'
    """
    return _digest([("part", digest) for digest in contents])


def _digest(facts: Sequence[tuple[str, int | str]]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
