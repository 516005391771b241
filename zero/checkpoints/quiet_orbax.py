"""Silences orbax and gcsfs, which print every step of a save, and errors that they raise as well."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

# Loggers, and the lowest level of their records that pass.
LEVELS = {"absl": logging.CRITICAL, "gcsfs": logging.CRITICAL, "fsspec": logging.WARNING}
_Result = TypeVar("_Result")


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Drops records below `LEVELS` within; several such blocks may overlap in any order.

    Threads of orbax that outlive the block, as after a failed save, stay quiet until they end.
    """
    with ExitStack() as stack:
        for name, level in LEVELS.items():
            logger = logging.getLogger(name)
            at_least = partial(lambda level, record: record.levelno >= level, level)
            logger.addFilter(at_least)
            stack.callback(logger.removeFilter, at_least)
        stack.callback(_silence_threads_of_orbax)
        yield


def _silence_threads_of_orbax() -> None:
    """Drops what the threads of orbax log that run now, also later."""
    threads = WeakSet(thread for thread in threading.enumerate() if type(thread).__module__.startswith("orbax."))
    if threads:
        logging.getLogger("absl").addFilter(lambda record: threading.current_thread() not in threads)


def run_to_the_end(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a coroutine in an event loop of its own, which closes only when all its tasks have ended.

    The first error is raised; errors of the other tasks, which have the same cause, are dropped.
    """
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # else a traceback for each error that nobody awaits
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(coroutine)
    finally:
        while pending := asyncio.all_tasks(loop):  # tasks that end may leave others that they have started
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()


def drain_loops_of_orbax() -> None:
    """From now on orbax runs its reads and writes by `run_to_the_end`.

    Its own function closes the loop at the first error, and then tensorstore prints a traceback, "Event loop is
    closed", for each array that is still on its way; it does so past all loggers. Other event loops stay as they are.
    """
    from orbax.checkpoint._src import asyncio_utils

    setattr(asyncio_utils, "_run_sync_via_new_loop", run_to_the_end)  # noqa: B010, to mypy a function is a constant
