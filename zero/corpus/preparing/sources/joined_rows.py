"""Rows of token ids that another program has cut, as the documents that they were joined of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zero.corpus.preparing.documents import Document


class JoinedRows:
    """The documents in rows of token ids: from one end of text to the next, over the ends of rows and of shards.

    Padding ends a document too. Where a shard has no end of text at all, each row stays as it is, with nothing between.

    >>> rows = JoinedRows(end_of_text=0)
    >>> found = list(rows.add(np.array([[1, 0, 2], [3, 4, 0], [5, 9, 9]]), np.array([3, 3, 1]), "a"))
    >>> [document.content.tolist() for document in [*found, *rows.close()]]
    [[1, 0], [2, 3, 4, 0], [5]]
    """

    def __init__(self, end_of_text: int | None):
        self._end = end_of_text
        self._open: list[np.ndarray] = []  # pieces of a document that has not ended
        self._name = ""
        self._is_divided = False

    def add(self, rows: np.ndarray, lengths: np.ndarray, name: str) -> Iterator[Document]:
        """The documents that end in these rows (n, R), of which `lengths` (n,) tokens are not padding."""
        for row, length in zip(rows, lengths.tolist(), strict=True):
            tokens = row[:length]
            ends = np.flatnonzero(tokens == self._end) + 1
            self._is_divided |= len(ends) > 0 or length < len(row)
            for piece in np.split(tokens, ends):
                self._name = self._name or name
                if len(piece):
                    self._open.append(piece)
                if len(piece) and piece[-1] == self._end:
                    yield self._joined()
            if length < len(row) and self._open:
                yield self._joined()

    def end_shard(self) -> Iterator[Document]:
        """Rows of a shard that nothing has divided; a document cut off at its end continues in the next one."""
        if not self._is_divided:
            for row in self._open:
                yield Document(row, name=self._name, is_complete=True)
            self._open = []

    def close(self) -> Iterator[Document]:
        """The document that the last shard breaks off."""
        if self._open:
            yield self._joined()

    def _joined(self) -> Document:
        document = Document(np.concatenate(self._open), name=self._name)
        self._open = []
        self._name = ""
        return document
