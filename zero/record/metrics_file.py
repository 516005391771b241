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
from zero.files.json_lines import lines_from_the_end, parse_line, report_line
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
    has_lines = path.exists() and path.stat().st_size > 0
    with HoldingLog(path, "a line of metrics") as lines:

        def append_line(line: dict[str, Any]) -> None:
            lines.append(json.dumps(line, allow_nan=False).encode() + b"\n")

        if has_lines:
            set_damaged_aside(path)
            if next(lines_from_the_end(path)):  # of a process that was killed
                lines.append(b"\n")
        if has_lines or resumed_from is not None:
            append_line({"event": "resume", "step": resumed_from or 0})
        yield lambda metrics: append_line({key: x if math.isfinite(x) else None for key, x in metrics.items()})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that count, by increasing step; a number that was not finite is None.

    Of two lines for one step the later counts. After a resume at step s, lines of steps above s from before do not.
    Damaged lines are skipped with a warning. `lines_that_count` does not hold all lines in memory at once.
    """
    return list(lines_that_count(path))[::-1]


def lines_that_count(path: Path, resumes: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """The lines that `read_metrics` returns, the newest first; a run may have a million of them.

    Args:
      resumes: receives the step of each resume that is passed, the newest first.
    """
    for _, line in _texts_that_count(path, resumes):
        yield line


def copy_lines(path: Path, step: int, target: Path) -> None:
    """Writes the lines that count up to a step to another file, as the run that wrote them did."""
    texts = [text for text, line in _texts_that_count(path) if line["step"] <= step]
    storage.write_blocks(target, (text + b"\n" for text in reversed(texts)))


def _texts_that_count(path: Path, resumes: list[int] | None = None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    next_step = math.inf  # of the line that counts and comes after, or of the first step after a resume
    is_last = True
    for text in lines_from_the_end(path):
        line = parse_line(text)
        if line is None:
            if text and not is_last:  # another process is writing the last line, or was killed while it did
                report_line(path, text)
        elif line.get("event") == "resume":
            next_step = min(next_step, line["step"] + 1)
            if resumes is not None:
                resumes.append(line["step"])
        elif line["step"] < next_step:
            next_step = line["step"]
            yield text, line
        is_last = False


def line_of(run_directory: Path, step: int) -> dict[str, Any] | None:
    """The line of a step in the metrics of a run, if there is one, of those that `read_metrics` returns.

    The file is read from its end up to the line.
    """
    path = run_directory / METRICS_FILE
    if not path.exists():
        return None
    for line in lines_that_count(path):
        if line["step"] <= step:
            return line if line["step"] == step else None
    return None


def read_resumes(path: Path) -> list[int]:
    """The steps at which a run was resumed, in the order of time."""
    resumes: list[int] = []
    for _ in lines_that_count(path, resumes):
        pass
    return resumes[::-1]


def set_damaged_aside(path: Path) -> None:
    """Moves the damaged lines of a file to PATH.damaged; if the disk is full they stay, and are skipped."""
    with path.open("rb") as file:
        damaged = [text for text in file if text.strip(b"\n") and parse_line(text) is None]
    if not damaged:
        return
    aside = path.with_name(f"{path.name}.damaged")
    try:
        append(aside, b"".join(text.rstrip(b"\n") + b"\n" for text in damaged))
        with path.open("rb") as file:
            storage.write_blocks(path, (text.rstrip(b"\n") + b"\n" for text in file if parse_line(text) is not None))
    except OSError as error:
        _log.warning("%s: %d damaged lines could not be moved aside: %s", path, len(damaged), error)
        return
    _log.warning("%s: moved %d damaged lines to %s", path, len(damaged), aside.name)
