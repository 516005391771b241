"""A message of a process that dies: the TPU compiler runs in the process that asks for a plan."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

# The shell reads a line that this process writes in the end. A process that died has closed the pipe without one.
_WATCH = 'read -r answer || printf "%s\\n" "$1" >&2'


@contextmanager
def printed_if_this_process_dies(message: str) -> Iterator[None]:
    """Prints a message to standard error if this process crashes or is killed inside, where Python cannot."""
    command = ["/bin/sh", "-c", _WATCH, "sh", message]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        watcher.communicate(b"alive\n")
