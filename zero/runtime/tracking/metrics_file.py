"""metrics.jsonl: one JSON object per logged step, appended as a run goes, and read back by reports and resumes."""

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zero.runtime.errors import UserError
from zero.runtime.parsing import MALFORMED
from zero.runtime.run_directory import METRICS_FILE


class MetricsFile:
    """Appends a run's metrics to `run_directory/metrics.jsonl`; a context manager.

    Args:
        run_directory: the run's own.
        resumed_from: the step of the checkpoint that this process continues, None for a fresh start. Recorded as
            `{"event": "resume", "step": ...}`.
    """

    def __init__(self, run_directory: Path, resumed_from: int | None) -> None:
        self._path, self._resumed_from = run_directory / METRICS_FILE, resumed_from

    def __enter__(self) -> Self:
        written = self._path.read_bytes() if self._path.exists() else b""
        self._file = self._path.open("ab", buffering=0)  # one write per line: a kill cuts at most the last one
        if written and not written.endswith(b"\n"):
            self._file.write(b"\n")
        if written or self._resumed_from is not None:
            self._append({"event": "resume", "step": self._resumed_from or 0})
        return self

    def log(self, metrics: dict[str, float | int]) -> None:
        """Appends one line: `step` and what else is known of it. A number that is not finite becomes null."""
        self._append({key: value if math.isfinite(value) else None for key, value in metrics.items()})

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that count, by increasing step; a number that was not finite is None.

    Of two lines for one step the later counts. After a resume at step s, lines of steps above s from before do not.

    Raises:
        UserError: a line is not a JSON object of numbers, other than the last one of a killed process.
    """
    by_step: dict[int, dict[str, Any]] = {}
    last = math.inf  # step that the resumes after a line have kept
    for line in reversed(_read_lines(path)):
        if line.get("event") == "resume":
            last = min(last, line["step"])
        elif line["step"] <= last:
            by_step.setdefault(line["step"], line)
    return [by_step[step] for step in sorted(by_step)]


def read_resumes(path: Path) -> list[int]:
    """The steps at which a run was resumed, in the order of time."""
    return [line["step"] for line in _read_lines(path) if line.get("event") == "resume"]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete line. A killed process may leave its last one incomplete: at the end, or before a resume."""
    lines: list[dict[str, Any]] = []
    incomplete: int | None = None
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        line = _parse(text)
        if incomplete is not None and not (line and line.get("event") == "resume"):
            raise UserError(f"{path}, line {incomplete}: expected a JSON object of a step and finite numbers or null")
        incomplete = number if line is None else None
        if line is not None:
            lines.append(line)
    return lines


def _parse(text: bytes) -> dict[str, Any] | None:
    """A line, or None if it is not complete, or not one that `MetricsFile` writes."""
    try:
        line = json.loads(text)
        numbers = [value for key, value in line.items() if key != "event" and value is not None]
        is_complete = isinstance(line["step"], int) and all(map(math.isfinite, numbers))
    except MALFORMED:
        return None
    return line if is_complete else None
