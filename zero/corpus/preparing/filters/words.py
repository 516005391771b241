"""A least and a most number of words, such as Gopher's 50 and 100,000 (arXiv 2112.11446, appendix A1.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document


@dataclass(frozen=True)
class WordCount:
    """Leaves out documents with fewer or more words.

    >>> [WordCount(2, 3)(Document(text)) for text in ("one", "one two", "a b c d")]
    [True, False, True]
    """

    least: int
    most: int

    fields: ClassVar[tuple[str, ...]] = ()

    def __call__(self, document: Document) -> bool:
        assert isinstance(document.content, str)
        return not self.least <= len(document.content.split()) <= self.most


def words(value: str) -> WordCount:
    numbers = value.split(",")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers) or int(numbers[0]) > int(numbers[1]):
        raise UserError("expected two numbers, such as 50,100000")
    return WordCount(int(numbers[0]), int(numbers[1]))
