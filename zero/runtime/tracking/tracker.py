"""Where the metrics of a run go: metrics.jsonl always, W&B and TensorBoard where they are configured."""

import math
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from zero.runtime.tracking.metrics_file import MetricsFile
from zero.runtime.tracking.tensorboard import TensorBoard
from zero.runtime.tracking.weights_and_biases import WeightsAndBiases


class Destination(Protocol):
    """A context manager that takes metrics, one dictionary per logged step, by increasing `step`."""

    def __enter__(self) -> Self: ...

    def log(self, metrics: dict[str, float | int]) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Tracker:
    """Sends a run's metrics to every destination; a context manager.

    Args:
        run_directory: where all files go, those of W&B and TensorBoard included.
        project: W&B's project; None or "" leaves W&B out.
        tensorboard: whether to write TensorBoard's event files too.
        config: of the run, for W&B.
        resumed_from: the step of the checkpoint that this process continues, None for a fresh start.

    Raises:
        UserError: W&B could not start, or TensorBoard's writer is not installed.

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
        self._wandb = WeightsAndBiases(run_directory, project, config) if project else None
        # W&B first: if it cannot start, metrics.jsonl does not record a resume that never happened.
        optional = [self._wandb, TensorBoard(run_directory, resumed_from) if tensorboard else None]
        destinations = [*optional, MetricsFile(run_directory, resumed_from)]
        self._destinations: list[Destination] = [one for one in destinations if one is not None]
        self._last_step: float = -math.inf
        self._stack = ExitStack()

    @property
    def wandb_run_id(self) -> str | None:
        """W&B's id of the run, for the checkpoints; None without W&B."""
        return None if self._wandb is None else self._wandb.run_id

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for destination in self._destinations:
                stack.enter_context(destination)
            self._stack = stack.pop_all()
        return self

    def log(self, metrics: dict[str, float | int]) -> None:
        """Sends `step` and what else is known of it everywhere.

        Raises:
            ValueError: the step is not above the one before (of two lines for one step only the later would count).
        """
        if metrics["step"] <= self._last_step:
            raise ValueError(f"step {metrics['step']} is logged after step {self._last_step}")
        self._last_step = metrics["step"]
        for destination in self._destinations:
            destination.log(metrics)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
