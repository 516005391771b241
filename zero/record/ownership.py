"""One process at a time writes to a directory of checkpoints, whichever run directory it was started in."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zero.base.errors import UserError
from zero.files import storage
from zero.record.run_files import mirror_path

OWNER_FILE = "owner.json"  # beside the mirrored files of a run


@contextmanager
def locked(directory: Path, remedy: str) -> Iterator[None]:
    """Locks a directory, which is made if it does not exist.

    The lock ends with its process, even if it is killed.

    Raises:
      UserError: another process has the lock; `remedy` ends the message.
    """
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{directory}: another process trains here; {remedy}") from None
            if not _is_open(directory, descriptor):
                continue  # another process has just removed it
            yield
            return
        finally:
            os.close(descriptor)


def _is_open(directory: Path, descriptor: int) -> bool:
    """Whether the directory of this name is the opened one."""
    try:
        return os.path.samestat(os.stat(directory), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def owned(place: Path | str, directory: str) -> Iterator[Callable[[], None]]:
    """Makes this process the one that writes checkpoints to `place`; its run is in `directory`.

    On a disk it locks the place. A bucket has no locks: the process that was started last leaves its name beside the
    checkpoints, and an earlier one, which may hang or have lost its network, finds it before it writes or deletes.

    Yields:
      A function that raises UserError if another process has taken over.

    Raises:
      UserError: another process has locked the place.
    """
    if isinstance(place, Path):
        with locked(place, "name another data.checkpoint_directory"):
            try:
                yield lambda: None
            finally:
                with suppress(OSError):  # it holds checkpoints
                    place.rmdir()
        return
    owner = {"start": secrets.token_hex(8), "host": socket.gethostname(), "directory": directory}
    file = mirror_path(place, OWNER_FILE)
    storage.write(file, json.dumps(owner).encode())

    def check() -> None:
        now = json.loads(storage.read_bytes(file))
        if now != owner:
            raise UserError(
                f"{place}: another process has taken the run over since, on {now['host']} in {now['directory']}; this "
                "one ends without a save, and checkpoints that were saved before are intact"
            )

    yield check
