"""Metrics as TensorBoard's event files (tensorboardX, of the extra tensorboard)."""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from zero.errors import UserError, install_command
from zero.tracking.metrics_file import Log

TENSORBOARD_DIRECTORY = "tensorboard"


@contextmanager
def tensorboard_events(run_directory: Path, resumed_from: int | None) -> Iterator[Log]:
    """Writes to `run_directory/tensorboard`; `tensorboard --logdir runs` compares runs.

    TensorBoard drops metrics logged earlier after step `resumed_from`. Raises UserError without tensorboardX.
    """
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        remedy = install_command("tensorboard")
        raise UserError(f"data.tensorboard=true: tensorboardX is missing; {remedy}") from error
    directory = str(run_directory / TENSORBOARD_DIRECTORY)
    with closing(SummaryWriter(directory, purge_step=(resumed_from or 0) + 1)) as writer:

        def log(metrics: dict[str, float | int]) -> None:
            for name, value in metrics.items():
                if name != "step" and math.isfinite(value):  # TensorBoard draws no other point
                    writer.add_scalar(name, value, metrics["step"])
            writer.flush()

        yield log
