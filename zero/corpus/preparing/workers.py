"""Worker processes that tokenize units; the results come back in the order of the units."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from zero.base.child_process import end_with_parent
from zero.base.errors import Unavailable
from zero.corpus.preparing.documents import Unit

_Result = TypeVar("_Result")


def map_in_order(
    units: Iterable[Unit], work: Callable[[Unit], _Result], workers: int
) -> Iterator[tuple[Unit, _Result]]:
    """Each unit and its result, such as its tokens, in the order of the units; `work` can be pickled."""
    if workers == 1:
        for unit in units:
            yield unit, work(unit)
        return
    # Not forked: the caller may have threads, jax's among them.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (work,))
    ahead: deque[tuple[Unit, Future[_Result]]] = deque()
    try:
        for unit in units:
            with delayed_interrupts():
                ahead.append((unit, pool.submit(_work, unit)))
            if len(ahead) > 4 * workers:
                done, future = ahead.popleft()
                yield done, future.result()
        for done, future in ahead:
            yield done, future.result()
    except BrokenProcessPool as error:
        raise Unavailable("a worker process was killed, probably out of memory; try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


_work_here: Callable[[Unit], Any]


def _start_worker(work: Callable[[Unit], Any]) -> None:
    global _work_here
    _work_here = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    end_with_parent()


def _work(unit: Unit) -> Any:
    return _work_here(unit)


@contextmanager
def delayed_interrupts() -> Iterator[None]:
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
