"""The types that all sources produce: documents, in units that worker processes can read independently."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zero.base.errors import Unavailable, UserError
from zero.corpus.preparing.kinds_of_files import HEAD_BYTES, what_it_is

NOT_UTF8 = "is not UTF-8; convert it with iconv"
TRAIN, VALIDATION, TEST = range(3)  # splits, in the order of `zero.corpus.format.manifest.ALL_SPLITS`
BROKEN = "skip-broken"  # why a document is left out that cannot be read, in place of the name of a filter
_SHOWN = 1000  # characters of a document that is too long
DOCUMENT_BYTES = 1 << 28  # the default of --document-bytes: more than any text that was written as one
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
    is_complete: bool = False  # nothing is added at its end: rows of another program, texts that are classified
    is_duplicate: bool = False  # of an earlier one; then its content is empty
    other_texts: tuple[Document, ...] = ()  # of an example, of which this is the first
    members: tuple[int, ...] = ()  # of an example, in the order of `Example.members`
    begins: bool = True  # False: it continues the text of the unit before
    fields: Mapping[str, str] | None = None  # beside the text, those that filters ask for
    left_out_by: str | None = None  # a key of `FILTERS`, or `BROKEN`; then its content is empty
    left_out: str | np.ndarray = ""  # that content, for the report about the corpus
    source: str = ""  # the folder or file that it is counted under there
    unread: tuple[str, ...] = ()  # keys of its record that are not read
    problem: str = ""  # why it is broken: an error that ends the command if no broken document may be left out


_KINDS: dict[type, str] = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
_KINDS |= {list: "a list", dict: "an object", bytes: "bytes that are not UTF-8"}
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
            problem = f"it is {kind_of_value(entry[self.key])}" if self._has_key(entry) else found(entry)
            remedy = "" if fitting_option(entry) else "; --key names another one"
            raise UserError(f'{name}: expected a string under "{self.key}"; {problem}{remedy}')
        unread = tuple(key for key in entry if key != self.key and key not in self.fields)
        if not self.fields:
            return Document(text, name=name, unread=unread)
        present = {field: str(entry[field]) for field in self.fields if entry.get(field) is not None}
        return Document(text, name=name, unread=unread, fields=present)

    def _has_key(self, entry: Any) -> bool:
        return isinstance(entry, dict) and self.key in entry


def too_long(name: str, shown: str, most: int, source: str = "") -> Document:
    """A document of more than `most` bytes, broken; the report shows the beginning of it."""
    problem = f"{name}: longer than --document-bytes {most}; a larger value takes several times as much memory"
    return broken(name, problem, f"{shown[:_SHOWN]}...", source)


def limited(most: int, document: Document) -> Document:
    """The document, or a broken one if a text of it has more than `most` bytes."""
    for part in (document, *document.other_texts):
        if isinstance(part.content, str) and _is_longer(part.content, most):
            return too_long(document.name or document.source or "a document", part.content, most, document.source)
    return document


def _is_longer(text: str, most: int) -> bool:
    """Whether UTF-8 takes more than `most` bytes for a text."""
    return len(text) > most or (4 * len(text) > most and len(text.encode("utf-8", "surrogatepass")) > most)


def broken(name: str, problem: str, shown: str, source: str = "") -> Document:
    """A document that cannot be read. `--skip-broken` decides whether it may be left out, not who reads it."""
    return Document("", name=name, source=source, left_out_by=BROKEN, left_out=shown, problem=problem)


def kind_of_value(value: Any) -> str:
    """What a value of an entry is, for an error.

    >>> import decimal
    >>> kind_of_value([1]), kind_of_value(b"\\xff"), kind_of_value(decimal.Decimal(1))
    ('a list', 'bytes that are not UTF-8', 'of the type Decimal')
    """
    return _KINDS.get(type(value), f"of the type {type(value).__name__}")


def shown(value: Any, most: int = 80) -> str:
    """The beginning of a value of an entry as JSON, for an error; values that JSON does not have as text."""
    return json.dumps(value, default=str, ensure_ascii=False, skipkeys=True)[:most]


def as_text(value: Any) -> Any:
    """A value of a row with UTF-8 bytes as text, within lists and objects too; other bytes stay.

    >>> as_text({"a": [b"text", b"\\xff"]})
    {'a': ['text', b'\\xff']}
    """
    match value:
        case dict():
            return {key: as_text(entry) for key, entry in value.items()}
        case list():
            return [as_text(item) for item in value]
        case bytes():
            with suppress(UnicodeDecodeError):
                return value.decode("utf-8")
    return value


def read_entry(reader: Reader, entry: Any, name: str) -> Document:
    """The document of a JSON object or of a row; broken if the reader raises UserError, or UTF-8 cannot write it.

    Raises:
      Unavailable: the reader raised it.
    """
    try:
        document = reader(entry, name)
        for text in (document, *document.other_texts):
            _check_surrogates(text.content, name)
        return document
    except Unavailable:  # says nothing about the document
        raise
    except UserError as error:
        return broken(name, str(error), json.dumps(entry, default=str, ensure_ascii=False, skipkeys=True))


def _check_surrogates(text: str | np.ndarray, name: str) -> None:
    """Raises UserError for half of a pair of UTF-16, which JSON can hold, and which is no character.

    >>> _check_surrogates("a \\ud83d b", "a.jsonl, line 1")
    Traceback (most recent call last):
    zero.base.errors.UserError: a.jsonl, line 1: character 2, \\ud83d, is half of a surrogate pair, not a character
    """
    if not isinstance(text, str) or text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        problem = f"character {error.start}, {half}, is half of a surrogate pair, not a character"
        raise UserError(f"{name}: {problem}") from error


def decoded(data: bytes, name: str, source: str = "") -> Document:
    """The document of a whole file or line; broken if it is not UTF-8.

    >>> decoded(bytes([0xE9]), "a.txt").problem
    'a.txt is not UTF-8; convert it with iconv'
    >>> decoded("text".encode("utf-16"), "a.txt").problem
    'a.txt is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 a.txt'
    """
    try:
        return Document(data.decode("utf-8-sig"), name=name, source=source)
    except UnicodeDecodeError:
        kind = what_it_is(data[:HEAD_BYTES], name) or NOT_UTF8
        return broken(name, f"{name} {kind}", data.decode("utf-8", "replace"), source)


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


# The keys of an object, and the option with which zero-prepare reads such objects.
_OPTIONS = {
    ("chosen", "rejected"): "--preferences",
    ("prompt", "completion", "label"): "--labels",
    ("prompt", "completion"): "--completions",
    ("text", "label"): "--classification",
    ("messages",): "--completions",
    ("conversations",): "--completions",
}


def fitting_option(entry: Any) -> str | None:
    """The option that reads an object with these keys, if any."""
    keys = entry.keys() if isinstance(entry, dict) else set()
    return next((option for names, option in _OPTIONS.items() if keys >= set(names)), None)


def found(entry: Any, given: str = "") -> str:
    """A description of an entry, for an error, with the option that reads such entries unless it was given.

    >>> found({"prompt": "a", "completion": "b"}), found({"prompt": 1, "completion": 2}, given="--completions")
    ('found completion, prompt, which --completions reads', 'found completion, prompt')
    """
    if not isinstance(entry, dict):
        return "found no object"
    option = fitting_option(entry)
    suffix = f", which {option} reads" if option not in (None, given) else ""
    return f"found {', '.join(sorted(entry))}{suffix}"


@dataclass(frozen=True)
class Unit:
    """About `UNIT_BYTES` of a source. Its contents depend only on the source, not on the number of workers."""

    size: int  # in bytes of the source
    documents: Documents  # can be pickled
