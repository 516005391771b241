"""Documents that share 13 words in a row with an evaluation set: a model would memorize them (GPT-3's rule).

Brown et al., arXiv 2005.14165, appendix C: words of lower case without punctuation, n-grams of 13. There a matching
document is cut around the match; here it is left out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from zero.base.errors import UserError
from zero.corpus.format import directory
from zero.corpus.preparing.documents import Document

NGRAM = 13  # words
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class SharedNgrams:
    """Leaves out documents with one of these n-grams, which are known by 8 bytes of a hash each.

    >>> question = "What is the name of the river that flows through the old town of Bern?"
    >>> judge = SharedNgrams(frozenset(ngrams(question)))
    >>> [judge(Document(text)) for text in ("Q: " + question.upper(), question.replace("river", "stream"))]
    [True, False]
    """

    ngrams: frozenset[bytes]

    fields: ClassVar[tuple[str, ...]] = ()

    def __call__(self, document: Document) -> bool:
        assert isinstance(document.content, str)
        return any(ngram in self.ngrams for ngram in ngrams(document.content))


def ngrams(text: str) -> Iterator[bytes]:
    """The hash of each 13 words in a row."""
    words = _WORD.findall(text.lower())
    for start in range(len(words) - NGRAM + 1):
        yield hashlib.blake2b(" ".join(words[start : start + NGRAM]).encode(), digest_size=8).digest()


def ngrams_of_files(value: str) -> SharedNgrams:
    """The n-grams of files whose lines are read one by one, so that none spans two questions."""
    hashes: set[bytes] = set()
    for path in value.split(","):
        for line in directory.read(path).decode("utf-8", "replace").splitlines():
            hashes.update(ngrams(line))
    if not hashes:
        raise UserError(f"no line has {NGRAM} words")
    return SharedNgrams(frozenset(hashes))
