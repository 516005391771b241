"""Metrics as TensorBoard's event files (tensorboardX, of the extra tensorboard)."""

import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zero.runtime.errors import UserError, install_command

TENSORBOARD_DIRECTORY = "tensorboard"


class TensorBoard:
    """Writes to `run_directory/tensorboard`; a context manager. `tensorboard --logdir runs` compares runs.

    Args:
        run_directory: the run's own.
        resumed_from: the step that this process continues from; TensorBoard then drops what was logged after it.

    Raises:
        UserError: tensorboardX is not installed.
    """

    def __init__(self, run_directory: Path, resumed_from: int | None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            remedy = install_command("tensorboard")
            raise UserError(f"data.tensorboard=true: tensorboardX is missing; {remedy}") from error
        self._directory, self._resumed_from, self._make = (
            run_directory / TENSORBOARD_DIRECTORY,
            resumed_from,
            SummaryWriter,
        )

    def __enter__(self) -> Self:
        self._writer: Any = self._make(str(self._directory), purge_step=(self._resumed_from or 0) + 1)
        return self

    def log(self, metrics: dict[str, float | int]) -> None:
        """One scalar per metric. TensorBoard draws no point that is not finite."""
        for name, value in metrics.items():
            if name != "step" and math.isfinite(value):
                self._writer.add_scalar(name, value, metrics["step"])
        self._writer.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()
