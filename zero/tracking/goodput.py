"""Goodput: the share of a run's wall-clock time that goes into its steps, and the shares of the other phases.

Each line of metrics holds `wall_time`, the seconds since the first start over all resumes; `goodput/PHASE`, the shares
of the phases, which sum to 1; and `time`, when it was logged, in seconds since 1970. A resume continues from the line
of its step, so that work after it, which is repeated, and the time until the new start count as restarts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

PHASES = {  # with their names in reports
    "steps": "steps",
    "data_wait": "waiting for data",
    "compilation": "compilation",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation and reports",
    "startup": "startup",
    "restarts": "restarts and repeated work",
}
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
KEYS = ("time", "wall_time", *(f"goodput/{phase}" for phase in PHASES))


class Goodput:
    """A clock that counts the seconds of a run in exactly one phase at a time; it begins in startup.

    Args:
      age: seconds since this start of the run.
      resumed_line: the line of metrics of the step that is resumed, if any.
      now: the time on the clock that the line's time comes from; None: the system's clock.

    >>> clock = Goodput(age=5.0)
    >>> with clock.phase("steps"), clock.phase("evaluation"):  # the inner one counts
    ...     pass
    >>> round(clock.seconds_so_far()["startup"])
    5
    """

    def __init__(
        self, age: float = 0.0, resumed_line: Mapping[str, Any] | None = None, now: float | None = None
    ) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase = "startup"
        self._start = self._since = time.monotonic() - age
        self._epoch = time.time() - time.monotonic()  # a clock that is set meanwhile moves no line
        self._began = self._phase, self._since  # one value, which another thread reads
        if resumed_line is not None:
            for phase in PHASES:
                self._seconds[phase] = resumed_line[f"goodput/{phase}"] * resumed_line["wall_time"]
            lost = (time.time() if now is None else now) - age - resumed_line["time"]
            self._seconds["restarts"] += max(0.0, lost)  # clocks of two machines may differ

    def seconds_so_far(self) -> dict[str, float]:
        """Seconds of each phase, since the first start."""
        self._advance()
        return dict(self._seconds)

    def _advance(self) -> None:
        """Counts the time since the last call for the current phase."""
        now = time.monotonic()
        self._seconds[self._phase] += now - self._since
        self._since = now

    @property
    def age(self) -> float:
        """Seconds since this start of the run."""
        return time.monotonic() - self._start

    @property
    def current(self) -> tuple[str, float]:
        """The phase that counts now, and the seconds since it was entered; also for other threads."""
        phase, began = self._began
        return phase, time.monotonic() - began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts for this phase within, and for the previous one afterwards."""
        outer = self._began
        self._enter(name, time.monotonic())
        try:
            yield
        finally:
            self._enter(*outer)

    def _enter(self, phase: str, began: float) -> None:
        self._advance()
        self._phase = phase
        self._began = phase, began

    def line(self) -> dict[str, float]:
        """`KEYS` of a line of metrics."""
        seconds = self.seconds_so_far()
        total = sum(seconds.values())
        shares = {f"goodput/{phase}": spent / total for phase, spent in seconds.items()}
        return {"time": self._epoch + time.monotonic(), "wall_time": total, **shares}


def counts_as(phase: str) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """A decorator: the time of a function whose first argument has a `goodput` counts for this phase."""

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @wraps(function)
        def counted(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            run: Any = args[0]
            with run.goodput.phase(phase):
                return function(*args, **kwargs)

        return counted

    return decorate


def describe(line: Mapping[str, Any]) -> str:
    """A line of metrics as one line of text: `93.1% of 2:13:05 in steps; compilation 4.0%, startup 2.9%`."""
    if "wall_time" not in line:
        return "the wall clock was not recorded"
    hours, seconds = divmod(round(line["wall_time"]), 3600)
    shares = {phase: line[f"goodput/{phase}"] for phase in PHASES}
    steps = shares.pop("steps")
    rest = sorted(((share, PHASES[phase]) for phase, share in shares.items() if share >= 0.0005), reverse=True)
    others = ", ".join(f"{name} {share:.1%}" for share, name in rest)
    return f"{steps:.1%} of {hours}:{seconds // 60:02}:{seconds % 60:02} in steps" + (f"; {others}" if others else "")
