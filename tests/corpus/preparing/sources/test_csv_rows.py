"""Rows of CSV and TSV: fields in quotes with line ends, compressed files, and units that do not change them."""

import gzip
from pathlib import Path

import pytest

from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import TextReader
from zero.corpus.preparing.sources.csv_rows import csv_units
from zero.corpus.preparing.sources.formats import format_of


def texts(path: Path, key: str = "text") -> list[str]:
    units = list(csv_units(str(path), TextReader(key), documents.DOCUMENT_BYTES))
    assert sum(unit.size for unit in units) == path.stat().st_size
    return [str(document.content) for unit in units for document in unit.documents() if document is not None]


@pytest.mark.parametrize("unit_bytes", [1, 7, 1 << 20])
def test_fields_with_line_ends(unit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field in quotes is one document, wherever units and blocks of the file end."""
    monkeypatch.setattr(documents, "UNIT_BYTES", unit_bytes)
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfn,text\r\n1,"two\nlines, \xc3\xa9"\r\n\r\n2,"a ""quote"""\r\n3,plain')
    assert texts(path) == ["two\nlines, \u00e9", 'a "quote"', "plain"]
    assert texts(path, "n") == ["1", "2", "3"]


def test_tabs_and_compression(tmp_path: Path) -> None:
    """A comma is a part of a field in TSV."""
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"text\tn\na, b\t1\n"))
    assert texts(path) == ["a, b"]
    form = format_of(str(path))
    assert form is not None and form.has_objects


def test_long_field(tmp_path: Path) -> None:
    """A document may be longer than the 131,072 characters that csv reads by itself."""
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "x" * 200_000 + "\n")
    assert [len(text) for text in texts(path)] == [200_000]
