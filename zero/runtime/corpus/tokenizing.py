"""Documents to tokens, by many processes and in the documents' order.

Shapes: n rows or tokens, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zero.runtime.corpus.manifests import NO_HASH, SPLITS, Counts
from zero.runtime.corpus.sources.documents import Unit
from zero.runtime.errors import UserError
from zero.runtime.tokenizers import Tokenizer

_PIECE = 1 << 20  # characters that are tokenized at once, whatever the length of a text


class Part(NamedTuple):
    """What a unit gives to one split."""

    rows: np.ndarray  # tokens (n,), or rows (n, T) where each document has its own
    lengths: np.ndarray | None  # of those rows, int32 (n,)
    counts: Counts


@dataclass(frozen=True)
class Tokenize:
    """A unit to what it gives to each split; None for a split that is not wanted."""

    tokenizer: Tokenizer
    row_tokens: int
    one_document_a_row: bool
    threshold: int

    def __call__(self, unit: Unit, wanted: tuple[bool, ...]) -> list[Part | None]:
        counts = [Counts(), Counts()]
        documents: list[list[np.ndarray]] = [[], []]
        for document in unit.documents():
            if document is None:
                counts = [count.plus(Counts(skipped=1)) for count in counts]
                continue
            text, split, ends, where = document
            if not len(text):
                continue
            # JSON can hold lone surrogates, which strict UTF-8 refuses; nothing of a document should be lost.
            data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text.tobytes()
            value = NO_HASH
            if split is None:
                # Of the text, not the name: copies of a document stay on one side.
                value = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
                split = value < self.threshold
            if wanted[split]:
                documents[split].append(self._ids(text, ends, where))
                tokens = len(documents[split][-1])
                counts[split] = counts[split].plus(Counts(int(ends), tokens, len(data), lowest=value))
        return [self._part(documents[i], counts[i]) if wanted[i] else None for i in range(len(SPLITS))]

    def _ids(self, text: str | np.ndarray, ends: bool, where: str) -> np.ndarray:
        end_of_text, size = self.tokenizer.end_of_text, self.tokenizer.vocab_size
        dtype = np.min_scalar_type(size - 1)
        if isinstance(text, str):
            ids = [self.tokenizer.encode(piece).astype(dtype, copy=False) for piece in _pieces(text)]
        elif text.min() < 0 or text.max() >= size:
            bad = text.min() if text.min() < 0 else text.max()
            raise UserError(f"{where} holds token {bad}, outside the vocabulary of {size} of {self.tokenizer.name}")
        else:
            ids = [text.astype(dtype)]
            ends = ends and text[-1] != end_of_text
        return np.concatenate([*ids, np.full(int(ends), end_of_text, dtype)])

    def _part(self, documents: list[np.ndarray], counts: Counts) -> Part:
        dtype = np.min_scalar_type(self.tokenizer.vocab_size - 1)
        if not self.one_document_a_row:
            return Part(np.concatenate([*documents, np.zeros(0, dtype)]), None, counts)
        padded = [padded_rows(ids, self.row_tokens, self.tokenizer.end_of_text) for ids in documents]
        rows, lengths = zip(*padded, strict=True) if padded else ((), ())
        return Part(
            np.concatenate([np.zeros((0, self.row_tokens), dtype), *rows]),
            np.concatenate([np.zeros(0, np.int32), *lengths]),
            counts,
        )


def _pieces(text: str) -> Iterator[str]:
    """A long text in parts that end at a line break where there is one."""
    start = 0
    while len(text) - start > _PIECE:
        cut = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:cut]
        start = cut
    yield text[start:]


def padded_rows(tokens: np.ndarray, row_tokens: int, filler: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (n,) as rows (m, T), and how many tokens there are in each (m,)."""
    padding = -len(tokens) % row_tokens
    rows = np.append(tokens, np.full(padding, filler, tokens.dtype)).reshape(-1, row_tokens)
    lengths = np.full(len(rows), row_tokens, np.int32)
    lengths[-1] -= padding
    return rows, lengths


_in_worker: Tokenize


def _start_worker(tokenize: Tokenize) -> None:
    global _in_worker
    _in_worker = tokenize
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    assert parent

    def follow() -> None:  # a parent that is killed says nothing, and its workers would wait for ever
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _work(unit: Unit, wanted: tuple[bool, ...]) -> list[Part | None]:
    return _in_worker(unit, wanted)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Puts Ctrl-C off: a pool that is interrupted while it starts a process loses count of them, and never ends.

    Processes that are started here inherit that for good, and leave it to their parent to answer.
    """
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # where Python handles signals
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number)) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
    if came and callable(handler):
        handler(signal.SIGINT, None)


def in_order(
    tasks: Iterable[tuple[Unit, tuple[bool, ...]]], tokenize: Tokenize, workers: int
) -> Iterator[tuple[Unit, list[Part | None]]]:
    """What becomes of each unit, in the order of the units."""
    if workers == 1:
        for unit, wanted in tasks:
            yield unit, tokenize(unit, wanted)
        return
    # Not forked: the caller may have threads, jax's among them.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (tokenize,))
    ahead: deque[tuple[Unit, Future[list[Part | None]]]] = deque()
    try:
        for unit, wanted in tasks:
            with _no_interrupts():
                ahead.append((unit, pool.submit(_work, unit, wanted)))
            if len(ahead) > 4 * workers:
                done, future = ahead.popleft()
                yield done, future.result()
        for done, future in ahead:
            yield done, future.result()
    except BrokenProcessPool as error:
        raise UserError("a worker process was ended from outside, for lack of memory perhaps: use fewer") from error
    finally:
        pool.shutdown(cancel_futures=True)
