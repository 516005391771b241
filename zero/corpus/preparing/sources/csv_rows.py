"""Units of CSV and TSV, plain or compressed: each row below the names of the columns is an object with one document."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import Document, Reader, Unit, broken, read_entry, too_long
from zero.corpus.preparing.sources.compression import CUT, checked_blocks, cut_lines, decompressed_blocks, is_cut
from zero.corpus.preparing.sources.files import open_file
from zero.files.parsing import reading

_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8
_LONG = [CUT.decode("utf-8", "surrogateescape")]  # in place of the fields of a row with one that is too long
Row = tuple[int, list[str]]  # the number of its last line, and its fields


def csv_units(path: str, reader: Reader, most: int) -> Iterator[Unit]:
    """The rows of a file in units of about `UNIT_BYTES` of their contents; a field in quotes may span lines.

    A line of more than `most` bytes, and a field of more characters, such as one whose quote is never closed, are
    broken; after it the next line begins a row.
    """
    csv.field_size_limit(most)
    delimiter = "\t" if ".tsv" in path.lower() else ","
    group: list[Row] = []
    size = 0
    told = 0
    with open_file(path) as file, reading(f"{path}: expected CSV", csv.Error):
        rows = csv.reader(_lines(file, path, most), delimiter=delimiter, strict=True)
        columns = next(rows, [])
        while (fields := _next_row(rows)) is not None:
            group.append((rows.line_num, fields))
            size += sum(map(len, fields))
            if size >= documents.UNIT_BYTES:
                yield Unit(file.tell() - told, partial(_documents, path, columns, group, reader, most))
                told = file.tell()
                group = []
                size = 0
        if group:
            yield Unit(file.tell() - told, partial(_documents, path, columns, group, reader, most))


def _next_row(rows: Iterator[list[str]]) -> list[str] | None:
    """The fields of the next row, `_LONG` for one whose field is too long; None at the end of the file."""
    try:
        return next(rows, None)
    except csv.Error as error:
        if not str(error).startswith("field larger than field limit"):
            raise
        return _LONG


def _lines(file: BinaryIO, path: str, most: int) -> Iterator[str]:
    """The lines of a file with their ends, without the mark of UTF-8 at its beginning."""
    number = 0
    pending = bytearray()
    blocks = checked_blocks(decompressed_blocks(file, path, documents.UNIT_BYTES), path)
    for block in cut_lines(blocks, most):
        pending += block
        if b"\n" in block:
            *lines, pending = pending.split(b"\n")
            for line in lines:
                number += 1
                yield _decoded(line + b"\n", number)
    if pending:
        yield _decoded(pending, number + 1)


def _decoded(line: bytes | bytearray, number: int) -> str:
    return line.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")  # which `_documents` notices


def _documents(path: str, columns: list[str], rows: list[Row], reader: Reader, most: int) -> Iterator[Document]:
    """The documents of some rows; empty lines are none."""
    for line, fields in rows:
        if not fields:
            continue
        name = f"{path}, line {line}"
        shown = ", ".join(fields)
        if is_cut(shown.encode("utf-8", "surrogateescape")):
            yield too_long(name, _ESCAPED.sub("\ufffd", shown), most)
        elif len(fields) != len(columns):
            problem = f"expected {len(columns)} fields in this row, as many as columns; found {len(fields)}"
            yield broken(name, f"{name}: {problem}", shown)
        elif _ESCAPED.search(shown):
            yield broken(name, f"{name}: not UTF-8; convert it with iconv", _ESCAPED.sub("\ufffd", shown))
        else:
            yield read_entry(reader, dict(zip(columns, fields, strict=True)), name)
