"""The table of file formats that a source can hold. A new format is a file beside this one, and an entry.

Each is imported when it is used: some of their libraries take a tenth of a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from zero.runtime.preparing.sources.documents import Reader, Unit


class Options(NamedTuple):
    """How the files of a source are read."""

    key: str  # of the ids in a TFRecord
    reader: Reader  # of objects of JSON and rows of tables
    validation_fraction: float | None  # of an array of tokens, its last part; None: the source gives the split


def _json_lines(path: str, options: Options) -> Iterator[Unit]:
    from zero.runtime.preparing.sources.json_lines import json_lines

    return json_lines(path, options.reader)


def _tfrecords(path: str, options: Options) -> Iterator[Unit]:
    from zero.runtime.preparing.sources import documents
    from zero.runtime.preparing.sources.tfrecords import record_units

    return record_units(path, options.key, documents.UNIT_BYTES)


def _tables(path: str, options: Options) -> Iterator[Unit]:
    from zero.runtime.preparing.sources.tables import table_units

    return table_units(path, options.reader)


def _tars(path: str, options: Options) -> Iterator[Unit]:
    from zero.runtime.preparing.sources.tars import tar_units

    return tar_units(path, options.reader)


def _tars_have_ids(path: str) -> bool:
    from zero.runtime.preparing.sources.tars import has_tensors

    return has_tensors(path)


def _arrays(path: str, options: Options) -> Iterator[Unit]:
    from zero.runtime.preparing.sources.arrays import array_units

    return array_units(path, options.validation_fraction)


def _arrays_have_documents(path: str) -> bool:
    from zero.runtime.preparing.sources.arrays import megatron_index

    return megatron_index(path) is not None


class Format(NamedTuple):
    """The files of one format: their names, their units, and whether they hold ids, documents, and objects of JSON."""

    names: re.Pattern[str]
    units: Callable[[str, Options], Iterator[Unit]]
    has_ids: Callable[[str], bool] = lambda path: False
    has_documents: Callable[[str], bool] = lambda path: True
    has_objects: bool = False  # which a reader of completions takes


def _names(pattern: str) -> re.Pattern[str]:
    return re.compile(rf".*{pattern}", re.IGNORECASE | re.DOTALL)


FORMATS = (
    Format(_names(r"(\.(jsonl|ndjson)(\.gz|\.xz|\.zst)?|\.json(\.gz|\.xz|\.zst))"), _json_lines, has_objects=True),
    Format(_names(r"\.(parquet|arrow|feather)"), _tables, has_objects=True),
    Format(_names(r"(\.tar|\.tar\.gz|\.tar\.xz|\.tgz)"), _tars, _tars_have_ids, has_objects=True),
    Format(_names(r"\.tfrecords?(-\d+-of-\d+)?"), _tfrecords, lambda path: True),
    Format(_names(r"\.(npy|bin)"), _arrays, lambda path: True, _arrays_have_documents),
)


def format_of(path: str) -> Format | None:
    """The format of a file by its name; None is text.

    >>> format_of("gs://bucket/c4.jsonl.gz") is FORMATS[0], format_of("a.txt")
    (True, None)
    """
    return next((one for one in FORMATS if one.names.fullmatch(path)), None)
