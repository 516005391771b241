"""Sends the metrics of a run to metrics.jsonl, and to W&B and TensorBoard if they are configured."""

import math
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Self

from zero.runtime.tracking.metrics_file import Log, metrics_file
from zero.runtime.tracking.tensorboard import tensorboard_events
from zero.runtime.tracking.weights_and_biases import weights_and_biases


class Tracker:
    """Sends a run's metrics to every destination; a context manager.

    All files are in `run_directory`. `project` and `config` are W&B's, which None or "" leaves out. `resumed_from` is
    the step of the checkpoint that this process continues, None for a fresh start.

    >>> import tempfile
    >>> from zero.runtime.run_directory import METRICS_FILE
    >>> from zero.runtime.tracking.metrics_file import read_metrics
    >>> directory = Path(tempfile.mkdtemp())
    >>> with Tracker(directory, project=None, config={}, resumed_from=None) as tracker:
    ...     tracker.log({"step": 1, "train/loss": 5.5})
    >>> read_metrics(directory / METRICS_FILE)
    [{'step': 1, 'train/loss': 5.5}]
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        project: str | None,
        config: dict[str, Any],
        resumed_from: int | None,
        tensorboard: bool = False,
    ) -> None:
        # metrics.jsonl last: if another cannot start, it does not record a resume that never happened.
        self._destinations: list[AbstractContextManager[Log]] = [
            *([weights_and_biases(run_directory, project, config)] if project else []),
            *([tensorboard_events(run_directory, resumed_from)] if tensorboard else []),
            metrics_file(run_directory, resumed_from),
        ]
        self._last_step: float = -math.inf

    def __enter__(self) -> Self:
        """Raises UserError where W&B could not start, or TensorBoard's writer is not installed."""
        with ExitStack() as stack:
            self._logs = [stack.enter_context(destination) for destination in self._destinations]
            self._stack = stack.pop_all()
        return self

    def log(self, metrics: dict[str, float | int]) -> None:
        """Sends `step` and its metrics to all destinations.

        Raises:
            ValueError: the step is not above the one before (of two lines for one step only the later would count).
        """
        if metrics["step"] <= self._last_step:
            raise ValueError(f"step {metrics['step']} is logged after step {self._last_step}")
        self._last_step = metrics["step"]
        for log in reversed(self._logs):  # metrics.jsonl first: no failure of another loses its line
            log(metrics)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
