"""Files on local disks and in Google Cloud Storage through one set of functions: local paths and gs://bucket/name.

All of them raise FileNotFoundError for a file that does not exist, and UserError, which names the URL, where a bucket
denies access or does not answer. Nothing of Google's libraries is imported before a gs:// URL is used.
"""

from __future__ import annotations

import io
import os
import secrets
from pathlib import Path
from typing import BinaryIO

from zero.runtime.storage import gcs
from zero.runtime.storage.urls import is_remote, join, parent


def exists(url: str | Path) -> bool:
    """Whether this file exists."""
    try:
        gcs.stat(url) if is_remote(url) else os.stat(url)
    except FileNotFoundError:
        return False
    return True


def list_files(directory: str | Path) -> list[str]:
    """All files below a directory, sorted; an empty list if the directory does not exist."""
    if is_remote(join(directory, "any")):
        return gcs.list_files(directory)
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names)


def move(directory: str | Path, target: str | Path) -> None:
    """Renames a directory. In a bucket the server copies every object before the first one is deleted."""
    if is_remote(directory):
        gcs.move(directory, target)
        return
    os.rename(directory, target)
    opened = os.open(parent(target), os.O_RDONLY)
    try:
        os.fsync(opened)  # so that the new name survives a power failure
    finally:
        os.close(opened)


def open_reader(url: str | Path) -> BinaryIO:
    """A file to read from. An object of a bucket is read into memory first, and its checksum is compared."""
    return io.BytesIO(gcs.read(url)) if is_remote(url) else open(url, "rb")


def read_bytes(url: str | Path) -> bytes:
    """The contents of a file."""
    with open_reader(url) as file:
        return file.read()


def write(url: str | Path, data: bytes) -> None:
    """Creates or replaces a file atomically: readers see all of the new contents or none of them."""
    if is_remote(url):
        gcs.write(url, data)
        return
    path = Path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove(url: str | Path) -> None:
    """Deletes a file, if it exists."""
    if is_remote(url):
        gcs.remove(url)
    else:
        Path(url).unlink(missing_ok=True)
