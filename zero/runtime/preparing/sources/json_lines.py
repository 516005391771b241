"""Units of JSON lines, plain or compressed: each line is an object with one document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from zero.runtime.parsing import reading
from zero.runtime.preparing.sources import documents
from zero.runtime.preparing.sources.compression import decompressed_blocks
from zero.runtime.preparing.sources.documents import Document, Reader, Unit
from zero.runtime.preparing.sources.files import open_file


@dataclass(frozen=True)
class JsonLines:
    path: str
    first: int  # number of the first line
    lines: bytes
    reader: Reader

    def documents(self) -> Iterator[Document | None]:
        # Not splitlines(): it would also cut at a carriage return, which JSON allows between its tokens.
        for number, line in enumerate(self.lines.split(b"\n"), self.first):
            if not line.strip():
                continue
            name = f"{self.path}, line {number}"
            with reading(f"{name}: expected a JSON object"):
                entry = json.loads(line)
            yield self.reader(entry, name)


def json_lines(path: str, reader: Reader) -> Iterator[Unit]:
    """The lines of a file, cut into units."""
    first, seen, pending = 1, 0, bytearray()
    with open_file(path) as file:
        for block in decompressed_blocks(file, path, documents.UNIT_BYTES):
            pending += block
            cut = pending.rfind(b"\n", len(pending) - len(block)) + 1
            if cut and len(pending) >= documents.UNIT_BYTES:
                yield Unit(file.tell() - seen, JsonLines(path, first, bytes(pending[:cut]), reader).documents)
                first, seen = first + pending.count(b"\n", 0, cut), file.tell()
                del pending[:cut]
        if pending:
            yield Unit(file.tell() - seen, JsonLines(path, first, bytes(pending), reader).documents)
