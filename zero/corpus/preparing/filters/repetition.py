"""Repetition within a document: lines, paragraphs and n-grams of words that come again.

Measures and thresholds are from Rae et al., arXiv 2112.11446, table A1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document

MOST_REPEATED_LINES = MOST_REPEATED_PARAGRAPHS = 0.30  # of their number
MOST_CHARACTERS_OF_LINES = MOST_CHARACTERS_OF_PARAGRAPHS = 0.20  # of all characters, those in repeated ones
MOST_OF_TOP_NGRAM = {2: 0.20, 3: 0.18, 4: 0.16}  # of all characters, those in the most frequent n-gram
MOST_OF_REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}  # in any n-gram that comes again


@dataclass(frozen=True)
class Repetition:
    """Leaves out texts that exceed one of the thresholds.

    >>> judge = Repetition()
    >>> fable = "a fox saw some grapes that hung above him and he jumped for them until the evening came"
    >>> [judge(Document(text)) for text in (fable, "buy now\\n" * 3 + fable, "to be or " * 20)]
    [False, True, True]
    """

    fields: ClassVar[tuple[str, ...]] = ()

    def __call__(self, document: Document) -> bool:
        assert isinstance(document.content, str)
        text = document.content
        if _exceeds(text.splitlines(), MOST_REPEATED_LINES, MOST_CHARACTERS_OF_LINES):
            return True
        if _exceeds(text.split("\n\n"), MOST_REPEATED_PARAGRAPHS, MOST_CHARACTERS_OF_PARAGRAPHS):
            return True
        words = text.split()
        characters = sum(map(len, words))
        for n, most in MOST_OF_TOP_NGRAM.items():
            if top_ngram_characters(words, n) > most * characters:
                return True
        return any(repeated_characters(words, n) > most * characters for n, most in MOST_OF_REPEATED_NGRAMS.items())


def _exceeds(pieces: Sequence[str], most_repeated: float, most_characters: float) -> bool:
    """Whether too many lines, or paragraphs, were there before, or too many characters are in those."""
    present = [piece.strip() for piece in pieces if piece.strip()]
    seen: set[str] = set()
    repeated = []
    for piece in present:
        if piece in seen:
            repeated.append(piece)
        seen.add(piece)
    is_often = len(repeated) > most_repeated * len(present)
    return is_often or sum(map(len, repeated)) > most_characters * sum(map(len, present))


def top_ngram_characters(words: Sequence[str], n: int) -> int:
    """The characters in all occurrences of the n-gram that comes most often; 0 if none comes twice.

    >>> top_ngram_characters("the sea the sea the land".split(), 2)
    12
    """
    counts = Counter(zip(*(words[start:] for start in range(n)), strict=False))
    if not counts:
        return 0
    often = max(counts.values())
    if often == 1:
        return 0
    return max(often * sum(map(len, ngram)) for ngram, count in counts.items() if count == often)


def repeated_characters(words: Sequence[str], n: int) -> int:
    """The characters of words in an n-gram that was there before; each word counts once.

    >>> repeated_characters("a bb a bb a bb".split(), 2)
    6
    """
    seen: set[tuple[str, ...]] = set()
    is_repeated = bytearray(len(words))
    for start in range(len(words) - n + 1):
        ngram = tuple(words[start : start + n])
        if ngram in seen:
            is_repeated[start : start + n] = b"\1" * n
        seen.add(ngram)
    return sum(len(word) for word, repeated in zip(words, is_repeated, strict=True) if repeated)


def repetition(value: str) -> Repetition:
    if value != "gopher":
        raise UserError("expected gopher")
    return Repetition()
