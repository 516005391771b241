"""Requests that arrive between steps, from a signal or a clock; all hosts agree on them at the same step."""

from __future__ import annotations

from collections.abc import Callable

from zero.hosts import watchdog
from zero.hosts.agreement import AnyHost

STOP = "stop"


class Requests:
    """Requests of any host that have not been answered yet.

    Attributes:
      signals: received so far (`zero.hosts.signals.stop_requests`); a signal on any host stops all hosts.

    Args:
      lag: of the agreement (`AnyHost`).
    """

    def __init__(self, lag: int) -> None:
        self.signals: list[int] = []
        self._any_host = AnyHost(lag)
        self._sources: dict[str, Callable[[], bool]] = {STOP: lambda: bool(self.signals)}
        self._open: set[str] = set()

    def add(self, name: str, is_raised: Callable[[], bool]) -> None:
        """Registers a function that says, on each host, whether the feature of this name should act."""
        self._sources[name] = is_raised

    def agree(self, step: int) -> frozenset[str]:
        """The names that any host has requested, until they are answered. All hosts call it equally often."""
        watchdog.progress()
        raised = self._any_host(step, *(is_raised() for is_raised in self._sources.values()))
        self._open |= {name for name, is_asked in zip(self._sources, raised, strict=True) if is_asked}
        return frozenset(self._open)

    def is_stop(self, step: int) -> bool:
        """Whether all hosts stop; like `agree`, for long actions."""
        return STOP in self.agree(step)

    def answer(self, name: str) -> None:
        """Marks the feature's request as done."""
        self._open.discard(name)
