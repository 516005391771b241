"""Sends the metrics of a run to metrics.jsonl, and to W&B and TensorBoard if they are configured."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from zero.record.metrics_file import Log, metrics_file
from zero.tracking.tensorboard import tensorboard_events
from zero.tracking.weights_and_biases import weights_and_biases


@contextmanager
def open_tracker(
    run_directory: Path,
    *,
    project: str | None,
    config: dict[str, Any],
    resumed_from: int | None,
    tensorboard: bool = False,
) -> Iterator[Log]:
    """Sends `step` and its metrics to every destination.

    All files are in `run_directory`. `project` and `config` are W&B's, which None or "" leaves out. `resumed_from` is
    the step of the checkpoint that this process continues, None for a fresh start.

    Raises:
      UserError: W&B could not start, or TensorBoard's writer is not installed.
      ValueError: a step is not above the one before (of two lines for one step only the later would count).

    >>> import tempfile
    >>> from zero.record.run_files import METRICS_FILE
    >>> from zero.record.metrics_file import read_metrics
    >>> directory = Path(tempfile.mkdtemp())
    >>> with open_tracker(directory, project=None, config={}, resumed_from=None) as tracker:
    ...     tracker({"step": 1, "train/loss": 5.5})
    >>> read_metrics(directory / METRICS_FILE)
    [{'step': 1, 'train/loss': 5.5}]
    """
    # metrics.jsonl last: if another cannot start, it does not record a resume that never happened.
    destinations = [
        *([weights_and_biases(run_directory, project, config)] if project else []),
        *([tensorboard_events(run_directory, resumed_from)] if tensorboard else []),
        metrics_file(run_directory, resumed_from),
    ]
    last_step: float = -math.inf
    with ExitStack() as stack:
        logs = [stack.enter_context(destination) for destination in destinations]

        def log(metrics: dict[str, float | int]) -> None:
            nonlocal last_step
            if metrics["step"] <= last_step:
                raise ValueError(f"step {metrics['step']} is logged after step {last_step}")
            last_step = metrics["step"]
            for send in reversed(logs):  # metrics.jsonl first: no failure of another loses its line
                send(metrics)

        yield log
