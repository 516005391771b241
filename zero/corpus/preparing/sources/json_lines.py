"""Units of lines, plain or compressed: each line is an object of JSON with one document, or the text of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

from zero.base.errors import UserError
from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import Document, Reader, Unit, broken, decoded, read_entry, too_long
from zero.corpus.preparing.sources.compression import checked_blocks, cut_lines, decompressed_blocks, is_cut
from zero.corpus.preparing.sources.files import SourceFile, open_piece
from zero.files.parsing import reading


def json_lines(file: SourceFile, reader: Reader, most: int) -> Iterator[Unit]:
    """The objects of a file, a line of at most `most` bytes each, cut into units."""
    return _units(file, partial(_objects, reader, most), most)


def text_lines(file: SourceFile, most: int) -> Iterator[Unit]:
    """The texts of a file, a line of at most `most` bytes each, cut into units."""
    return _units(file, partial(_texts, most), most)


def _units(
    file: SourceFile, documents_of: Callable[[str, int, bytes], Iterator[Document]], most: int
) -> Iterator[Unit]:
    """Units of whole lines; `documents_of` takes the name of the file, the number of the first line, and the lines."""
    name = file.path if not file.start else f"{file.path} from byte {file.start}"
    first = 1
    seen = file.start
    pending = bytearray()
    with open_piece(file) as opened:
        blocks = decompressed_blocks(opened, file.path, documents.UNIT_BYTES)
        if file.stop is not None:
            blocks = _lines_of_piece(opened, file.start, file.stop)
        if not file.start:
            blocks = checked_blocks(blocks, file.path)
        for block in cut_lines(blocks, most):
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
        position = start - 1 + sum(map(len, _rest_of_line(file)))
    while position < stop:
        block = file.read(min(documents.UNIT_BYTES, stop - position))
        if not block:
            return
        position += len(block)
        yield block
        if position == stop and not block.endswith(b"\n"):
            yield from _rest_of_line(file)


def _rest_of_line(file: BinaryIO) -> Iterator[bytes]:
    """Blocks of a file up to the end of the line."""
    while block := file.readline(documents.UNIT_BYTES):
        yield block
        if block.endswith(b"\n"):
            return


def _texts(most: int, path: str, first: int, lines: bytes) -> Iterator[Document]:
    """Empty lines are not documents."""
    for number, line in enumerate(lines.split(b"\n"), first):
        name = f"{path}, line {number}"
        if is_cut(line):
            yield too_long(name, line.decode("utf-8", "replace"), most)
            continue
        document = decoded(line.removesuffix(b"\r"), name)
        if document.left_out_by or str(document.content).strip():
            yield document


def _objects(reader: Reader, most: int, path: str, first: int, lines: bytes) -> Iterator[Document]:
    # Not splitlines(): it would also cut at a carriage return, which JSON allows between its tokens.
    for number, line in enumerate(lines.split(b"\n"), first):
        if not line.strip():
            continue
        name = f"{path}, line {number}"
        if is_cut(line):
            yield too_long(name, line.decode("utf-8", "replace"), most)
            continue
        try:
            with reading(f"{name}: expected a JSON object"):
                entry = json.loads(line)
        except UserError as error:
            if number == 1 and line.strip() in (b"{", b"["):
                raise UserError(
                    f"{path} is JSON over several lines, but its name promises one object per line: name it .json, or "
                    f"convert it with jq -c . {path}"
                ) from error
            yield broken(name, str(error), line.decode("utf-8", "replace"))
            continue
        yield read_entry(reader, entry, name)
