"""A run as its directory holds it, read for a page."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zero.base.errors import UserError
from zero.config.saved_config import flat_config
from zero.record.evaluations_file import read_evaluations
from zero.record.history import History, read_history
from zero.record.run_files import (
    LAYOUT_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    checkpoint_directory,
    saved_config,
    saved_steps,
)

MOST_SAMPLES = 100  # on a page
Line = Mapping[str, Any]


class Samples(NamedTuple):
    """Texts that a model has written."""

    total: int
    newest: Sequence[tuple[int, str]]  # the step and the text, at most `MOST_SAMPLES`


@dataclass(frozen=True)
class RunRecord:
    """A run directory with at least one line of metrics.

    Attributes:
      config: the value of each key as the command line takes it.
      history: of metrics.
      evaluations: of `evaluate.follow`, by increasing step.
      layout: the split of each leaf with the memory it takes; empty if it is missing.
      samples: the step and the text of the newest samples, and the number of all.
      checkpoints: their location.
      saved_steps: the steps of the checkpoints on disk; None for those in a bucket, which are not looked for.
    """

    directory: Path
    name: str
    config: Mapping[str, str]
    history: History
    evaluations: Sequence[Line]
    layout: str
    samples: Samples
    checkpoints: Path | str
    saved_steps: Sequence[int] | None

    @property
    def last(self) -> Line:
        """The newest line of metrics."""
        return self.history.last

    @property
    def total_steps(self) -> int:
        """The last step of its schedule."""
        return int(self.config["training.total_steps"])

    @property
    def is_finished(self) -> bool:
        """Whether it has made the last step of its schedule, or of its data."""
        return self.ends_with_data or self.last["step"] >= self.total_steps

    @property
    def ends_with_data(self) -> bool:
        """Whether `training.max_epochs` has ended it before the last step of its schedule."""
        return "end_of_data" in self.last

    @property
    def parameters(self) -> int | None:
        """Of the model; None without a layout."""
        match = re.match(r"([\d,]+) elements", self.layout)
        if not match:
            return None
        return int(match[1].replace(",", ""))

    def values(self, metric: str) -> list[tuple[int, float]]:
        """The points of the curve of a metric that are finite."""
        return [(step, value) for step, value in self.history.curves.get(metric, ()) if value is not None]

    def best(self, metric: str) -> tuple[int, float] | None:
        """The step and the lowest value of a metric."""
        return min(self.values(metric), key=lambda point: point[1], default=None)


def read_run(directory: Path) -> RunRecord:
    """The record of a run directory.

    Raises:
      UserError: it is not a run directory, or no step has been logged.
    """
    config = saved_config(directory)
    metrics = directory / METRICS_FILE
    if not metrics.is_file():
        raise UserError(f"{directory}: {METRICS_FILE} is missing; expected a run that has taken a step")
    history = read_history(metrics)
    if not history.count:
        raise UserError(f"{metrics}: has no metrics; expected a run that has taken a step")
    layout = directory / LAYOUT_FILE
    samples = directory / SAMPLES_FILE
    place = checkpoint_directory(directory, config.data.bucket_path, config.data.checkpoint_directory)
    return RunRecord(
        directory=directory,
        name="/".join(directory.absolute().parts[-2:]),
        config=flat_config(config),
        history=history,
        evaluations=read_evaluations(directory),
        layout=layout.read_text(encoding="utf-8") if layout.is_file() else "",
        samples=read_samples(samples) if samples.is_file() else Samples(0, []),
        checkpoints=place,
        saved_steps=saved_steps(directory) if isinstance(place, Path) else None,
    )


def read_samples(path: Path) -> Samples:
    """The newest samples of a samples.txt, which is read line by line.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / SAMPLES_FILE
    >>> _ = path.write_text("--- step 5\\nto be\\n--- step 10\\nor\\nnot\\n")
    >>> read_samples(path)
    Samples(total=2, newest=[(5, 'to be\\n'), (10, 'or\\nnot\\n')])
    """
    count = 0
    newest: deque[tuple[int, list[str]]] = deque(maxlen=MOST_SAMPLES)
    with path.open(encoding="utf-8") as file:
        for line in file:
            if match := re.fullmatch(r"--- step (\d+)\n", line):
                count += 1
                newest.append((int(match[1]), []))
            elif newest:
                newest[-1][1].append(line)
    return Samples(count, [(step, "".join(lines)) for step, lines in newest])
