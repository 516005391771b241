"""Files on local disks and in Google Cloud Storage through one set of functions: local paths and gs://bucket/name.

All of them raise FileNotFoundError for a file that does not exist, and UserError, which names the URL, where a bucket
denies access or does not answer. Nothing of Google's libraries is imported before a gs:// URL is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, TypeVar

from zero.runtime.errors import Unavailable
from zero.runtime.storage import gcs, local
from zero.runtime.storage.backend import AccessDenied, Backend, ChecksumMismatch, FileStat, NoSuchBucket
from zero.runtime.storage.gcs import DEADLINE, is_outage
from zero.runtime.storage.urls import bucket, is_remote, join, parent

__all__ = [
    "DEADLINE",
    "AccessDenied",
    "ChecksumMismatch",
    "FileStat",
    "NoSuchBucket",
    "bucket",
    "exists",
    "is_outage",
    "is_remote",
    "join",
    "list_files",
    "move",
    "open_reader",
    "parent",
    "read",
    "read_bytes",
    "remove",
    "stat",
    "write",
]

CHECKSUM_ATTEMPTS = 5  # at reading a file whose bytes do not match its checksum
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


def _backend(url: str | Path) -> Backend:
    if is_remote(url):
        return gcs
    return local


def stat(url: str | Path) -> FileStat:
    """Size, generation and checksum of a file."""
    return _backend(url).stat(url)


def exists(url: str | Path) -> bool:
    """Whether this file exists."""
    try:
        stat(url)
    except FileNotFoundError:
        return False
    return True


def list_files(directory: str | Path) -> list[str]:
    """All files below a directory, sorted; an empty list if the directory does not exist."""
    return _backend(join(directory, "any")).list_files(directory)


def move(directory: str | Path, target: str | Path) -> None:
    """Renames a directory. In a bucket the server copies every object before the first one is deleted."""
    _backend(directory).move(directory, target)


def open_reader(url: str | Path) -> AbstractContextManager[BinaryIO]:
    """A stream to read from front to back; it can seek forward. An object of a bucket is compared with its checksum.

    Raises ChecksumMismatch, at the latest on leaving the `with` block.
    """
    return _backend(url).open_reader(url)


def read(
    url: str | Path,
    parse: Callable[[BinaryIO], _Result],
    opener: Callable[[str], AbstractContextManager[BinaryIO]] | None = None,
) -> _Result:
    """The result of `parse` on a file's stream; `parse` is called again if the bytes did not match their checksum.

    `opener` replaces `open_reader`, as zero.runtime.data.cache does.
    """
    for attempt in range(CHECKSUM_ATTEMPTS):
        try:
            with (opener or open_reader)(str(url)) as stream:
                return parse(stream)
        except ChecksumMismatch as error:
            message = str(error.args[0])  # readers of a stream, as webdataset, may append their own arguments
            _log.warning("%s; attempt %d of %d", message, attempt + 1, CHECKSUM_ATTEMPTS)
    raise Unavailable(f"{message}, {CHECKSUM_ATTEMPTS} times in a row")


def read_bytes(url: str | Path) -> bytes:
    """The contents of a file."""
    return read(url, lambda stream: stream.read())


def write(url: str | Path, data: bytes | BinaryIO) -> None:
    """Creates or replaces a file atomically: readers see all of the new contents or none of them."""
    _backend(url).write(url, data)


def remove(url: str | Path) -> None:
    """Deletes a file, if it exists."""
    _backend(url).remove(url)
