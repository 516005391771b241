"""Sends the metrics of a run to metrics.jsonl, and to W&B and TensorBoard if they are configured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero.base.keys import Check, key
from zero.record.metrics_file import Log, TextLog, metrics_file
from zero.tracking.tensorboard import tensorboard_events
from zero.tracking.weights_and_biases import weights_and_biases


def project_name() -> Check:
    """What W&B takes."""
    forbidden = "/\\#?%:"
    expected = f"a non-empty string of at most 128 characters, without any of {' '.join(forbidden)}"
    return Check(lambda value: bool(value.strip()) and len(value) <= 128 and not set(value) & set(forbidden), expected)


@dataclass(frozen=True)
class TrackerKeys:
    """Where metrics go besides metrics.jsonl, in section `data`."""

    wandb_project: str | None = key(
        "zero",
        project_name(),
        "Weights & Biases project, offline unless WANDB_API_KEY is set; null: off.",
    )
    tensorboard: bool = key(False, None, "Also write TensorBoard event files; needs the extra tensorboard.")


class Tracker:
    """Where the metrics and texts of a run go. It is called with the metrics of a step."""

    def __init__(self, logs: Sequence[Log], text_logs: Sequence[TextLog]) -> None:
        self._logs = logs
        self._text_logs = text_logs
        self._last_step = -math.inf

    def __call__(self, metrics: dict[str, float]) -> None:
        if metrics["step"] <= self._last_step:
            raise ValueError(f"step {metrics['step']} is logged after step {self._last_step:.0f}")
        self._last_step = metrics["step"]
        for log in self._logs:
            log(metrics)

    def text(self, step: int, text: str) -> None:
        """A text that the model has written."""
        for log_text in self._text_logs:
            log_text(step, text)


@contextmanager
def open_tracker(
    run_directory: Path,
    *,
    project: str | None,
    config: dict[str, Any],
    resumed_from: int | None,
    tensorboard: bool = False,
) -> Iterator[Tracker]:
    """Sends `step` and its metrics to every destination, and texts to those that show them.

    All files are in `run_directory`. `project` and `config` are W&B's, which None or "" leaves out. `resumed_from` is
    the step of the checkpoint that this process continues, None for a fresh start.

    Raises:
      UserError: W&B could not start, or TensorBoard's writer is not installed.
      ValueError: a step does not exceed the previous one (of two lines for one step only the later would count).

    >>> import tempfile
    >>> from zero.record.run_files import METRICS_FILE
    >>> from zero.record.metrics_file import read_metrics
    >>> directory = Path(tempfile.mkdtemp())
    >>> with open_tracker(directory, project=None, config={}, resumed_from=None) as tracker:
    ...     tracker({"step": 1, "train/loss": 5.5})
    >>> read_metrics(directory / METRICS_FILE)
    [{'step': 1, 'train/loss': 5.5}]
    """
    dashboards = []
    if project:
        dashboards.append(weights_and_biases(run_directory, project, config))
    if tensorboard:
        dashboards.append(tensorboard_events(run_directory, resumed_from))
    with ExitStack() as stack:
        shown = [stack.enter_context(dashboard) for dashboard in dashboards]
        # Opened last: if another cannot start, it does not record a resume that never happened.
        file = stack.enter_context(metrics_file(run_directory, resumed_from))
        # Written first: no failure of another loses its line.
        yield Tracker([file, *(log for log, _ in shown)], [log_text for _, log_text in shown])
