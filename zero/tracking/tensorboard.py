"""Metrics as TensorBoard's event files (tensorboardX, of the extra tensorboard)."""

import math
import socket
import struct
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero.base.errors import UserError, install_command
from zero.files.appending import HoldingLog
from zero.record.metrics_file import Log, TextLog
from zero.tracking.dashboard import shown

TENSORBOARD_DIRECTORY = "tensorboard"


@contextmanager
def tensorboard_events(run_directory: Path, resumed_from: int | None) -> Iterator[tuple[Log, TextLog]]:
    """Writes to `run_directory/tensorboard`; `tensorboard --logdir runs` compares runs.

    TensorBoard drops metrics logged earlier after step `resumed_from`. Raises UserError without tensorboardX, of which
    only the records are used: its writer's thread ends on a full disk, and the run would wait for it forever.
    """
    try:
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import scalar, text
    except ModuleNotFoundError as error:
        remedy = install_command("tensorboard")
        raise UserError(f"data.tensorboard=true: tensorboardX is missing; {remedy}") from error
    directory = run_directory / TENSORBOARD_DIRECTORY
    directory.mkdir(exist_ok=True)
    name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
    first = (resumed_from or 0) + 1
    with HoldingLog(directory / name, "a line of TensorBoard's metrics") as records:
        for event in (
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START)),
        ):
            records.append(_record(event.SerializeToString()))

        def log_text(step: int, written: str) -> None:
            event = Event(wall_time=time.time(), step=step, summary=text("samples", as_code(written)))
            records.append(_record(event.SerializeToString()))

        def log(metrics: dict[str, float]) -> None:
            summary = Summary()
            for key, value in shown(metrics).items():
                if key != "step" and math.isfinite(value):  # TensorBoard draws no other point
                    summary.MergeFrom(scalar(key, value))
            event = Event(wall_time=time.time(), step=int(metrics["step"]), summary=summary)
            records.append(_record(event.SerializeToString()))

        yield log, log_text


def as_code(text: str) -> str:
    """A text in Markdown, which TensorBoard shows, as it was written.

    >>> as_code("def f():\\n  pass")
    '    def f():\\n      pass'
    """
    return textwrap.indent(text, "    ", lambda line: True)


def _record(data: bytes) -> bytes:
    """An entry of a TFRecord file: the length and the data, each with its masked CRC-32C."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))))
