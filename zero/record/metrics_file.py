"""metrics.jsonl: one JSON object per logged step, appended as a run goes, and read back by reports and resumes."""

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from zero.files import storage
from zero.files.appending import HoldingLog, append
from zero.files.json_lines import read_lines, split_lines
from zero.record.run_files import METRICS_FILE

Line: TypeAlias = dict[str, float]  # the metrics of a step by name; `step` and counts are integers
Log: TypeAlias = Callable[[Line], None]  # takes the line of one step, by increasing `step`
TextLog: TypeAlias = Callable[[int, str], None]  # takes a text that the model has written, and its step

EVALUATED = ("validation/", "harness/", "evaluation/")  # names of metrics of an evaluation begin so
_log = logging.getLogger(__name__)


@contextmanager
def metrics_file(run_directory: Path, resumed_from: int | None) -> Iterator[Log]:
    """Appends a run's metrics to `run_directory/metrics.jsonl`; a number that is not finite becomes null.

    A process that continues a run, from the step `resumed_from`, first appends `{"event": "resume", "step": ...}`.
    Lines that are damaged are first moved to a file of their own, so that other programs can read the file as well.
    """
    path = run_directory / METRICS_FILE
    written = path.read_bytes() if path.exists() else b""
    with HoldingLog(path, "a line of metrics") as lines:

        def append_line(line: dict[str, Any]) -> None:
            lines.append(json.dumps(line, allow_nan=False).encode() + b"\n")

        if written:
            set_damaged_aside(path)
            if not path.read_bytes().endswith(b"\n"):  # of a process that was killed
                lines.append(b"\n")
        if written or resumed_from is not None:
            append_line({"event": "resume", "step": resumed_from or 0})
        yield lambda metrics: append_line({key: x if math.isfinite(x) else None for key, x in metrics.items()})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that count, by increasing step; a number that was not finite is None.

    Of two lines for one step the later counts. After a resume at step s, lines of steps above s from before do not.
    Damaged lines are passed over with a warning.
    """
    by_step: dict[int, dict[str, Any]] = {}
    last = math.inf  # step that the resumes after a line have kept
    for line in reversed(read_lines(path.read_bytes(), str(path))):
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
    return [line["step"] for line in read_lines(path.read_bytes(), str(path)) if line.get("event") == "resume"]


def set_damaged_aside(path: Path) -> None:
    """Moves the damaged lines of a file to PATH.damaged; if the disk is full they stay, and are passed over."""
    lines = split_lines(path.read_bytes())
    if not lines.damaged:
        return
    aside = path.with_name(f"{path.name}.damaged")
    try:
        append(aside, b"".join(line + b"\n" for line in lines.damaged))
        storage.write(path, b"".join(line + b"\n" for line in lines.whole))
    except OSError as error:
        _log.warning("%s: %d damaged lines could not be moved aside: %s", path, len(lines.damaged), error)
        return
    _log.warning("%s: moved %d damaged lines to %s", path, len(lines.damaged), aside.name)
