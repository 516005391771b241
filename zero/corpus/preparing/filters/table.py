"""The table of filters, and the filters of one corpus. A new filter is a file beside this one, and an entry."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from zero.base.errors import UserError
from zero.corpus.format import directory
from zero.corpus.preparing.documents import Document
from zero.corpus.preparing.filters.contamination import ngrams_of_files
from zero.corpus.preparing.filters.repetition import repetition
from zero.corpus.preparing.filters.symbols import symbols
from zero.corpus.preparing.filters.urls import listed_urls
from zero.corpus.preparing.filters.where import field_values
from zero.corpus.preparing.filters.words import words


class Judge(Protocol):
    """Says of a document of text whether it is left out; it can be pickled."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields beside the text that it reads."""

    def __call__(self, document: Document) -> bool: ...


class Filter(NamedTuple):
    """A kind of filter: the value of its option, and what judges documents by it."""

    metavar: str
    help: str
    judge: Callable[[str], Judge]  # raises UserError for a value that is wrong
    has_files: bool = False  # the value names files, with commas between


# By the names of their options, in the order in which they are asked: what reads a text again and again comes last.
FILTERS: Mapping[str, Filter] = MappingProxyType(
    {
        "where": Filter("KEY=VALUE,...", "keep only documents whose objects have these values", field_values),
        "without-urls": Filter(
            "FILE", "leave out documents whose url is on this list of hosts and pages", listed_urls, has_files=True
        ),
        "words": Filter("LEAST,MOST", "leave out documents with fewer or more words, such as 50,100000", words),
        "symbols": Filter(
            "SHARE",
            "leave out texts in which less than this share of the words contain a letter, such as 0.8, and texts with "
            "many symbols, bullets or ellipses, by Gopher's rules",
            symbols,
        ),
        "repetition": Filter("gopher", "leave out texts that repeat lines, paragraphs or n-grams", repetition),
        "decontaminate": Filter(
            "FILE,...",
            "leave out documents that share 13 words in a row with a line of these files",
            ngrams_of_files,
            has_files=True,
        ),
    }
)


@dataclass(frozen=True)
class Filters:
    """Judges by the names of their filters. The first one that leaves a document out is counted."""

    judges: tuple[tuple[str, Judge], ...]
    values: tuple[tuple[str, str], ...] = ()  # of the options that they were made of

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields beside the text that some judge reads, each once."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(judge.fields for _, judge in self.judges)))

    def __reduce__(self) -> tuple[Callable[..., Filters], tuple[Mapping[str, str]]]:
        """Pickled as the values of its options: a list of n-grams is read by each process, not sent to it."""
        return open_filters, (dict(self.values),)

    def __call__(self, document: Document) -> Document:
        """The document, or an empty one that names the filter which leaves it out."""
        for name, leaves_out in self.judges:
            if leaves_out(document):
                return document._replace(content="", left_out=document.content, left_out_by=name)
        return document


NO_FILTERS = Filters(())


def open_filters(values: Mapping[str, str]) -> Filters:
    """The filters of these options.

    >>> open_filters({"words": "2,9"}).judges[0][0]
    'words'
    >>> open_filters({"words": "many"})
    Traceback (most recent call last):
    zero.base.errors.UserError: --words many: expected two numbers, such as 50,100000
    """
    judges = []
    for name, kind in FILTERS.items():
        if name in values:
            try:
                judges.append((name, kind.judge(values[name])))
            except UserError as error:
                raise UserError(f"--{name} {values[name]}: {error}") from error
    return Filters(tuple(judges), tuple(values.items()))


def recorded_filters(values: Mapping[str, str]) -> dict[str, str]:
    """What a manifest records of these options: their values, and the digests of the files that they name."""
    recorded = {}
    for name, value in sorted(values.items()):
        recorded[name] = value
        if FILTERS[name].has_files:
            contents = b"".join(directory.read(path) for path in value.split(","))
            recorded[name] += f" sha256:{hashlib.sha256(contents).hexdigest()[:16]}"
    return recorded
