"""The directory of a corpus, on a disk or in a bucket: reading and writing its files, and its lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zero.base.errors import UserError, file_error, reason
from zero.files import storage
from zero.files.sole_writer import sole_writer


def read(path: str) -> bytes:
    try:
        return storage.read_bytes(path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; expected a corpus made by zero-prepare, or its index file") from error
    except OSError as error:
        raise file_error(f"{path} cannot be read: {reason(error)}", error) from error


def write(path: str, data: bytes) -> None:
    try:
        storage.write(path, data)
    except OSError as error:
        raise file_error(f"{path} cannot be written: {reason(error)}", error) from error


def file_names(directory: str) -> set[str]:
    """The files of a corpus, including temporary files of a process that was killed."""
    return {os.path.basename(path) for path in storage.list_files(directory)}


@contextmanager
def locked(directory: str, announce: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Waits while another process prepares the same corpus, and announces which: several hosts may start at once."""
    if storage.is_remote(directory):
        yield  # there the same call writes the same bytes, in whole objects
        return
    entered = ExitStack()
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):  # else nothing can be written, only compared
            entered.enter_context(sole_writer(Path(directory) / ".lock", directory, announce))
    except OSError as error:
        raise file_error(
            f"{directory} cannot be made: {reason(error)}; --directory names another place", error
        ) from error
    with entered:
        yield
