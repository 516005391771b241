"""Tokenizes the documents of one unit and assigns them to the splits.

Shapes: n rows or tokens, T tokens of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zero.corpus.preparing.manifest import NO_HASH, Counts
from zero.corpus.preparing.sources.changes import content_bytes
from zero.corpus.preparing.sources.documents import Document, Unit
from zero.corpus.text.tokenizers import Tokenizer
from zero.errors import UserError

_PIECE = 1 << 20  # characters of a document that are tokenized at once


class SplitTokens(NamedTuple):
    """The tokens of a unit for one split."""

    rows: np.ndarray  # tokens (n,), or rows (n, T) if each document has its own, (n, 2, T) for pairs
    lengths: np.ndarray | None  # of those rows, int32 (n,), (n, 2) for pairs
    completions: np.ndarray | None  # 1 for each token of `rows` that is to be learned, uint8; None: not recorded
    counts: Counts
    starts: np.ndarray | None = None  # 1 for the first token of each document, uint8; None: rows are not packed


class Tokens(NamedTuple):
    ids: np.ndarray  # of one document
    is_learned: np.ndarray | None  # uint8, where prompts are recorded


@dataclass(frozen=True)
class UnitTokenizer:
    """Turns a unit into its tokens for each split; None for a split that is not wanted."""

    tokenizer: Tokenizer
    row_tokens: int
    one_document_per_row: bool
    has_completions: bool
    threshold: int  # documents with a hash below it are for validation
    minimum_tokens: int = 0  # of a document, its end of text included; shorter ones are left out
    has_pairs: bool = False  # each document is a pair of texts, and a row
    marks_starts: bool = False  # of documents, for a packing
    cuts_documents: bool = False  # to their first row, which then ends with the end of text

    def __call__(self, unit: Unit, wanted: tuple[bool, ...]) -> list[SplitTokens | None]:
        counts = [Counts() for _ in wanted]
        documents: list[list[list[Tokens]]] = [[] for _ in wanted]
        for document in unit.documents():
            if document is None:
                counts = [count.plus(Counts(skipped=1)) for count in counts]
                continue
            text = document.content
            split = document.split
            ends = document.ends
            if document.is_duplicate:
                counts = [count.plus(Counts(duplicates=1)) for count in counts]
            if not len(text):
                continue
            data = content_bytes(document)
            value = NO_HASH
            if split is None:
                # A hash of the text, not of the name, so that copies of a document are in one split.
                value = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
                split = value < self.threshold
            if wanted[split]:
                found = [self._tokens(one) for one in (document, document.rejected) if one is not None]
                if min(len(one.ids) for one in found) < self.minimum_tokens:
                    counts[split] = counts[split].plus(Counts(short=1))
                    continue
                if self.has_pairs and max(len(one.ids) for one in found) > self.row_tokens:
                    counts[split] = counts[split].plus(Counts(long=1))
                    continue
                if self.cuts_documents and len(found[0].ids) > self.row_tokens:
                    counts[split] = counts[split].plus(Counts(cut=1))
                    found = [self._cut(found[0])]
                documents[split].append(found)
                size = sum(len(one.ids) for one in found)
                counts[split] = counts[split].plus(Counts(int(ends), size, len(data), lowest=value))
        return [self._join(documents[i], counts[i]) if wanted[i] else None for i in range(len(wanted))]

    def _cut(self, document: Tokens) -> Tokens:
        """The beginning of a document that is longer than a row, as transformers' tokenizers truncate it."""
        end = np.asarray([self.tokenizer.end_of_text], document.ids.dtype)
        return Tokens(np.concatenate([document.ids[: self.row_tokens - 1], end]), None)

    def _tokens(self, document: Document) -> Tokens:
        if document.completions is None:
            adds_end = document.ends and not document.is_complete
            return Tokens(self._ids(document.content, adds_end, document.name), None)
        assert isinstance(document.content, str)
        end_of_text = self.tokenizer.end_of_text
        ids, spans = self.tokenizer.encode_with_spans(document.content, document.has_special)
        starts, ends = spans.T
        # A token that a completion shares with its prompt is learned, as transformers has it.
        is_learned = np.zeros(len(ids), bool)
        for start, stop in document.completions:
            is_learned |= (ends > start) & (starts < stop)
        if end_of_text in ids[:-1] and not self.one_document_per_row:
            raise UserError(
                f"{document.name}: its text contains the end of text, token {end_of_text}, which would divide it; "
                "--one-document-per-row accepts it"
            )
        if not len(ids) or ids[-1] != end_of_text:
            ids = np.append(ids, end_of_text)
            is_learned = np.append(is_learned, True)
        dtype = np.min_scalar_type(self.tokenizer.vocab_size - 1)
        return Tokens(ids.astype(dtype, copy=False), is_learned.astype(np.uint8))

    def _ids(self, text: str | np.ndarray, ends: bool, name: str) -> np.ndarray:
        end_of_text = self.tokenizer.end_of_text
        size = self.tokenizer.vocab_size
        dtype = np.min_scalar_type(size - 1)
        if isinstance(text, str):
            ids = [self.tokenizer.encode(piece).astype(dtype, copy=False) for piece in _pieces(text)]
        elif text.min() < 0 or text.max() >= size:
            bad = text.min() if text.min() < 0 else text.max()
            raise UserError(
                f"{name} holds token {bad}, outside the vocabulary of {size} of "
                f"{self.tokenizer.name}; --tokenizer names the one that made them"
            )
        else:
            ids = [text.astype(dtype)]
            ends = ends and text[-1] != end_of_text
        return np.concatenate([*ids, np.full(int(ends), end_of_text, dtype)])

    def _join(self, documents: list[list[Tokens]], counts: Counts) -> SplitTokens:
        texts = [one for document in documents for one in document]
        rows, lengths = self._joined([one.ids for one in texts], self.tokenizer.end_of_text)
        dtype = np.min_scalar_type(self.tokenizer.vocab_size - 1)
        completions = None
        if self.has_completions:
            learned = [one.is_learned for one in texts if one.is_learned is not None]
            completions = self._joined(learned, 0)[0].astype(np.uint8)
        starts = None
        if self.marks_starts:
            starts = np.zeros(len(rows), np.uint8)
            starts[np.cumsum([0, *(len(one.ids) for one in texts[:-1])])[: len(texts)]] = 1
        return SplitTokens(rows.astype(dtype, copy=False), lengths, completions, counts, starts)

    def _joined(self, arrays: list[np.ndarray], filler: int) -> tuple[np.ndarray, np.ndarray | None]:
        """All texts as one array; or as separate rows for each text, and their lengths; two by two for pairs."""
        if not self.one_document_per_row:
            return np.concatenate([np.zeros(0, np.uint8), *arrays]), None
        none = np.zeros((0, self.row_tokens), np.uint8), np.zeros(0, np.int32)
        padded = [none, *(padded_rows(array, self.row_tokens, filler) for array in arrays)]
        rows, lengths = map(np.concatenate, zip(*padded, strict=True))
        if self.has_pairs:
            return rows.reshape(-1, 2, self.row_tokens), lengths.reshape(-1, 2)
        return rows, lengths


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
