"""Signals that stop a run.

Before there is anything to save, a signal interrupts (KeyboardInterrupt). Afterwards it is recorded, and the loop stops
at the next step where all hosts can. A second signal ends the process at once.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

PREEMPTED = 75  # exit status of a run that a signal stopped after a saved checkpoint; EX_TEMPFAIL of sysexits.h
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Requests to stop that may come beside another one, and then count as the same: of a terminal that is closed, and of
# trainLoop.sh, which forwards what it receives.
COMPANIONS = (signal.SIGHUP, signal.SIGUSR1)

NOTICE = "\n{}: saving a checkpoint and stopping; press Ctrl-C again to stop without saving\n"

# Signals answered by an exception, each with the timer that ends the process if the exception was lost.
unanswered: list[tuple[int, threading.Timer]] = []


@contextmanager
def handled(numbers: Iterable[int], handler: Any) -> Iterator[None]:
    """Sets the handler of these signals, and at the end the earlier ones."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Records signals in a list, read by a loop between steps; a second SIGTERM or SIGINT ends the process.

    `COMPANIONS` do not count as a second signal: a machine that shuts down sends SIGHUP as well as SIGTERM.
    """
    received: list[int] = []
    while unanswered:  # its exception was lost; by now there is something to save
        number, timer = unanswered.pop()
        timer.cancel()
        received.append(number)

    def receive(number: int, frame: FrameType | None) -> None:
        if number not in COMPANIONS and set(received) - set(COMPANIONS):
            os._exit(128 + number)  # a handler must not flush streams that it has interrupted
        if not received:  # a step, or its compilation, may take long until the loop answers
            with suppress(OSError):  # nobody reads standard error any more
                os.write(2, NOTICE.format(signal.Signals(number).name).encode())
        received.append(number)

    numbers = [*SIGNALS, *(number for number in COMPANIONS if signal.getsignal(number) != signal.SIG_IGN)]  # by nohup
    with handled(numbers, receive):
        yield received


class IgnoreBrokenPipe:
    """A stream that drops its output once its reader is gone.

    At Ctrl-C, `| tee log` ends before this process; a terminal that is closed makes each write an input/output error.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with _dropped_without_reader():
            self._stream.write(text)

    def flush(self) -> None:
        with _dropped_without_reader():
            self._stream.flush()


@contextmanager
def _dropped_without_reader() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise


def exit_immediately(status: int) -> None:
    """Ends the process without the exit handlers of Python and jax, which wait for threads that compile or write."""
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
