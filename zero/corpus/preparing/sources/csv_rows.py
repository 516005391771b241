"""Units of CSV and TSV, plain or compressed: each row below the names of the columns is an object with one document."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import Document, Reader, Unit, broken, read_entry
from zero.corpus.preparing.sources.compression import decompressed_blocks
from zero.corpus.preparing.sources.files import open_file
from zero.files.parsing import reading

_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8
Row = tuple[int, list[str]]  # the number of its last line, and its fields


def csv_units(path: str, reader: Reader) -> Iterator[Unit]:
    """The rows of a file in units of about `UNIT_BYTES` of their contents; a field in quotes may span lines."""
    csv.field_size_limit(sys.maxsize)  # a field is a document
    delimiter = "\t" if ".tsv" in path.lower() else ","
    group: list[Row] = []
    size = 0
    told = 0
    with open_file(path) as file, reading(f"{path}: expected CSV", csv.Error):
        rows = csv.reader(_lines(file, path), delimiter=delimiter, strict=True)
        columns = next(rows, [])
        for fields in rows:
            group.append((rows.line_num, fields))
            size += sum(map(len, fields))
            if size >= documents.UNIT_BYTES:
                yield Unit(file.tell() - told, partial(_documents, path, columns, group, reader))
                told = file.tell()
                group = []
                size = 0
        if group:
            yield Unit(file.tell() - told, partial(_documents, path, columns, group, reader))


def _lines(file: BinaryIO, path: str) -> Iterator[str]:
    """The lines of a file with their ends, without the mark of UTF-8 at its beginning."""
    number = 0
    pending = b""
    for block in decompressed_blocks(file, path, documents.UNIT_BYTES):
        *lines, pending = (pending + block).split(b"\n")
        for line in lines:
            number += 1
            yield _decoded(line + b"\n", number)
    if pending:
        yield _decoded(pending, number + 1)


def _decoded(line: bytes, number: int) -> str:
    return line.decode("utf-8-sig" if number == 1 else "utf-8", "surrogateescape")  # which `_documents` notices


def _documents(path: str, columns: list[str], rows: list[Row], reader: Reader) -> Iterator[Document]:
    """The documents of some rows; empty lines are none."""
    for line, fields in rows:
        if not fields:
            continue
        name = f"{path}, line {line}"
        shown = ", ".join(fields)
        if len(fields) != len(columns):
            problem = f"expected {len(columns)} fields in this row, as many as columns; found {len(fields)}"
            yield broken(name, f"{name}: {problem}", shown)
        elif _ESCAPED.search(shown):
            yield broken(name, f"{name}: not UTF-8; convert it with iconv", _ESCAPED.sub("\ufffd", shown))
        else:
            yield read_entry(reader, dict(zip(columns, fields, strict=True)), name)
