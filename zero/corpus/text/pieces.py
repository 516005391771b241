"""The pieces of byte-pair encodings as files of the `tokenizers` library have them: their merges, and their bytes.

SentencePiece and tiktoken store pieces with priorities, and join the adjacent pair whose concatenation has the best
priority, the leftmost of equals. Files of the `tokenizers` library list the pairs. One pair per piece is exact: before
a piece is formed nothing was joined across its ends, so its last pair is the last pair of the piece encoded alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping


def merges(priorities: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """The pair that each piece is joined from, the lowest priority value first.

    A piece that no sequence of joins leads to is left out. Values are unique, but for runs of one character: then the
    longest comes first, so that a run grows from its left end, as where the leftmost pair is joined.

    >>> list(merges({"a": 0, "b": 1, "ab": 2, "aba": 3, "bab": 4, "cc": 5}))
    [('a', 'b'), ('ab', 'a'), ('b', 'ab')]
    """
    for piece in sorted(priorities, key=lambda piece: (priorities[piece], -len(piece))):
        if len(piece) > 1 and (pair := _last_pair(piece, priorities)):
            yield pair


def _last_pair(piece: str, priorities: Mapping[str, float]) -> tuple[str, str] | None:
    parts = [*piece]
    if any(part not in priorities for part in parts):
        return None
    while len(parts) > 2:
        joined = [left + right for left, right in itertools.pairwise(parts)]
        best = min(range(len(joined)), key=lambda i: priorities.get(joined[i], float("inf")))
        if joined[best] not in priorities:
            return None
        parts = [*parts[:best], joined[best], *parts[best + 2 :]]
    return parts[0], parts[1]


def byte_spellings() -> dict[int, str]:
    """How files of Hugging Face's `tokenizers` spell each byte in a token of bytes.

    A byte that is no printable character of Latin-1 stands as one from code point 256 on, by their order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(256 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)}
