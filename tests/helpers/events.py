"""TensorBoard's event files."""

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def without(library: str) -> Iterator[None]:
    """A library that was not imported before cannot be imported within."""
    modules: dict[str, Any] = sys.modules
    if library in modules:
        yield
        return
    modules[library] = None
    try:
        yield
    finally:
        del modules[library]


with without("torch"):  # tensorboardX imports it where it can, and every worker would hold it
    from tensorboardX.proto.event_pb2 import Event


def scalars(run: Path, tag: str) -> dict[int, float]:
    """What TensorBoard would draw of a run: the records of its event file are framed like those of a TFRecord file."""
    (events,) = (run / "tensorboard").glob("events*")
    data, position, values = events.read_bytes(), 0, {}
    while position < len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        event = Event.FromString(data[position + 12 : position + 12 + length])
        for value in event.summary.value:
            if value.tag == tag:
                values[event.step] = value.simple_value
        position += 12 + length + 4
    return values
