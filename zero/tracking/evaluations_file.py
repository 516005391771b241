"""evaluations.jsonl: one JSON object per checkpoint that `evaluate.follow` has scored, beside the metrics of the run.

It lies where every machine sees it: beside the checkpoints if these are outside the run directory, else in it. Only one
process writes it, and replaces it whole, because nothing can be appended in a bucket.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zero.files import storage
from zero.files.parsing import reading
from zero.run_directory import saved_checkpoint_directory, shared_file

EVALUATIONS_FILE = "evaluations.jsonl"
PREFIX = "evaluation/"  # of its metrics


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """The lines of a run, by increasing step.

    Raises:
      UserError: a line is not a JSON object with a step.
    """
    path = _path(run)
    if not storage.exists(path):
        return []
    with reading(f"{path}: expected a JSON object with a step per line"):
        lines = [json.loads(line) for line in storage.read_bytes(path).splitlines()]
        return sorted(lines, key=lambda line: int(line["step"]))


def append_evaluation(run: Path, line: dict[str, Any]) -> None:
    lines = [*read_evaluations(run), line]
    storage.write(_path(run), "".join(json.dumps(one) + "\n" for one in lines).encode())


def _path(run: Path) -> str:
    return shared_file(run, saved_checkpoint_directory(run), EVALUATIONS_FILE)
