"""A run as its directory holds it, read for a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero.base.errors import UserError
from zero.config.saved_config import flat_config
from zero.record.evaluations_file import read_evaluations
from zero.record.metrics_file import read_metrics, read_resumes
from zero.record.run_files import (
    LAYOUT_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    checkpoint_directory,
    saved_config,
    saved_steps,
)

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """A run directory with at least one line of metrics.

    Attributes:
      config: the value of each key as the command line takes it.
      lines: of metrics, by increasing step.
      evaluations: of `evaluate.follow`, by increasing step.
      resumes: the steps at which it was resumed, in the order of time.
      layout: the split of each leaf with the memory it takes; empty if it is missing.
      samples: the step and the text of each sample.
      checkpoints: their location.
      saved_steps: the steps of the checkpoints on disk; None for those in a bucket, which are not looked for.
    """

    directory: Path
    name: str
    config: Mapping[str, str]
    lines: Sequence[Line]
    evaluations: Sequence[Line]
    resumes: Sequence[int]
    layout: str
    samples: Sequence[tuple[int, str]]
    checkpoints: Path | str
    saved_steps: Sequence[int] | None

    @property
    def last(self) -> Line:
        """The newest line of metrics."""
        return self.lines[-1]

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
        """The step and the value of each line that has the metric and is finite."""
        return [(line["step"], line[metric]) for line in self.lines if line.get(metric) is not None]

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
    lines = read_metrics(metrics)
    if not lines:
        raise UserError(f"{metrics}: has no metrics; expected a run that has taken a step")
    layout = directory / LAYOUT_FILE
    samples = directory / SAMPLES_FILE
    place = checkpoint_directory(directory, config.data.bucket_path, config.data.checkpoint_directory)
    return RunRecord(
        directory=directory,
        name="/".join(directory.absolute().parts[-2:]),
        config=flat_config(config),
        lines=lines,
        evaluations=read_evaluations(directory),
        resumes=read_resumes(metrics),
        layout=layout.read_text(encoding="utf-8") if layout.is_file() else "",
        samples=parse_samples(samples.read_text(encoding="utf-8")) if samples.is_file() else [],
        checkpoints=place,
        saved_steps=saved_steps(directory) if isinstance(place, Path) else None,
    )


def parse_samples(text: str) -> list[tuple[int, str]]:
    r"""The step and the text of each sample in samples.txt.

    >>> parse_samples("--- step 5\nto be\n--- step 10\nor\nnot\n")
    [(5, 'to be\n'), (10, 'or\nnot\n')]
    """
    parts = re.split(r"^--- step (\d+)\n", text, flags=re.MULTILINE)
    return [(int(step), sample) for step, sample in zip(parts[1::2], parts[2::2], strict=True)]
