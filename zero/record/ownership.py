"""Directories belong to one process: it makes them under a name of their own, locks them, and removes only those.

- `new_directory`: makes the directory of a run that has no name yet. `discarding_unused`: removes one without use.
- `locked`: a run directory. `owned`: the checkpoints, whichever run directory a process was started in.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from zero.base.errors import Unavailable, UserError
from zero.files import storage
from zero.files.parsing import json_object
from zero.files.sole_writer import is_open
from zero.record.run_files import CONFIG_FILE, mirror_path

OWNER_FILE = "owner.json"  # beside the mirrored files of a run
_made_here: set[Path] = set()  # by `new_directory`


class Claim:
    """A directory that this process has locked, which others may rename or remove nevertheless.

    Args:
      remedy: ends the message if another process has the lock.

    Raises:
      UserError: another process has the lock.
    """

    def __init__(self, path: Path, remedy: str) -> None:
        self.path = path
        self._remedy = remedy
        self._descriptor = self._locked()

    def _locked(self) -> int:
        """An open directory of this name, which is made if it does not exist, and is locked."""
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise UserError(f"{self.path}: another process trains here; {self._remedy}") from None
            if is_open(self.path, descriptor):
                return descriptor
            os.close(descriptor)  # another process has just removed it

    def is_removed(self) -> bool:
        """Raises Unavailable, with the new name, if the directory was renamed."""
        if is_open(self.path, self._descriptor):
            return False
        try:
            is_renamed = os.fstat(self._descriptor).st_nlink > 0
        except OSError as error:
            if error.errno != errno.ESTALE:  # of a network disk, on which another machine has removed it
                raise
            is_renamed = False
        if is_renamed:
            link = Path(f"/proc/self/fd/{self._descriptor}")
            name = link.readlink() if link.is_symlink() else "another name"
            raise Unavailable(
                f"{self.path} was renamed to {name} while this process trained there; it ends without saving, and "
                f"earlier checkpoints are intact. Continue with --resume hydra.run.dir={name}; whatever is at the old "
                "name is not complete"
            )
        return True

    def check(self) -> None:
        """Raises Unavailable if the directory was renamed or removed."""
        if self.is_removed():
            raise Unavailable(f"{self.path} was removed while this process trained there")

    def take_again(self) -> None:
        """Makes and locks the directory again, after it was removed.

        Raises:
          UserError: another process has begun there.
        """
        descriptor = self._locked()
        if any(file.name == CONFIG_FILE or file.name.isdecimal() for file in self.path.iterdir()):  # of a run, a step
            os.close(descriptor)
            raise UserError(f"{self.path} was removed while this process trained there, and another one has used it")
        self.close()
        self._descriptor = descriptor

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def locked(directory: Path, remedy: str) -> Iterator[Claim]:
    """Locks a directory, which is made if it does not exist.

    The lock ends with its process, even if it is killed.

    Raises:
      UserError: another process has the lock; `remedy` ends the message.
    """
    with closing(Claim(directory, remedy)) as claim:
        yield claim


def new_directory(path: str) -> str:
    """Makes a directory that no other start has: one of this name, or with -2, -3 and so on. Returns its path."""
    number = 1
    name = path
    while True:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            Path(name).mkdir()
        except FileExistsError:
            number += 1
            name = f"{path}-{number}"
        except FileNotFoundError:
            continue  # another start, which was refused, has just removed the folder
        else:
            _made_here.add(Path(name).absolute())
            return name


def reopen_logs(directory: Path) -> None:
    """Logs in a directory that was removed and made again are written there from their next line on."""
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == directory.absolute():
            handler.close()


@contextmanager
def discarding_unused(run_directory: Path) -> Iterator[None]:
    """A start that ends before it has written or logged anything leaves no run directory, which Hydra has made.

    Neither does it leave the folder around one that `new_directory` has made, if it holds no other.

    Another process may have been started there: each shares a lock on the log, and the last one removes the directory.
    """
    logs = [handler for handler in logging.root.handlers if isinstance(handler, logging.FileHandler)]
    with ExitStack() as stack:
        shared = [stack.enter_context(_shared(log)) for log in logs]
        try:
            yield
        finally:
            with suppress(BlockingIOError):
                for file in shared:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _discard_unused(run_directory)


@contextmanager
def _shared(handler: logging.FileHandler) -> Iterator[BinaryIO]:
    """The file of a log, with a lock that others may share."""
    path = Path(handler.baseFilename)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            if not is_open(path, file.fileno()):
                continue  # another process has just removed it
            if handler.stream is not None and not is_open(path, handler.stream.fileno()):
                handler.close()  # opens the file of this name with its next line
            yield file
            return


def _discard_unused(run_directory: Path) -> None:
    """Removes a directory that holds nothing but logs without a line."""
    files = [*run_directory.iterdir()] if run_directory.is_dir() else []
    if all(file.suffix == ".log" and file.is_file() and file.stat().st_size == 0 for file in files):
        for file in files:
            file.unlink()
        with suppress(OSError):  # it was not here, or is a mount
            run_directory.rmdir()
            if run_directory.absolute() in _made_here:
                run_directory.parent.rmdir()


class Ownership(NamedTuple):
    """A place of checkpoints that this process writes to.

    Attributes:
      check: raises UserError if another process has taken over, or the place was renamed or removed.
      claim: the lock; None in a bucket.
    """

    check: Callable[[], None]
    claim: Claim | None = None


@contextmanager
def owned(checkpoints: Path | str, directory: str) -> Iterator[Ownership]:
    """Makes this process the one that writes checkpoints to `checkpoints`; its run is in `directory`.

    On a disk it locks the place. A bucket has no locks: the process that was started last leaves its name beside the
    checkpoints, and an earlier one, which may hang or have lost its network, finds it before it writes or deletes.

    Raises:
      UserError: another process has locked the place.
    """
    if isinstance(checkpoints, Path):
        with locked(checkpoints, "choose another data.checkpoint_directory") as claim:
            try:
                yield Ownership(claim.check, claim)
            finally:
                with suppress(OSError):  # it holds checkpoints
                    checkpoints.rmdir()
        return
    owner = {"start": secrets.token_hex(8), "host": socket.gethostname(), "directory": directory}
    file = mirror_path(checkpoints, OWNER_FILE)
    storage.write(file, json.dumps(owner).encode())

    def check() -> None:
        try:
            now = json_object(storage.read_bytes(file), file)
        except FileNotFoundError:
            raise Unavailable(
                f"{file} was removed while this process trained; it ends without saving. A start with --resume writes "
                "it again"
            ) from None
        if now != owner:
            raise UserError(
                f"{checkpoints}: another process has since taken over the run, on {now.get('host')} in "
                f"{now.get('directory')}; this process exits without saving, and earlier checkpoints are intact"
            )

    yield Ownership(check)
