"""Signals: what a run does when it is told to stop.

Before there is anything to save, a signal interrupts (KeyboardInterrupt). Once there is, it is noted, and the loop
stops at the next place where all hosts can. A second one ends the process at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

PREEMPTED = 75  # exit status of a run that was told to stop and is saved; EX_TEMPFAIL of sysexits.h
SIGNALS = (signal.SIGTERM, signal.SIGINT)


# Signals that were answered by an exception, each with the timer that ends the process if that was lost.
unanswered: list[tuple[int, threading.Timer]] = []


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collects signals in a list, for a loop to look at between steps; a second SIGTERM or SIGINT ends the process.

    A terminal that goes away sends SIGHUP; a machine that shuts down both that and SIGTERM, and means it once.
    """
    received: list[int] = []
    while unanswered:  # one whose exception was lost: by now there is something to save
        number, timer = unanswered.pop()
        timer.cancel()
        received.append(number)

    def receive(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP and set(received) - {signal.SIGHUP}:
            os._exit(128 + number)  # a handler may not flush what it has interrupted
        received.append(number)

    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup's wish
    numbers = SIGNALS if is_kept else (*SIGNALS, signal.SIGHUP)
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Outliving:
    """A stream that forgets what is written when its reader is gone: `| tee log` ends at a Ctrl-C too, and first."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with suppress(BrokenPipeError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            self._stream.flush()


def end_at_once(status: int) -> None:
    """Leaves without Python's and jax's own ways out: these wait for threads that compile or write."""
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def compiled_unless(stop: list[int], program: Any, *arguments: Any) -> Callable[..., Any] | None:
    """A pmapped program compiled for these arguments, or None where a signal comes first: it does not wait for XLA.

    For one process; jax cannot lower a pmapped program where there are several.
    """
    done: Future[Callable[..., Any]] = Future()

    def work() -> None:
        try:
            done.set_result(program.lower(*arguments).compile())
        except BaseException as error:  # noqa: BLE001  raised below, in the thread that asked
            done.set_exception(error)

    threading.Thread(target=work, name="compile", daemon=True).start()
    while not stop:
        if wait([done], timeout=0.1).done:
            return done.result()
    return None
