"""Units of JSON lines, plain or compressed: each line is an object with one document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

from zero.corpus.preparing.sources import documents
from zero.corpus.preparing.sources.compression import decompressed_blocks
from zero.corpus.preparing.sources.documents import Document, Reader, Unit
from zero.corpus.preparing.sources.files import open_file
from zero.files.parsing import reading


def json_lines(path: str, reader: Reader) -> Iterator[Unit]:
    """The lines of a file, cut into units."""
    first = 1
    seen = 0
    pending = bytearray()
    with open_file(path) as file:
        for block in decompressed_blocks(file, path, documents.UNIT_BYTES):
            pending += block
            cut = pending.rfind(b"\n", len(pending) - len(block)) + 1
            if cut and len(pending) >= documents.UNIT_BYTES:
                yield Unit(file.tell() - seen, partial(_documents, path, first, bytes(pending[:cut]), reader))
                first = first + pending.count(b"\n", 0, cut)
                seen = file.tell()
                del pending[:cut]
        if pending:
            yield Unit(file.tell() - seen, partial(_documents, path, first, bytes(pending), reader))


def _documents(path: str, first: int, lines: bytes, reader: Reader) -> Iterator[Document | None]:
    """The documents of some lines, of which the first has this number."""
    # Not splitlines(): it would also cut at a carriage return, which JSON allows between its tokens.
    for number, line in enumerate(lines.split(b"\n"), first):
        if not line.strip():
            continue
        name = f"{path}, line {number}"
        with reading(f"{name}: expected a JSON object"):
            entry = json.loads(line)
        yield reader(entry, name)
