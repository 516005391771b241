"""Units of lines, plain or compressed: each line is an object of JSON with one document, or the text of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

from zero.corpus.preparing.sources import documents
from zero.corpus.preparing.sources.compression import decompressed_blocks
from zero.corpus.preparing.sources.documents import Document, Reader, Unit
from zero.corpus.preparing.sources.files import open_file
from zero.errors import UserError
from zero.files.parsing import reading


def json_lines(path: str, reader: Reader) -> Iterator[Unit]:
    """The objects of a file, a line each, cut into units."""
    return _units(path, partial(_objects, reader))


def text_lines(path: str) -> Iterator[Unit]:
    """The texts of a file, a line each, cut into units."""
    return _units(path, _texts)


def _units(path: str, documents_of: Callable[[str, int, bytes], Iterator[Document | None]]) -> Iterator[Unit]:
    """Units of whole lines; `documents_of` takes the path, the number of the first line, and the lines."""
    first = 1
    seen = 0
    pending = bytearray()
    with open_file(path) as file:
        for block in decompressed_blocks(file, path, documents.UNIT_BYTES):
            pending += block
            cut = pending.rfind(b"\n", len(pending) - len(block)) + 1
            if cut and len(pending) >= documents.UNIT_BYTES:
                yield Unit(file.tell() - seen, partial(documents_of, path, first, bytes(pending[:cut])))
                first = first + pending.count(b"\n", 0, cut)
                seen = file.tell()
                del pending[:cut]
        if pending:
            yield Unit(file.tell() - seen, partial(documents_of, path, first, bytes(pending)))


def _texts(path: str, first: int, lines: bytes) -> Iterator[Document | None]:
    """Empty lines are no documents."""
    for number, line in enumerate(lines.split(b"\n"), first):
        name = f"{path}, line {number}"
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{name} is not UTF-8, convert the file with iconv: {error}") from error
        if text.strip():
            yield Document(text, name=name)


def _objects(reader: Reader, path: str, first: int, lines: bytes) -> Iterator[Document | None]:
    # Not splitlines(): it would also cut at a carriage return, which JSON allows between its tokens.
    for number, line in enumerate(lines.split(b"\n"), first):
        if not line.strip():
            continue
        name = f"{path}, line {number}"
        with reading(f"{name}: expected a JSON object"):
            entry = json.loads(line)
        yield reader(entry, name)
