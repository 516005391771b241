"""Worker processes that tokenize units; the results come back in the order of the units."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from zero.runtime.errors import Unavailable
from zero.runtime.hosts.signals import end_with_parent
from zero.runtime.preparing.sources.documents import Unit
from zero.runtime.preparing.tokenize_documents import SplitTokens, UnitTokenizer


def map_in_order(
    tasks: Iterable[tuple[Unit, tuple[bool, ...]]], tokenize: UnitTokenizer, workers: int
) -> Iterator[tuple[Unit, list[SplitTokens | None]]]:
    """Each unit and its tokens, in the order of the units."""
    if workers == 1:
        for unit, wanted in tasks:
            yield unit, tokenize(unit, wanted)
        return
    # Not forked: the caller may have threads, jax's among them.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (tokenize,))
    ahead: deque[tuple[Unit, Future[list[SplitTokens | None]]]] = deque()
    try:
        for unit, wanted in tasks:
            with _delayed_interrupts():
                ahead.append((unit, pool.submit(_work, unit, wanted)))
            if len(ahead) > 4 * workers:
                done, future = ahead.popleft()
                yield done, future.result()
        for done, future in ahead:
            yield done, future.result()
    except BrokenProcessPool as error:
        raise Unavailable("a worker process was killed, memory ran out most likely; try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


_tokenize_in_worker: UnitTokenizer


def _start_worker(tokenize: UnitTokenizer) -> None:
    global _tokenize_in_worker
    _tokenize_in_worker = tokenize
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    end_with_parent()


def _work(unit: Unit, wanted: tuple[bool, ...]) -> list[SplitTokens | None]:
    return _tokenize_in_worker(unit, wanted)


@contextmanager
def _delayed_interrupts() -> Iterator[None]:
    """Delays Ctrl-C: a pool that is interrupted while it starts a process miscounts them and never ends.

    Processes that are started inside inherit the blocked signal; their parent handles it.
    """
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # where Python handles signals
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append(number)) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
    if received and callable(handler):
        handler(signal.SIGINT, None)
