"""The documents of a source in an order by a hash of their text, over all parts: a crawl is ordered by site.

A pass before the parts: each part writes its documents as lines of JSON, in a file for each part that they go to, in
`passes/`. Then a part is prepared of the files for it. That is the square of the number of parts in files, the size of
the source on the disk of the corpus, and a part's text in the memory of each process, about twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zero.corpus.format import directory
from zero.corpus.preparing import documents
from zero.corpus.preparing.documents import Document, Unit
from zero.corpus.preparing.duplicates import PASSES
from zero.corpus.preparing.needs import Needs, SourceSize
from zero.corpus.preparing.sources.changes import content_bytes
from zero.corpus.preparing.sources.source import Source
from zero.files import storage

BYTES_OF_LINE = 120  # of objects in memory, for each line
_UNREAD = "\t"  # before the keys that are not read; JSON escapes it elsewhere
_KEY = 32  # characters of a hash, which begin each line


def write_texts(folder: str, number: int, part: Source, parts: int) -> None:
    """Writes the documents of a part for the parts that they go to; those that are left out stay, to be counted."""
    for_parts: list[list[bytes]] = [[] for _ in range(parts)]
    for unit in part.units():
        for document in unit.documents():
            key = _hash(document)
            is_kept = document is not None and len(document.content) > 0
            target = int(key[:16], 16) % parts if is_kept else number
            for_parts[target].append(_line(key, document))
    for target in range(parts):
        directory.write(_file(folder, number, target), b"".join(for_parts[target]))
        for_parts[target] = []


@dataclass(frozen=True)
class Shuffled:
    """The documents that go to a part, in their order."""

    lines: Sequence[bytes]
    digest: str

    def units(self) -> Iterator[Unit]:
        group: list[bytes] = []
        size = 0
        for line in self.lines:
            group.append(line)
            size += len(line)
            if size >= documents.UNIT_BYTES:
                yield Unit(size, partial(_documents, b"\n".join(group)))
                group = []
                size = 0
        if group:
            yield Unit(size, partial(_documents, b"\n".join(group)))


def read_shuffled(folder: str, number: int, parts: int) -> Shuffled:
    """What all parts have written for one, by hash; equal texts in the order of the source."""
    lines: list[bytes] = []
    for source in range(parts):
        lines += directory.read(_file(folder, source, number)).splitlines()
    lines.sort(key=lambda line: line[:_KEY])
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.partition(_UNREAD.encode())[0])
    return Shuffled(lines, digest.hexdigest()[:16])


def needs(size: SourceSize) -> Needs:
    """What the pass needs, and then a part: its lines, those that are read or written at the moment, and their keys."""
    part_bytes = size.line_bytes * (1 + 1 / size.parts) + BYTES_OF_LINE * size.documents
    return Needs(memory=int(part_bytes / size.parts), disk=size.line_bytes)


def bytes_of_lines(unit: Unit) -> tuple[int, int]:
    """How many documents a unit has, and the bytes of the lines of those that are texts."""
    documents = list(unit.documents())
    texts = [document for document in documents if isinstance(document.content, str)]
    return len(documents), sum(len(_line(_hash(document), document)) for document in texts)


def _line(key: str, document: Document) -> bytes:
    unread = f"{_UNREAD}{json.dumps(document.unread)}" if document.unread else ""
    return f"{key}{json.dumps(_entry(document))}{unread}\n".encode()


def _hash(document: Document) -> str:
    return hashlib.blake2b(content_bytes(document), digest_size=_KEY // 2).hexdigest()


def _entry(document: Document) -> dict[str, Any]:
    """What is kept of a document; of those that are left out, by what."""
    assert isinstance(document.content, str)
    entry = {"name": document.name, "split": document.split, "source": document.source, "text": document.content}
    return entry | {
        "is_duplicate": document.is_duplicate,
        "left_out_by": document.left_out_by,
        "left_out": document.left_out,
        "problem": document.problem,
    }


def _documents(lines: bytes) -> Iterator[Document]:
    for line in lines.split(b"\n"):
        text, _, unread = line[_KEY:].partition(_UNREAD.encode())
        entry = json.loads(text)
        yield Document(entry.pop("text"), **entry, unread=tuple(json.loads(unread or b"[]")))


def _file(folder: str, source: int, target: int) -> str:
    return storage.join(folder, f"{PASSES}/texts-{source:05d}-{target:05d}.jsonl")
