"""Files on local disks: the backend of `zero.runtime.storage` for paths."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import BinaryIO

from zero.runtime.storage.backend import FileStat
from zero.runtime.storage.urls import parent

_COPY_BYTES = 8 << 20


def stat(url: str | Path) -> FileStat:
    status = os.stat(url)
    return FileStat(status.st_size, status.st_mtime_ns, None)


def list_files(directory: str | Path) -> list[str]:
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names)


def move(directory: str | Path, target: str | Path) -> None:
    os.rename(directory, target)
    opened = os.open(parent(target), os.O_RDONLY)
    try:
        os.fsync(opened)  # so that the new name survives a power failure
    finally:
        os.close(opened)


def open_reader(url: str | Path) -> BinaryIO:
    return open(url, "rb")


def write(url: str | Path, data: bytes | BinaryIO) -> None:
    path = Path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                data.seek(0)
                shutil.copyfileobj(data, file, _COPY_BYTES)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove(url: str | Path) -> None:
    Path(url).unlink(missing_ok=True)
