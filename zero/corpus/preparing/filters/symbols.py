"""Shares of words without letters, of symbols, of lines with bullets or ellipses: Gopher's rules.

Rae et al., arXiv 2112.11446, appendix A1.1, "Quality filtering". Its rules for the number of words (`words.py`), their
mean length and for stop words of English are others: the mean length belongs to English text as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document

MOST_SYMBOLS = 0.1  # hash signs and ellipses, for each word
MOST_BULLETS = 0.9  # of the lines, that begin with one
MOST_ELLIPSES = 0.3  # of the lines, that end with one
_BULLETS = ("-", "*", "•", "‣", "◦")
_ELLIPSES = ("...", "…")


@dataclass(frozen=True)
class SymbolShares:
    """Leaves out texts with too many symbols.

    >>> judge = SymbolShares(0.8)
    >>> [judge(Document(text)) for text in ("plain words here", "1 2 3 4 word", "# # word", "- a\\n- b", "so...\\nit")]
    [False, True, True, True, True]
    """

    least_words: float  # of all words, those with a letter

    fields: ClassVar[tuple[str, ...]] = ()

    def __call__(self, document: Document) -> bool:
        assert isinstance(document.content, str)
        text = document.content
        words = text.split()
        if not words:
            return True
        with_letters = sum(any(map(str.isalpha, word)) for word in words)
        symbols = text.count("#") + sum(map(text.count, _ELLIPSES))
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        bullets = sum(line.startswith(_BULLETS) for line in lines)
        ellipses = sum(line.endswith(_ELLIPSES) for line in lines)
        return (
            with_letters < self.least_words * len(words)
            or symbols > MOST_SYMBOLS * len(words)
            or bullets > MOST_BULLETS * len(lines)
            or ellipses > MOST_ELLIPSES * len(lines)
        )


def symbols(value: str) -> SymbolShares:
    try:
        share = float(value)
    except ValueError:
        raise UserError("expected a share between 0 and 1, such as 0.8") from None
    if not 0 <= share <= 1:
        raise UserError("expected a share between 0 and 1, such as 0.8")
    return SymbolShares(share)
