"""Tokenizes the documents of one unit and assigns them to the splits.

Shapes: n rows or tokens, T tokens of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zero.runtime.corpus.manifest import NO_HASH, SPLITS, Counts
from zero.runtime.corpus.sources.documents import Unit
from zero.runtime.errors import UserError
from zero.runtime.tokenizers import Tokenizer

_PIECE = 1 << 20  # characters of a document that are tokenized at once


class SplitTokens(NamedTuple):
    """What a unit gives to one split."""

    rows: np.ndarray  # tokens (n,), or rows (n, T) if each document has its own
    lengths: np.ndarray | None  # of those rows, int32 (n,)
    counts: Counts


@dataclass(frozen=True)
class UnitTokenizer:
    """From a unit to its tokens for each split; None for a split that is not wanted."""

    tokenizer: Tokenizer
    row_tokens: int
    one_document_per_row: bool
    threshold: int  # documents with a hash below it are for validation

    def __call__(self, unit: Unit, wanted: tuple[bool, ...]) -> list[SplitTokens | None]:
        counts = [Counts(), Counts()]
        documents: list[list[np.ndarray]] = [[], []]
        for document in unit.documents():
            if document is None:
                counts = [count.plus(Counts(skipped=1)) for count in counts]
                continue
            text, split, ends, name = document
            if not len(text):
                continue
            # JSON can hold lone surrogates, which strict UTF-8 refuses; nothing of a document should be lost.
            data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text.tobytes()
            value = NO_HASH
            if split is None:
                # Of the text, not the name, so that copies of a document are in one split.
                value = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
                split = value < self.threshold
            if wanted[split]:
                documents[split].append(self._ids(text, ends, name))
                tokens = len(documents[split][-1])
                counts[split] = counts[split].plus(Counts(int(ends), tokens, len(data), lowest=value))
        return [self._join(documents[i], counts[i]) if wanted[i] else None for i in range(len(SPLITS))]

    def _ids(self, text: str | np.ndarray, ends: bool, name: str) -> np.ndarray:
        end_of_text, size = self.tokenizer.end_of_text, self.tokenizer.vocab_size
        dtype = np.min_scalar_type(size - 1)
        if isinstance(text, str):
            ids = [self.tokenizer.encode(piece).astype(dtype, copy=False) for piece in _pieces(text)]
        elif text.min() < 0 or text.max() >= size:
            bad = text.min() if text.min() < 0 else text.max()
            raise UserError(f"{name} holds token {bad}, outside the vocabulary of {size} of {self.tokenizer.name}")
        else:
            ids = [text.astype(dtype)]
            ends = ends and text[-1] != end_of_text
        return np.concatenate([*ids, np.full(int(ends), end_of_text, dtype)])

    def _join(self, documents: list[np.ndarray], counts: Counts) -> SplitTokens:
        dtype = np.min_scalar_type(self.tokenizer.vocab_size - 1)
        if not self.one_document_per_row:
            return SplitTokens(np.concatenate([*documents, np.zeros(0, dtype)]), None, counts)
        padded = [padded_rows(ids, self.row_tokens, self.tokenizer.end_of_text) for ids in documents]
        rows, lengths = zip(*padded, strict=True) if padded else ((), ())
        return SplitTokens(
            np.concatenate([np.zeros((0, self.row_tokens), dtype), *rows]),
            np.concatenate([np.zeros(0, np.int32), *lengths]),
            counts,
        )


def _pieces(text: str) -> Iterator[str]:
    """A long text in parts that end at a line break if there is one."""
    start = 0
    while len(text) - start > _PIECE:
        cut = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:cut]
        start = cut
    yield text[start:]


def padded_rows(tokens: np.ndarray, row_tokens: int, filler: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (n,) as rows (m, T), and the number of tokens in each (m,)."""
    padding = -len(tokens) % row_tokens
    rows = np.append(tokens, np.full(padding, filler, tokens.dtype)).reshape(-1, row_tokens)
    lengths = np.full(len(rows), row_tokens, np.int32)
    lengths[-1] -= padding
    return rows, lengths
