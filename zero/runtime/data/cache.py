"""Objects of a bucket kept on this machine, up to a number of bytes. Any number of processes may share one directory.

A file here is named after the object's address and generation, and only ever a whole one has such a name: it is written
aside, under a lock that ends with its process, and renamed once its checksum is right.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from zero.runtime import storage
from zero.runtime.errors import UserError

_PART, _LOCK = ".part-", ".lock"


@dataclass(frozen=True)
class Cache:
    """A directory that holds at most `limit` bytes, unfinished files included; what was used longest ago goes first."""

    directory: Path
    limit: int

    @contextmanager
    def reading(self, url: str) -> Iterator[BinaryIO]:
        """As `storage.reading`: from here, or else from the bucket, and kept on the way if it fits."""
        if not storage.is_remote(url):
            with storage.reading(url) as stream:
                yield stream
            return
        known = storage.stat(url)
        kept = self.directory / hashlib.sha256(f"{url}#{known.generation}".encode()).hexdigest()
        try:
            file = kept.open("rb")
        except FileNotFoundError:
            with self._part(known.size) as part:
                with storage.reading(url, part, known) as stream:
                    yield stream
                if part is not None and part.tell() == known.size:
                    part.flush()
                    os.fsync(part.fileno())
                    os.replace(part.name, kept)
        else:
            with file:
                os.utime(file.fileno())
                yield file

    @contextmanager
    def _part(self, size: int) -> Iterator[BinaryIO | None]:
        """A file of that size to write to, gone afterwards unless it was renamed; None where it does not fit."""
        with self._locked():
            part = self._make_room(size) and self._new_part(size)
        try:
            yield part or None
        finally:
            if part:
                part.close()
                Path(part.name).unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = self.directory.joinpath(_LOCK).open("wb")
        except OSError as error:
            raise UserError(f"data.cache_directory={self.directory}: {error}") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, size: int) -> bool:
        """Removes what nobody writes any more, then what was used longest ago; whether there is room then."""
        files = []
        for path in self.directory.iterdir():
            if path.name.startswith(_PART) and _is_abandoned(path):
                path.unlink(missing_ok=True)
            elif path.name != _LOCK:
                try:
                    files.append((path.stat(), path))
                except FileNotFoundError:  # a part that has just been renamed or dropped
                    continue
        room = self.limit - size - sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
            if room >= 0:
                break
            if not path.name.startswith(_PART):
                path.unlink(missing_ok=True)
                room += status.st_size
        return 0 < size and room >= 0

    def _new_part(self, size: int) -> BinaryIO:
        part = self.directory.joinpath(f"{_PART}{secrets.token_hex(8)}").open("xb")
        try:
            fcntl.flock(part, fcntl.LOCK_EX)
            os.posix_fallocate(part.fileno(), 0, size)  # so that its size counts from now on
        except OSError as error:
            Path(part.name).unlink()
            part.close()
            raise UserError(f"data.cache_directory={self.directory}: {error}") from error
        return part


def _is_abandoned(part: Path) -> bool:
    try:
        with open(part, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True
