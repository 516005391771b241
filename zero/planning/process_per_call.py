"""Calls in processes of their own, which end as soon as they have answered."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any


class ProcessPerCall(Executor):
    """Makes each call in a process of its own, which is killed as soon as it has answered.

    So a call may leave threads behind that nobody needs. The processes are forked from one that has imported the
    modules and done nothing else.

    Args:
      processes: the most calls at a time.
      modules: what the calls import.
      initializer: is called first in each process, with `initargs`.
    """

    def __init__(
        self, processes: int, modules: Sequence[str], initializer: Callable[..., None], initargs: tuple[Any, ...]
    ) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(modules))
        self._threads = ThreadPoolExecutor(processes)
        self._first = initializer, initargs
        self._running: set[Any] = set()
        self._killed = threading.Event()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(self._answer, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def kill(self) -> None:
        """Kills the processes of all calls; calls that wait are not made."""
        self._killed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.kill()

    def _answer(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call, or its exception.

        Raises:
          BrokenProcessPool: the process died.
        """
        if self._killed.is_set():
            raise BrokenProcessPool("killed")
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_call, args=(theirs, *self._first, fn, args, kwargs), daemon=True)
        process.start()
        theirs.close()
        self._running.add(process)
        try:
            if self._killed.is_set():
                process.kill()
            result, error = ours.recv()
        except (EOFError, OSError):  # at the beginning of an answer, or within it
            raise BrokenProcessPool("a process died before it had answered") from None
        finally:
            process.kill()
            process.join()
            self._running.discard(process)
            ours.close()
        if error is not None:
            raise error
        return result


def _call(
    connection: Connection,
    initializer: Callable[..., None],
    initargs: tuple[Any, ...],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    initializer(*initargs)
    answer: tuple[Any, Exception | None]
    try:
        answer = fn(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001  raised again by the caller
        answer = None, error
    connection.send(answer)
