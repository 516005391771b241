"""Silences orbax and gcsfs, which print every step of a save, and errors that they raise as well."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

# Loggers, and the lowest level of their records that pass.
LEVELS = {"absl": logging.CRITICAL, "gcsfs": logging.CRITICAL, "fsspec": logging.WARNING}


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Drops records below `LEVELS` within; several such blocks may overlap in any order."""
    with ExitStack() as stack:
        for name, level in LEVELS.items():
            logger, at_least = logging.getLogger(name), partial(lambda level, record: record.levelno >= level, level)
            logger.addFilter(at_least)
            stack.callback(logger.removeFilter, at_least)
        yield


class _DrainingEventLoop(asyncio.SelectorEventLoop):
    """Closes only when all its tasks have ended."""

    def close(self) -> None:
        if not self.is_closed() and (pending := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        super().close()


@contextmanager
def draining_event_loops() -> Iterator[None]:
    """New event loops of this thread wait for their tasks when they are closed.

    Orbax closes its loop at the first error of a read, and each of the other reads would then print a traceback.
    """
    reader, new_event_loop = threading.get_ident(), asyncio.new_event_loop

    def of_thread() -> asyncio.AbstractEventLoop:
        return _DrainingEventLoop() if threading.get_ident() == reader else new_event_loop()

    setattr(asyncio, "new_event_loop", of_thread)  # noqa: B010, to mypy a module's function is a constant
    try:
        yield
    finally:
        setattr(asyncio, "new_event_loop", new_event_loop)  # noqa: B010
