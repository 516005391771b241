"""Units of lines, plain or compressed: each line is an object of JSON with one document, or the text of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

from zero.base.errors import UserError
from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import Document, Reader, Unit, broken, decoded, read_entry
from zero.corpus.preparing.sources.compression import decompressed_blocks
from zero.corpus.preparing.sources.files import SourceFile, open_piece
from zero.files.parsing import reading


def json_lines(file: SourceFile, reader: Reader) -> Iterator[Unit]:
    """The objects of a file, a line each, cut into units."""
    return _units(file, partial(_objects, reader))


def text_lines(file: SourceFile) -> Iterator[Unit]:
    """The texts of a file, a line each, cut into units."""
    return _units(file, _texts)


def _units(file: SourceFile, documents_of: Callable[[str, int, bytes], Iterator[Document]]) -> Iterator[Unit]:
    """Units of whole lines; `documents_of` takes the name of the file, the number of the first line, and the lines."""
    name = file.path if not file.start else f"{file.path} from byte {file.start}"
    first = 1
    seen = file.start
    pending = bytearray()
    with open_piece(file) as opened:
        if file.stop is None:
            blocks = decompressed_blocks(opened, file.path, documents.UNIT_BYTES)
        else:
            blocks = _lines_of_piece(opened, file.start, file.stop)
        for block in blocks:
            pending += block
            cut = pending.rfind(b"\n", len(pending) - len(block)) + 1
            if cut and len(pending) >= documents.UNIT_BYTES:
                yield Unit(opened.tell() - seen, partial(documents_of, name, first, bytes(pending[:cut])))
                first = first + pending.count(b"\n", 0, cut)
                seen = opened.tell()
                del pending[:cut]
        if pending:
            yield Unit(opened.tell() - seen, partial(documents_of, name, first, bytes(pending)))


def _lines_of_piece(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """Blocks of the lines that begin at `start` or after it, and before `stop`: each line is in one piece of a file.

    >>> import io
    >>> lines = io.BytesIO(b"ab\\ncd\\ne")
    >>> [b"".join(_lines_of_piece(lines, start, start + 2)) for start in (0, 2, 4, 6)]
    [b'ab\\n', b'cd\\n', b'', b'e']
    """
    position = 0
    file.seek(0)
    if start:
        file.seek(start - 1)
        position = start - 1 + len(file.readline())
    while position < stop:
        block = file.read(min(documents.UNIT_BYTES, stop - position))
        if not block:
            return
        position += len(block)
        if position == stop and not block.endswith(b"\n"):
            block += file.readline()
        yield block


def _texts(path: str, first: int, lines: bytes) -> Iterator[Document]:
    """Empty lines are not documents."""
    for number, line in enumerate(lines.split(b"\n"), first):
        document = decoded(line.removesuffix(b"\r"), f"{path}, line {number}")
        if document.left_out_by or str(document.content).strip():
            yield document


def _objects(reader: Reader, path: str, first: int, lines: bytes) -> Iterator[Document]:
    # Not splitlines(): it would also cut at a carriage return, which JSON allows between its tokens.
    for number, line in enumerate(lines.split(b"\n"), first):
        if not line.strip():
            continue
        name = f"{path}, line {number}"
        try:
            with reading(f"{name}: expected a JSON object"):
                entry = json.loads(line)
        except UserError as error:
            yield broken(name, str(error), line.decode("utf-8", "replace"))
            continue
        yield read_entry(reader, entry, name)
