"""The progress of a run in a terminal: one live line at the bottom, log lines above it (rich).

Without a terminal, a log line from time to time replaces it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zero.hosts.signals import IgnoreBrokenPipe
from zero.tracking.goodput import Goodput

log = logging.getLogger(__name__)

T = TypeVar("T")
GIB = 2**30
FIGURES = {  # metrics that people follow: unit and format; those that come first stay on the screen the longest
    "train/loss": (1, "loss {:.3f}"),
    "tokens_per_second": (1, "{:,.0f} tokens/s"),
    "mfu": (1, "MFU {:.1%}"),
    "validation/loss": (1, "validation {:.3f}"),
    "predicted_speed": (1, "{:.0%} of the predicted speed"),
    "peak_memory": (GIB, "peak {:.2f} GiB"),
}
ACTIVITIES = {"evaluation": "evaluating", "checkpoint": "saving"}  # phases of the clock that are shown
NARROWEST_BAR, WIDEST_BAR = 8, 40  # columns
REFRESHES = 2  # per second
PLAIN_SECONDS = 60  # between two lines of the log


def figures(line: Mapping[str, Any]) -> list[str]:
    """The `FIGURES` of a line of metrics as text.

    >>> figures({"step": 3, "mfu": 0.414, "train/loss": 2.5})
    ['loss 2.500', 'MFU 41.4%']
    """
    return [form.format(line[name] / unit) for name, (unit, form) in FIGURES.items() if line.get(name) is not None]


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(59.6), clock(3725), clock(200_000)
    ('1:00', '1:02:05', '2 d 7:33')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Progress:
    """The progress of a run to its last step. While it is open, log lines go above the live line.

    Args:
      step: the last step that is done.
      clock: of the run; an evaluation or a save that takes a second is shown.
      is_shown: False on hosts that show nothing.
    """

    def __init__(self, step: int, last_step: int, clock: Goodput, is_shown: bool = True) -> None:
        self.step = step
        self.last_step = last_step
        self._clock = clock
        self._is_shown = is_shown
        self._newest: dict[str, Any] = {}
        self._first_step = step
        self._began = self._logged_at = time.monotonic()
        self._compiled = 0.0  # seconds since then in which a program was compiled
        self._untimed = 0  # steps that were compiled
        self._program: str | None = None  # that is being compiled
        self._compiling_since = 0.0
        self._live: Live | None = None
        self._stack = ExitStack()

    def open(self) -> None:
        """Begins to show, if there is a terminal."""
        self._began = self._logged_at = time.monotonic()
        self._live = _open_live(self, self._stack) if self._is_shown else None

    def close(self) -> None:
        self._program = None
        self._stack.close()
        self._live = None

    def compiling(self, program: str) -> None:
        """Shows that a program is being compiled until the next step is done; its time does not count for the pace."""
        self._program = program
        self._compiling_since = time.monotonic()
        self._log_plainly(f"compiling {program}", is_due=True)

    def done(self, step: int) -> None:
        """A step is done."""
        if self._program is not None:
            self._program = None
            self._compiled += time.monotonic() - self._compiling_since
            self._untimed += 1
        self.step = step

    def show(self, line: Mapping[str, Any], is_evaluation: bool = False) -> None:
        """The newest line of metrics. An evaluation is a line of the log in any case, others where nothing is live."""
        self._newest |= line
        text = f"step {self.step}/{self.last_step}: " + ", ".join([*figures(line), self.rest()])
        if is_evaluation and self._is_shown:
            self._log(text)
        else:
            self._log_plainly(text, is_due=time.monotonic() - self._logged_at > PLAIN_SECONDS)

    def _log_plainly(self, text: str, is_due: bool) -> None:
        if self._is_shown and self._live is None and is_due:
            self._log(text)

    def _log(self, text: str) -> None:
        log.info("%s", text)
        self._logged_at = time.monotonic()

    def rest(self) -> str:
        """The time that the steps to the last one will take at the pace so far, or all have taken.

        The pace counts evaluations and checkpoints, and leaves compilations out.
        """
        now = time.monotonic()
        if self.step >= self.last_step:
            return f"took {clock(now - self._began)}"
        steps = self.step - self._first_step - self._untimed
        seconds = now - self._began - self._compiled
        if steps == 0:
            return "ETA -"
        return f"ETA {clock(seconds / steps * (self.last_step - self.step))}"

    def _activity(self) -> str | None:
        """What is done instead of steps, and for how long; None for steps."""
        if self._program is not None:
            return f"compiling {self._program}, {clock(time.monotonic() - self._compiling_since)}"
        phase, seconds = self._clock.current
        if phase in ACTIVITIES and seconds >= 1:
            return f"{ACTIVITIES[phase]}, {clock(seconds)}"
        return None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = f"{self.step:,}/{self.last_step:,}"
        room = options.max_width - len(count) - 1  # for the bar and the text after it
        activity = self._activity()
        text = fitting(figures(self._newest), self.rest(), room - NARROWEST_BAR - 1) if activity is None else activity
        yield _row(count, self.step, self.last_step, text, options.max_width)


class Stage:
    """The progress of a stage that does a number of things, such as plans: a live line with a clock and an estimate.

    While it is open, log lines go above the live line. Without a terminal a line of the log comes once a minute.

    Args:
      name: what is done.
      total: how many things there are.
      is_shown: False on hosts that show nothing.

    >>> with Stage("plans", 2, is_shown=False) as plans:
    ...     plans.begin("compiling stage 3")
    ...     plans.advance()
    ...     plans.text()
    'plans: 1/2, 0:00, ETA 0:00, compiling stage 3'
    """

    def __init__(self, name: str, total: int, is_shown: bool = True) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self._is_shown = is_shown
        self._activity: str | None = None
        self._began = self._advanced_at = self._logged_at = time.monotonic()
        self._live: Live | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._began = self._advanced_at = self._logged_at = time.monotonic()
        self._live = _open_live(self, self._stack) if self._is_shown else None
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._live = None

    def begin(self, activity: str) -> None:
        """Shows the current activity; without a terminal, logs it."""
        if activity != self._activity and self._is_shown and self._live is None:
            log.info("%s", activity)
        self._activity = activity

    def advance(self, count: int = 1) -> None:
        """Counts things as done."""
        self.done += count
        self._advanced_at = time.monotonic()
        is_due = self._advanced_at - self._logged_at > PLAIN_SECONDS
        if self._is_shown and self._live is None and is_due:
            log.info("%s", self.text())
            self._logged_at = time.monotonic()

    def counted(self, items: Iterable[T]) -> Iterator[T]:
        """The items; each counts as done when the next one is requested."""
        for item in items:
            yield item
            self.advance()

    def text(self) -> str:
        return f"{self.name}: {self.done:,}/{self.total:,}, {self._times()}"

    def _times(self) -> str:
        """The time so far, an estimate of the rest from the pace of what is done, and the current activity."""
        seconds = time.monotonic() - self._began
        if self.done >= self.total:
            return f"took {clock(seconds)}"
        rest = "-"
        if self.done:  # at its own pace: a program that is being compiled now does not stretch it
            rest = clock((self._advanced_at - self._began) / self.done * (self.total - self.done))
        times = f"{clock(seconds)}, ETA {rest}"
        if self._activity is None:
            return times
        return f"{times}, {self._activity}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _row(f"{self.name} {self.done:,}/{self.total:,}", self.done, self.total, self._times(), options.max_width)


def _open_live(renderable: Any, stack: ExitStack) -> Live | None:
    """Shows it as a live line at the foot of the terminal until the stack is closed; None without a terminal."""
    stream: Any = IgnoreBrokenPipe(sys.stderr)
    console = Console(file=stream, soft_wrap=True, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    # Standard output is for results: if it is a file, it stays one.
    is_terminal = sys.stdout.isatty()
    live = Live(renderable, console=console, refresh_per_second=REFRESHES, redirect_stdout=is_terminal)
    stack.enter_context(live)
    console.show_cursor(True)  # a process that is killed could not show it again
    stack.enter_context(_logged_above())
    return live


def _row(count: str, done: int, total: int, text: str, width: int) -> Table:
    """A count, a bar if it fits, and a text."""
    columns = width - len(count) - len(text) - 2
    cells: list[Any] = [count]
    if columns >= NARROWEST_BAR:
        cells.append(ProgressBar(total, done, width=min(columns, WIDEST_BAR)))
    grid = Table.grid(padding=(0, 1))
    grid.add_row(*cells, Text(text, no_wrap=True, overflow="ellipsis"))
    return grid


def fitting(texts: list[str], last: str, columns: int) -> str:
    """As many of the texts as fit, and always the last one.

    >>> fitting(["loss 2.500", "2,000 tokens/s", "MFU 41.4%"], "ETA 1:05", 40)
    'loss 2.500, 2,000 tokens/s, ETA 1:05'
    >>> fitting(["loss 2.500", "2,000 tokens/s", "MFU 41.4%"], "ETA 1:05", 30)
    'loss 2.500, ETA 1:05'
    """
    for count in range(len(texts), -1, -1):
        line = ", ".join([*texts[:count], last])
        if len(line) <= columns:
            return line
    return last


@contextmanager
def _logged_above() -> Iterator[None]:
    """Log lines that would go to the terminal go to `sys.stderr` as it is now, which prints above the live line."""
    handlers = [
        handler
        for handler in logging.root.handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream.isatty()
    ]
    streams = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, streams, strict=True):
            handler.setStream(stream or sys.stderr)
