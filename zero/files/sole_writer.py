"""One writer at a time: a lock file names the process that writes, for all others."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zero.base.errors import Unavailable


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def is_open(path: Path, descriptor: int) -> bool:
    """Whether the file or directory of this name is the opened one."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def sole_writer(lock: Path, place: str, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Makes this process the only one in the block of this lock file, which names it and exists as long as the block.

    The lock ends with its process, even if it is killed.

    Args:
      place: what is written, for messages.
      waiting: called with a line if this waits for another process.

    Raises:
      Unavailable: another process is in the block and `waiting` is None; the message names it.
      OSError: the lock file cannot be written or locked.
    """
    while True:
        with open(lock, "a+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                writer = file.read().decode() or "another process"  # which has not written its name yet
                if waiting is None:
                    raise Unavailable(f"{place}: {writer} is writing here; wait until it ends, or end it") from None
                waiting(f"{place}: waiting for {writer}, which is writing here")
                fcntl.flock(file, fcntl.LOCK_EX)
            if not is_open(lock, file.fileno()):
                continue  # another process has just removed it
            file.truncate(0)
            with suppress(OSError):  # a full disk: the lock has no name, and whatever is written names the error
                file.write(this_process().encode())
            try:
                yield
            finally:
                if is_open(lock, file.fileno()):  # else it was removed, and another process may have its own there
                    lock.unlink(missing_ok=True)
            return
