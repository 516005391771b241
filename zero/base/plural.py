"""Numbers with their nouns."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number and its noun, in the plural unless there is one.

    >>> counted(1, "document"), counted(2000, "document")
    ('1 document', '2,000 documents')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
