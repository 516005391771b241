"""What may be done to the documents of a source before they are tokenized: normalizing them, dropping duplicates."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Literal

from zero.corpus.preparing.documents import Document, Documents, Unit

Form = Literal["NFC", "NFKC"]
FORMS: dict[str, Form] = {"nfc": "NFC", "nfkc": "NFKC"}
NEAR = "near-duplicates"  # in place of the name of a filter
_DIGEST = 16  # bytes: of a trillion documents, two different ones share a digest with a probability of 1e-15


def changed(units: Iterable[Unit], change: Callable[[Document], Document]) -> Iterator[Unit]:
    """The same units, with each document changed by a function that can be pickled."""
    for unit in units:
        yield Unit(unit.size, partial(_changed, unit.documents, change))


def _changed(documents: Documents, change: Callable[[Document], Document]) -> Iterator[Document]:
    for document in documents():
        yield document if document.left_out_by else change(document)


def normalized(form: Form, document: Document) -> Document:
    """The document with its text in a Unicode normalization form."""
    if isinstance(document.content, str):
        document = document._replace(content=unicodedata.normalize(form, document.content))
    return document


def without(
    units: Iterable[Unit], places: Mapping[int, frozenset[int]], mark: Callable[[Document], Document]
) -> Iterator[Unit]:
    """The same units; the documents at these places, by the number of the unit, are marked as left out."""
    for number, unit in enumerate(units):
        unit_changes = places.get(number)
        yield Unit(unit.size, partial(_marked, unit.documents, unit_changes, mark)) if unit_changes else unit


def _marked(documents: Documents, places: frozenset[int], mark: Callable[[Document], Document]) -> Iterator[Document]:
    for index, document in enumerate(documents()):
        yield mark(document) if index in places else document


def as_duplicate(document: Document) -> Document:
    return document._replace(content="", left_out=document.content, is_duplicate=True)


def as_near_duplicate(document: Document) -> Document:
    """An exact duplicate is counted as such only."""
    if document.is_duplicate:
        return document
    return document._replace(content="", left_out=document.content, left_out_by=NEAR)


def digests(unit: Unit) -> list[bytes | None]:
    """A digest of each document of a unit; None for a document that is already left out."""
    return [None if document.left_out_by else _digest(document) for document in unit.documents()]


def _digest(document: Document) -> bytes:
    return hashlib.blake2b(content_bytes(document), digest_size=_DIGEST).digest()


def content_bytes(document: Document) -> bytes:
    """The bytes of a document, for hashes; of all texts of an example."""
    # JSON can hold lone surrogates, which strict UTF-8 refuses; nothing of a document should be lost.
    contents = [text.content for text in (document, *document.other_texts)]
    return b"\0".join(x.encode("utf-8", "surrogatepass") if isinstance(x, str) else x.tobytes() for x in contents)


def repeated(found: Iterable[list[bytes | None]]) -> dict[int, frozenset[int]]:
    """The places of all documents but the first of each digest, by the number of their unit.

    >>> repeated([[b"a", b"b"], [None, b"a", b"c", b"c"]])
    {1: frozenset({1, 3})}
    """
    seen: set[bytes] = set()
    duplicates: dict[int, frozenset[int]] = {}
    for number, unit in enumerate(found):
        places = set()
        for index, digest in enumerate(unit):
            if digest in seen:
                places.add(index)
            elif digest is not None:
                seen.add(digest)
        if places:
            duplicates[number] = frozenset(places)
    return duplicates
