"""Compilation that a stop request interrupts, and whether programs came from jax's persistent cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import jax

CACHE_HIT = "/jax/compilation_cache/cache_hits"  # a program was taken from jax's persistent cache


def compile_unless_stopped(stop: list[int], program: Any, *arguments: Any) -> Callable[..., Any] | None:
    """A pmapped program compiled for these arguments, or None if a stop request comes first.

    `stop` is the list of `signals.stop_requests`. For one process; jax cannot lower a pmapped program with several.
    """
    done: Future[Callable[..., Any]] = Future()

    def work() -> None:
        try:
            done.set_result(program.lower(*arguments).compile())
        except BaseException as error:  # noqa: BLE001  raised again below, in the calling thread
            done.set_exception(error)

    threading.Thread(target=work, name="compile", daemon=True).start()
    while not stop:
        if wait([done], timeout=0.1).done:
            return done.result()
    return None


@contextmanager
def recorded_events() -> Iterator[list[str]]:
    """The names of jax's monitoring events so far, such as `CACHE_HIT`."""
    events: list[str] = []

    def listen(event: str, **_: Any) -> None:
        events.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(listen)
