"""metrics.jsonl: one JSON object per logged step, appended as a run goes, and read back by reports and resumes."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from zero.errors import UserError
from zero.files.parsing import MALFORMED
from zero.run_directory import METRICS_FILE

Log: TypeAlias = Callable[[dict[str, float | int]], None]  # takes the metrics of one step, by increasing `step`

EVALUATED = ("validation/", "harness/", "evaluation/")  # names of metrics of an evaluation begin so


@contextmanager
def metrics_file(run_directory: Path, resumed_from: int | None) -> Iterator[Log]:
    """Appends a run's metrics to `run_directory/metrics.jsonl`; a number that is not finite becomes null.

    A process that continues a run, from the step `resumed_from`, first appends `{"event": "resume", "step": ...}`.
    """
    path = run_directory / METRICS_FILE
    written = path.read_bytes() if path.exists() else b""
    with path.open("ab", buffering=0) as file:  # one write per line: a kill cuts at most the last one

        def append(line: dict[str, Any]) -> None:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

        if written and not written.endswith(b"\n"):
            file.write(b"\n")
        if written or resumed_from is not None:
            append({"event": "resume", "step": resumed_from or 0})
        yield lambda metrics: append({key: x if math.isfinite(x) else None for key, x in metrics.items()})


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


def line_of(run_directory: Path, step: int) -> dict[str, Any] | None:
    """The line of a step in the metrics of a run, if there is one; raises as `read_metrics`."""
    path = run_directory / METRICS_FILE
    lines = read_metrics(path) if path.exists() else []
    return next((line for line in lines if line["step"] == step), None)


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
    """A line, or None if it is not complete, or not one that `metrics_file` writes."""
    try:
        line = json.loads(text)
        numbers = [value for key, value in line.items() if key != "event" and value is not None]
        is_complete = isinstance(line["step"], int) and all(map(math.isfinite, numbers))
    except MALFORMED:
        return None
    return line if is_complete else None
