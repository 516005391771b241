"""The table of file formats that a source can hold. A new format is a file beside this one, and an entry."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import Reader, Unit
from zero.corpus.preparing.sources.arrays import array_units, megatron_index
from zero.corpus.preparing.sources.csv_rows import csv_units
from zero.corpus.preparing.sources.files import SourceFile
from zero.corpus.preparing.sources.joined_rows import JoinedRows
from zero.corpus.preparing.sources.json_lines import json_lines, text_lines
from zero.corpus.preparing.sources.json_values import json_units
from zero.corpus.preparing.sources.tables import table_units
from zero.corpus.preparing.sources.tars import holds_ids, tar_units
from zero.corpus.preparing.sources.tfrecords import record_units


class Options(NamedTuple):
    """How the files of a source are read."""

    key: str  # of the ids in a TFRecord
    reader: Reader  # of objects of JSON and rows of tables
    validation_fraction: float | None  # of an array of tokens, its last part; None: the source gives the split
    rows: JoinedRows  # of ids that another program has joined
    document_bytes: int  # more are not read into memory
    token_bits: int | None = None  # of each token of an array that does not say it


class Format(NamedTuple):
    """The files of one format: their names, their units, and whether they hold ids, documents, and objects of JSON."""

    names: re.Pattern[str]
    units: Callable[[SourceFile, Options], Iterator[Unit]]
    has_ids: Callable[[str], bool] = lambda path: False
    has_documents: Callable[[str], bool] = lambda path: True
    has_objects: bool = False  # which a reader of completions takes
    is_cut: Callable[[str], bool] = lambda path: False  # whether a piece of such a file can be read alone
    in_folders: Callable[[str], bool] = lambda path: True  # whether a folder names it, which may hold settings in .json


def _names(pattern: str) -> re.Pattern[str]:
    return re.compile(rf".*{pattern}", re.IGNORECASE | re.DOTALL)


FORMATS = (
    Format(
        _names(r"\.(jsonl|ndjson)(\.gz|\.xz|\.zst)?"),
        lambda file, options: json_lines(file, options.reader, options.document_bytes),
        has_objects=True,
        is_cut=lambda path: path.lower().endswith((".jsonl", ".ndjson")),
    ),
    Format(
        _names(r"\.json(\.gz|\.xz|\.zst)?"),
        lambda file, options: json_units(file, options.reader, options.document_bytes),
        has_objects=True,
        in_folders=lambda path: not path.lower().endswith(".json"),
    ),
    Format(
        _names(r"\.(csv|tsv)(\.gz|\.xz|\.zst)?"),
        lambda file, options: csv_units(file.path, options.reader, options.document_bytes),
        has_objects=True,
    ),
    Format(
        _names(r"\.(parquet|arrow|feather)"),
        lambda file, options: table_units(file.path, options.reader),
        has_objects=True,
    ),
    Format(
        _names(r"(\.tar(\.gz|\.xz|\.bz2|\.zst)?|\.tgz)"),
        lambda file, options: tar_units(file.path, options.reader, options.rows, options.document_bytes),
        holds_ids,
        has_objects=True,
    ),
    Format(
        _names(r"\.tfrecords?(-\d+-of-\d+)?"),
        lambda file, options: record_units(file.path, options.key, documents.UNIT_BYTES),
        lambda path: True,
    ),
    Format(
        _names(r"\.(npy|bin)"),
        lambda file, options: array_units(file.path, options.validation_fraction, options.token_bits),
        lambda path: True,
        lambda path: megatron_index(path) is not None,
    ),
)


# Of text, where each line is a document.
LINES = Format(
    _names(""),
    lambda file, options: text_lines(file, options.document_bytes),
    is_cut=lambda path: not path.lower().endswith((".gz", ".xz", ".zst")),
)


def format_of(path: str, has_lines: bool = False) -> Format | None:
    """The format of a file by its name; None is text, `LINES` where each of its lines is a document.

    >>> format_of("gs://bucket/c4.jsonl.gz") is FORMATS[0], format_of("a.txt")
    (True, None)
    >>> format_of("a.txt", has_lines=True) is LINES
    True
    """
    text_form = LINES if has_lines else None
    return next((form for form in FORMATS if form.names.fullmatch(path)), text_form)


def is_in_folders(path: str, has_lines: bool = False) -> bool:
    """Whether a file of a folder is read for its format.

    >>> is_in_folders("c4.jsonl"), is_in_folders("package.json"), is_in_folders("a.txt", has_lines=True)
    (True, False, True)
    """
    file_format = format_of(path, has_lines)
    return file_format is not None and file_format.in_folders(path)
