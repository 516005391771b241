"""The filters of one corpus, in their order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

from zero.corpus.preparing.sources.documents import Document


class Judge(Protocol):
    """Says of a document of text whether it is left out; it can be pickled."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields beside the text that it reads."""

    def __call__(self, document: Document) -> bool: ...


@dataclass(frozen=True)
class Filters:
    """Judges by the names of their filters. The first one that leaves a document out is the one that is counted."""

    judges: tuple[tuple[str, Judge], ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields beside the text that some judge reads, each once."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(judge.fields for _, judge in self.judges)))

    def __call__(self, document: Document) -> Document:
        """The document, or an empty one that names the filter which leaves it out."""
        for name, leaves_out in self.judges:
            if leaves_out(document):
                return document._replace(content="", left_out_by=name)
        return document


NO_FILTERS = Filters(())
