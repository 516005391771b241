"""What local.py and gcs.py have in common: the functions of a backend, what they return and what they raise."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from zero.runtime.errors import UserError


class ChecksumMismatch(Exception):
    """The bytes that were read do not match the checksum that was stored with them."""


class AccessDenied(UserError):
    """The credentials of this machine, or anonymous access, do not allow this operation on a bucket."""


class NoSuchBucket(UserError):
    """The bucket does not exist, or no longer."""


class FileStat(NamedTuple):
    """What is known of a file without reading it."""

    size: int  # bytes
    generation: int  # changes whenever the contents may have changed
    crc32c: str | None  # base64, as Google writes it; None for local files


class Backend(Protocol):
    """Implemented by the modules `local` and `gcs`; `zero.runtime.storage` documents the functions."""

    def stat(self, url: str | Path) -> FileStat: ...
    def list_files(self, directory: str | Path) -> list[str]: ...
    def move(self, directory: str | Path, target: str | Path) -> None: ...
    def open_reader(self, url: str | Path) -> AbstractContextManager[BinaryIO]: ...
    def write(self, url: str | Path, data: bytes | BinaryIO) -> None: ...
    def remove(self, url: str | Path) -> None: ...
