"""Tokenizes the documents of one unit and assigns them to the splits.

Shapes: n rows or tokens, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zero.base.errors import UserError
from zero.corpus.preparing.corpus_files import NO_HASH, Counts
from zero.corpus.preparing.corpus_statistics import DEDUPLICATE, MINIMUM_TOKENS, ROW_TOKENS, CorpusStatistics
from zero.corpus.preparing.documents import BROKEN, Document, Unit
from zero.corpus.preparing.sources.changes import content_bytes
from zero.corpus.text.tokenizers import Tokenizer

_PIECE = 1 << 20  # characters of a document that are tokenized at once


class SplitTokens(NamedTuple):
    """The tokens of a unit for one split."""

    rows: np.ndarray  # tokens (n,), or rows (n, T) if each document has its own, (n, k, T) of k texts of an example
    lengths: np.ndarray | None  # of those rows, int32 (n,) or (n, k)
    completions: np.ndarray | None  # 1 for each token of `rows` that is to be learned, uint8; None: not recorded
    counts: Counts
    starts: np.ndarray | None = None  # 1 for the first token of each document, uint8; None: each has its own rows
    members: np.ndarray | None = None  # int32 (n, m), of examples


class UnitTokens(NamedTuple):
    """What a unit becomes.

    Attributes:
      removed: where each document that was left out is, and the option that left it out.
      broken: the errors of those that cannot be read.
    """

    splits: list[SplitTokens]
    statistics: CorpusStatistics
    removed: list[tuple[str, str]]
    broken: list[str]


class Tokens(NamedTuple):
    ids: np.ndarray  # of one document
    is_learned: np.ndarray | None  # uint8, where prompts are recorded
    begins: bool = True  # False: the rest of a document of the unit before


@dataclass(frozen=True)
class UnitTokenizer:
    """Turns a unit into its tokens for each split."""

    tokenizer: Tokenizer
    row_tokens: int
    one_document_per_row: bool
    has_completions: bool
    threshold: int  # documents with a hash below it are for validation
    splits: int = 2
    minimum_tokens: int = 0  # of a document, its end of text included; shorter ones are left out
    texts: int = 0  # of an example, which a document then is, and a row; 0: documents are running text
    cuts_documents: bool = False  # to their first row, which then ends with the end of text

    def __call__(self, unit: Unit) -> UnitTokens:
        counts = [Counts() for _ in range(self.splits)]
        statistics = CorpusStatistics()
        removed: list[tuple[str, str]] = []
        broken: list[str] = []

        def leave_out(document: Document, reason: str, content: str | np.ndarray) -> None:
            statistics.leave_out(reason, document.name, content, self.tokenizer)
            removed.append((document.name, reason))

        documents: list[list[list[Tokens]]] = [[] for _ in range(self.splits)]
        members: list[list[tuple[int, ...]]] = [[] for _ in range(self.splits)]
        for document in unit.documents():
            text = document.content
            split = document.split
            ends = document.ends
            if document.unread:
                statistics.leave_unread(document.unread)
            if document.left_out_by is not None:
                counts = [count.plus(_left_out_by(document.left_out_by)) for count in counts]
                leave_out(document, document.left_out_by, document.left_out)
                if document.left_out_by == BROKEN:
                    broken.append(document.problem)
            if document.is_duplicate:
                counts = [count.plus(Counts(duplicates=1)) for count in counts]
                leave_out(document, DEDUPLICATE, document.left_out)
            if not len(text):
                continue
            data = content_bytes(document)
            value = NO_HASH
            if split is None:
                # A hash of the text, not of the name, so that copies of a document are in one split.
                value = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
                split = value < self.threshold
            versions = [document, *document.other_texts]
            texts = learned_from_one_token([self._tokens(version) for version in versions])
            sizes = [len(text.ids) for text in texts]
            if min(sizes) < self.minimum_tokens:
                counts[split] = counts[split].plus(Counts(short=1))
                leave_out(document, MINIMUM_TOKENS, text)
                continue
            if self.texts and max(sizes) > self.row_tokens:
                counts[split] = counts[split].plus(Counts(long=1))
                leave_out(document, ROW_TOKENS, text)
                continue
            if self.cuts_documents and sizes[0] > self.row_tokens:
                beginning = self._cut(texts[0])
                if beginning is None:
                    counts[split] = counts[split].plus(Counts(long=1))
                    leave_out(document, ROW_TOKENS, text)
                    continue
                counts[split] = counts[split].plus(Counts(cut=1))
                texts = [beginning]
                sizes = [len(texts[0].ids)]
            documents[split].append(texts)
            members[split].append(document.members)
            dropped_calls = sum(version.dropped_calls for version in versions)
            statistics.count(document.source, int(ends), sum(sizes), len(data), document.begins and ends)
            truncations = 0
            if self.one_document_per_row:
                truncations = sum((size - 1) // self.row_tokens for size in sizes)
            counts[split] = counts[split].plus(
                Counts(
                    int(ends),
                    sum(sizes),
                    len(data),
                    lowest=value,
                    truncations=truncations,
                    dropped_calls=dropped_calls,
                )
            )
        splits = [self._join(*split) for split in zip(documents, members, counts, strict=True)]
        return UnitTokens(splits, statistics, removed, broken)

    def _cut(self, document: Tokens) -> Tokens | None:
        """The beginning of a document that is longer than a row, as transformers' tokenizers truncate it.

        Where completions are learned it ends with the last of them that is whole in the row; None if none is.
        """
        if document.is_learned is not None:
            is_learned = np.append(document.is_learned, 0)
            ends = np.flatnonzero(is_learned[:-1] > is_learned[1:]) + 1
            ends = ends[ends <= self.row_tokens]
            if not len(ends):
                return None
            return Tokens(document.ids[: ends[-1]], document.is_learned[: ends[-1]])
        end = np.asarray([self.tokenizer.end_of_text], document.ids.dtype)
        return Tokens(np.concatenate([document.ids[: self.row_tokens - 1], end]), None)

    def _tokens(self, document: Document) -> Tokens:
        if document.completions is None:
            return Tokens(self._ids(document), None, document.begins)
        assert isinstance(document.content, str)
        special = self.tokenizer.special
        ids, spans = self.tokenizer.encode_with_spans(document.content, document.has_special)
        is_learned, is_ended = learned_tokens(ids, spans, document.completions, special.turn_ends)
        # The log-probability of an answer of an example is that of all that the template writes, as in TRL.
        if self.texts or document.is_exact:
            is_learned, _ = learned_tokens(ids, spans, document.completions, ())
        if not document.has_special:  # a chat template writes the beginning itself
            ids = np.concatenate([np.asarray(special.before, ids.dtype), ids])
            is_learned = np.concatenate([np.zeros(len(special.before), bool), is_learned])
        is_open = not is_ended and (not len(ids) or ids[-1] != special.answer_end)
        if is_open and not document.is_complete:
            ids = np.append(ids, special.answer_end)
            is_learned = np.append(is_learned, True)
        if not self.one_document_per_row:
            self._check_undivided(document, ids)
            if ids[-1] != special.end_of_text:  # divides it from the next document, and is only read
                ids = np.append(ids, special.end_of_text)
                is_learned = np.append(is_learned, False)
        dtype = np.min_scalar_type(self.tokenizer.vocab_size - 1)
        return Tokens(ids.astype(dtype, copy=False), is_learned.astype(np.uint8))

    def _check_undivided(self, document: Document, ids: np.ndarray) -> None:
        """Raises UserError if another document would seem to begin within this one."""
        starts, ends = self.tokenizer.special.separators
        dividers = np.append(ids[1:-1][np.isin(ids[1:-1], starts)], ids[:-1][np.isin(ids[:-1], ends)])
        if len(dividers):
            raise UserError(
                f"{document.name}: its text contains token {dividers[0]}, which separates the documents of a row; "
                "--one-document-per-row accepts it"
            )

    def _ids(self, document: Document) -> np.ndarray:
        """The ids of a document, or of a part of one, with the beginning and the end that belong to it."""
        text = document.content
        special = self.tokenizer.special
        size = self.tokenizer.vocab_size
        dtype = np.min_scalar_type(size - 1)
        before: tuple[int, ...] = ()
        ends = document.ends and not document.is_complete
        if isinstance(text, str):
            ids = [self.tokenizer.encode(piece).astype(dtype, copy=False) for piece in _pieces(text)]
            before = special.before if document.begins else ()
        elif text.min() < 0 or text.max() >= size:
            bad = text.min() if text.min() < 0 else text.max()
            raise UserError(
                f"{document.name} holds token {bad}, outside the vocabulary of {size} of {self.tokenizer.name}; pass "
                "the tokenizer that made them as --tokenizer"
            )
        else:
            ids = [text.astype(dtype)]
            ends = ends and text[-1] != special.end_of_text
        after = (special.end_of_text,) if ends else ()
        return np.concatenate([np.asarray(before, dtype), *ids, np.asarray(after, dtype)])

    def _join(self, documents: list[list[Tokens]], members: list[tuple[int, ...]], counts: Counts) -> SplitTokens:
        texts = list(itertools.chain.from_iterable(documents))
        rows, lengths = self._joined([text.ids for text in texts], self.tokenizer.end_of_text)
        dtype = np.min_scalar_type(self.tokenizer.vocab_size - 1)
        completions = None
        if self.has_completions:
            learned = [text.is_learned for text in texts if text.is_learned is not None]
            completions = self._joined(learned, 0)[0].astype(np.uint8)
        starts = None
        if not self.one_document_per_row:
            starts = np.zeros(len(rows), np.uint8)
            firsts = np.cumsum([0, *(len(text.ids) for text in texts)])[:-1]
            starts[firsts[[text.begins for text in texts]]] = 1
        example_members = np.asarray(members, np.int32).reshape(len(members), -1) if self.texts and members else None
        return SplitTokens(rows.astype(dtype, copy=False), lengths, completions, counts, starts, example_members)

    def _joined(self, arrays: list[np.ndarray], filler: int) -> tuple[np.ndarray, np.ndarray | None]:
        """All texts as one array; or as separate rows for each text, and their lengths, by example."""
        if not self.one_document_per_row:
            return np.concatenate([np.zeros(0, np.uint8), *arrays]), None
        none = np.zeros((0, self.row_tokens), np.uint8), np.zeros(0, np.int32)
        padded = [none, *(padded_rows(array, self.row_tokens, filler) for array in arrays)]
        rows, lengths = map(np.concatenate, zip(*padded, strict=True))
        if self.texts:
            return rows.reshape(-1, self.texts, self.row_tokens), lengths.reshape(-1, self.texts)
        return rows, lengths


def learned_tokens(
    ids: np.ndarray, spans: np.ndarray, completions: Sequence[tuple[int, int]], turn_ends: Sequence[int]
) -> tuple[np.ndarray, bool]:
    """Which tokens (n,) are learned, and whether the last completion has an end of its turn.

    A completion is learned up to the end of its turn, which some templates follow by a line break. A token that it
    shares with its prompt is learned, as transformers has it.

    >>> spans = np.array([(0, 1), (1, 2), (2, 9), (9, 10)])
    >>> learned_tokens(np.array([5, 6, 0, 7]), spans, [(1, 10)], [0])
    (array([False,  True,  True, False]), True)
    """
    starts, ends = spans.T
    is_learned = np.zeros(len(ids), bool)
    is_ended = False
    for start, stop in completions:
        touched = np.flatnonzero((ends > start) & (starts < stop))
        marks = np.flatnonzero(np.isin(ids[touched], turn_ends))
        is_ended = len(marks) > 0
        is_learned[touched[: marks[-1] + 1] if is_ended else touched] = True
    return is_learned, is_ended


def learned_from_one_token(texts: list[Tokens]) -> list[Tokens]:
    """The texts of an example, of which both answers of a pair are learned from the same token on.

    Where the end of the prompt and the beginning of one answer are a single token, the other answer is learned from
    that token on too: so both log-probabilities have the same tokens as their condition, as with TRL's DPOTrainer. A
    document that is a single text stays as it is.

    >>> chosen = Tokens(np.array([5, 6, 7]), np.array([0, 1, 1], np.uint8))  # 6 is a space and a letter
    >>> rejected = Tokens(np.array([5, 3, 8]), np.array([0, 0, 1], np.uint8))  # 3 is the space
    >>> learned_from_one_token([chosen, rejected])[1].is_learned.tolist()
    [0, 1, 1]
    """
    if len(texts) == 1:
        return texts
    least = min(len(text.ids) for text in texts)
    is_same = np.all([text.ids[:least] == texts[0].ids[:least] for text in texts], axis=0)
    shared = int(np.argmin(np.append(is_same, False)))
    begin = min(shared, *(_first_learned(text) for text in texts))
    learned = []
    for text in texts:
        is_learned = np.array(text.is_learned)
        is_learned[begin : _first_learned(text)] = 1
        learned.append(text._replace(is_learned=is_learned))
    return learned


def _first_learned(text: Tokens) -> int:
    """The position of the first learned token of a text with a prompt; its length if none is learned."""
    assert text.is_learned is not None
    return int(np.argmax(np.append(text.is_learned, 1)))


def _left_out_by(reason: str) -> Counts:
    return Counts(skipped=1) if reason == BROKEN else Counts(filtered=Counter([reason]))


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
