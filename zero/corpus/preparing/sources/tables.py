"""Units of Parquet and Arrow files: each row is an object with one document (pyarrow)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

from zero.base.errors import UserError, install_command
from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import Document, Reader, TextReader, Unit, as_text, read_entry
from zero.corpus.preparing.kinds_of_files import IS_LFS_POINTER, LFS_POINTER
from zero.corpus.preparing.sources.compression import damage_named
from zero.corpus.preparing.sources.files import open_file
from zero.files.parsing import reading

_ROWS = 64  # of a batch that is read at once


def table_units(path: str, reader: Reader) -> Iterator[Unit]:
    """The rows of a file in units of about `UNIT_BYTES` of their contents."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: the pyarrow library is missing; {install_command('parquet')}") from None
    batches = _parquet if path.lower().endswith(".parquet") else _arrow
    first = size = told = 0
    group: list[Any] = []
    with open_file(path) as file, damage_named(path):
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{path} {IS_LFS_POINTER}")
        whole = file.seek(0, 2)
        file.seek(0)
        with reading(f"{path} is not a complete Parquet or Arrow file; copy or write it again", pyarrow.ArrowException):
            unread = _unread(file, reader) if batches is _parquet else ()
            for batch, share in batches(file, reader):
                group.append(batch)
                size += batch.nbytes
                if size >= documents.UNIT_BYTES:
                    stop = round(whole * share)
                    yield Unit(stop - told, partial(_documents, path, first, _packed(group), reader, unread))
                    first = first + sum(part.num_rows for part in group)
                    group = []
                    size = 0
                    told = stop
        if group or told < whole:
            yield Unit(whole - told, partial(_documents, path, first, _packed(group), reader, unread))


def _packed(batches: list[Any]) -> bytes:
    """Batches as an Arrow stream. Pickled as they are, a slice would take all of its file along."""
    import pyarrow

    packed = pyarrow.BufferOutputStream()
    if batches:
        with pyarrow.ipc.new_stream(packed, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    return packed.getvalue().to_pybytes()


def _parquet(file: BinaryIO, reader: Reader) -> Iterator[tuple[Any, float]]:
    """Batches of rows, and the share of the file up to each."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file)
    rows = 0
    columns = _columns(table.schema_arrow.names, reader)
    for batch in table.iter_batches(_ROWS, columns=columns or None):
        rows += batch.num_rows
        yield batch, rows / table.metadata.num_rows


def _columns(names: list[str], reader: Reader) -> list[str]:
    """The columns that are read alone; empty if all are, so that the reader can name them."""
    if not isinstance(reader, TextReader) or reader.key not in names:
        return []
    return [name for name in (reader.key, *reader.fields) if name in names]


def _unread(file: BinaryIO, reader: Reader) -> tuple[str, ...]:
    """The columns of a file that are not read, and that the reader does not see."""
    from pyarrow import parquet

    names = parquet.ParquetFile(file).schema_arrow.names
    columns = _columns(names, reader)
    return tuple(name for name in names if columns and name not in columns)


def _arrow(file: BinaryIO, reader: Reader) -> Iterator[tuple[Any, float]]:
    """The same of an Arrow file, or of a stream, as the datasets library writes it."""
    import pyarrow

    size = file.seek(0, 2)
    file.seek(0)
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    table = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
    batches = map(table.get_batch, range(table.num_record_batches)) if is_file else table
    for number, batch in enumerate(batches, 1):
        share = number / table.num_record_batches if is_file else min(1.0, file.tell() / size)
        for start in range(0, batch.num_rows, _ROWS):
            yield batch.slice(start, _ROWS), share


def _documents(path: str, number: int, packed: bytes, reader: Reader, unread: tuple[str, ...]) -> Iterator[Document]:
    """The rows of some batches, numbered from `first`."""
    import pyarrow

    for batch in pyarrow.ipc.open_stream(packed) if packed else ():
        for row in _rows(batch, f"{path}, row {number}"):
            document = read_entry(reader, row, f"{path}, row {number}")
            yield document._replace(unread=unread) if unread else document
            number += 1


def _rows(batch: Any, name: str) -> list[dict[str, Any]]:
    """The rows of a batch as objects: bytes of UTF-8 are text, as Spark and older tables store it."""
    import pyarrow

    with reading(f"{name} and those after it cannot be read", pyarrow.ArrowException):
        return [as_text(row) for row in batch.to_pylist()]
