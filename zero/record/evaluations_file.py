"""evaluations.jsonl: one JSON object per checkpoint that `evaluate.follow` has scored, beside the metrics of the run.

It lies where every machine sees it: beside the checkpoints if these are outside the run directory, else in it. Each
line replaces the whole file, because nothing can be appended in a bucket; on a disk one process does so at a time.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zero.files import storage
from zero.files.json_lines import read_lines
from zero.files.sole_writer import sole_writer
from zero.record.run_files import saved_checkpoint_directory, shared_file

EVALUATIONS_FILE = "evaluations.jsonl"
PREFIX = "evaluation/"  # of its metrics
_log = logging.getLogger(__name__)


def read_lines_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run in the order of writing; damaged ones are passed over with a warning.

    Under "scored" each has what it is of: the weights, and all else that scores depend on.
    """
    path = _path(run)
    if not storage.exists(path):
        return []
    return read_lines(storage.read_bytes(path), path)


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """The metrics of the evaluation that was recorded last, a line for each step, by increasing step.

    Lines of other keys, validation sets or tasks are of another evaluation. Of two lines for one step, of which the run
    trained other weights, the later counts.
    """
    lines = read_lines_of(run)
    latest = [line for line in lines if identity_of(line) == identity_of(lines[-1])]
    by_step = {line["step"]: {key: value for key, value in line.items() if key != "scored"} for line in latest}
    return [by_step[step] for step in sorted(by_step)]


def identity_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Everything except the weights that the scores of a line depend on."""
    return {key: value for key, value in line.get("scored", {}).items() if key != "weights"}


def append_evaluation(run: Path, line: dict[str, Any]) -> None:
    """Adds a line; a number that is not finite becomes null. A full disk costs the line, and ends no evaluation."""
    path = _path(run)
    finite = {key: value if key == "scored" or math.isfinite(value) else None for key, value in line.items()}
    try:
        with _only_writer(path):
            storage.remove_unfinished(storage.parent(path), EVALUATIONS_FILE)  # of a follower that was killed here
            before = storage.read_bytes(path) if storage.exists(path) else b""
            if before and not before.endswith(b"\n"):
                before += b"\n"
            storage.write(path, before + json.dumps(finite, allow_nan=False).encode() + b"\n")
    except OSError as error:
        _log.warning("%s; the evaluation of step %d is not recorded, so the next start repeats it", error, line["step"])


@contextmanager
def _only_writer(path: str) -> Iterator[None]:
    """Waits while another follower of this run adds a line. A bucket has no locks."""
    if storage.is_remote(path):
        yield
        return
    with sole_writer(Path(path).with_name(f".{EVALUATIONS_FILE}.lock"), path, _log.info):
        yield


def _path(run: Path) -> str:
    return shared_file(run, saved_checkpoint_directory(run), EVALUATIONS_FILE)
