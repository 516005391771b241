"""The types that all sources produce: documents, in units that worker processes can read independently."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zero.base.errors import UserError

TRAIN, VALIDATION, TEST = range(3)  # splits, in the order of `zero.corpus.format.manifest.ALL_SPLITS`
BROKEN = "skip-broken"  # why a document is left out that cannot be read, in place of the name of a filter
UNIT_BYTES = 1 << 20  # of a source per unit: a fraction of a second for a tokenizer


class Document(NamedTuple):
    """A text, or the ids of its tokens, or a part of either."""

    content: str | np.ndarray
    split: int | None = None  # None: decided by its hash
    ends: bool = True  # False: the next unit continues it
    name: str = ""  # its location, for errors
    completions: tuple[tuple[int, int], ...] | None = None  # first and past last characters; None: nothing is a prompt
    has_special: bool = False  # the text spells special tokens
    is_exact: bool = False  # completions end where marked, not at the end of their turn
    dropped_calls: int = 0  # messages whose tool calls the chat template leaves out
    is_complete: bool = False  # rows of another program, that are joined without an end of text between them
    is_duplicate: bool = False  # of an earlier one; then its content is empty
    other_texts: tuple[Document, ...] = ()  # of an example, of which this is the first
    members: tuple[int, ...] = ()  # of an example, in the order of `Example.members`
    begins: bool = True  # False: it continues the text of the unit before
    fields: Mapping[str, str] | None = None  # beside the text, those that filters ask for
    left_out_by: str | None = None  # a key of `FILTERS`, or `BROKEN`; then its content is empty
    left_out: str | np.ndarray = ""  # that content, for the report about the corpus
    source: str = ""  # the folder or file that it is counted under there
    problem: str = ""  # why it is broken: an error that ends the command if no broken document may be left out


_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
# The document of an object of JSON, or of a row of a dataset; raises UserError, with the name that is its second
# argument, for an entry without what it reads.
Reader = Callable[[Any, str], Document]
# The documents of a unit. It raises UserError for what cannot be read.
Documents = Callable[[], Iterator[Document]]


@dataclass(frozen=True)
class TextReader:
    """Reads the text under one key."""

    key: str
    fields: tuple[str, ...] = ()  # that filters ask for

    def __call__(self, entry: Any, name: str) -> Document:
        text = entry.get(self.key) if isinstance(entry, dict) else None
        if not isinstance(text, str):
            problem = f"it is {_KINDS[type(entry[self.key])]}" if self._has_key(entry) else found(entry)
            raise UserError(f'{name}: expected a string under "{self.key}"; {problem}; --key names another one')
        if not self.fields:
            return Document(text, name=name)
        present = {field: str(entry[field]) for field in self.fields if entry.get(field) is not None}
        return Document(text, name=name, fields=present)

    def _has_key(self, entry: Any) -> bool:
        return isinstance(entry, dict) and self.key in entry


def broken(name: str, problem: str, shown: str, source: str = "") -> Document:
    """A document that cannot be read. `--skip-broken` decides whether it may be left out, not who reads it."""
    return Document("", name=name, source=source, left_out_by=BROKEN, left_out=shown, problem=problem)


def read_entry(reader: Reader, entry: Any, name: str) -> Document:
    """The document of a JSON object or of a row; broken if the reader raises UserError."""
    try:
        return reader(entry, name)
    except UserError as error:
        return broken(name, str(error), json.dumps(entry, default=str, ensure_ascii=False))


def decoded(data: bytes, name: str, source: str = "") -> Document:
    """The document of a whole file or line; broken if it is not UTF-8.

    >>> decoded(bytes([0xE9]), "a.txt").problem
    'a.txt is not UTF-8; convert it with iconv'
    >>> decoded("text".encode("utf-16"), "a.txt").problem
    'a.txt is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 a.txt'
    >>> decoded(b"PK\\x03\\x04\\xe9", "a.zip").problem
    'a.zip is a zip archive; unpack it and pass the folder'
    """
    try:
        return Document(data.decode("utf-8-sig"), name=name, source=source)
    except UnicodeDecodeError:
        shown = data.decode("utf-8", "replace")
        return broken(name, f"{name} {what_it_is(data, name)}", shown, source)


def what_it_is(data: bytes, name: str) -> str:
    """The kind of a file that is not UTF-8, judging by its first bytes, with the remedy."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return f"is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {name}"
    if data.startswith(b"PK\x03\x04"):
        return "is a zip archive; unpack it and pass the folder"
    if data.startswith(b"%PDF"):
        return "is a PDF; extract its text first, for example with pdftotext"
    return "is not UTF-8; convert it with iconv"


def too_many_broken(count: int, most: int, problem: str) -> UserError:
    """The error for more broken documents than may be left out.

    >>> str(too_many_broken(1, 0, "a.jsonl, line 7: expected a JSON object"))
    'a.jsonl, line 7: expected a JSON object; --skip-broken N leaves out up to N such documents'
    """
    if not most:
        return UserError(f"{problem}; --skip-broken N leaves out up to N such documents")
    return UserError(f"{count} documents are broken, more than --skip-broken {most}; one of them: {problem}")


def field_of(document: Document, key: str) -> str:
    """A document's value of another field; raises UserError if it has none."""
    if document.fields is None or key not in document.fields:
        name = document.name or "a document of text"
        raise UserError(f'{name}: expected a value under "{key}", which a filter reads')
    return document.fields[key]


def found(entry: Any) -> str:
    """A description of an entry, for an error."""
    if not isinstance(entry, dict):
        return "found no object"
    return f"found {', '.join(sorted(entry))}"


@dataclass(frozen=True)
class Unit:
    """About `UNIT_BYTES` of a source. Its contents depend only on the source, not on the number of workers."""

    size: int  # in bytes of the source
    documents: Documents  # can be pickled
