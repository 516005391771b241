"""Shards of a bucket kept on a local disk, up to a number of bytes. Any number of processes may share one directory.

A file is named after the URL and generation of its object; other files of the directory are never touched. It is
written under a temporary name, with a lock that ends with its process, and renamed once its checksum was right; every
later read compares the checksum again. What goes wrong with the disk is logged, and the shard is read from the bucket.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from zero.runtime import storage
from zero.runtime.errors import UserError
from zero.runtime.storage import gcs
from zero.runtime.storage.checksummed import open_checksummed

_SUFFIX, _PART, _LOCK = ".zero-cache", ".zero-cache.part-", ".zero-cache.lock"
_FINISHED, _UNFINISHED = re.compile(rf"[0-9a-f]{{64}}{_SUFFIX}"), re.compile(rf"{_PART}[0-9a-f]{{16}}")
_log = logging.getLogger(__name__)


class ShardCache:
    """A directory of at most `limit` bytes, unfinished files included; the least recently used files go first.

    Raises:
        UserError: the directory cannot be created.
    """

    def __init__(self, directory: Path, limit: int):
        self.directory, self.limit = directory, limit
        self._warnings: set[str] = set()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"data.cache_directory={directory}: {error}") from error

    @contextmanager
    def open_reader(self, url: str) -> Iterator[BinaryIO]:
        """Like `storage.open_reader`: from this disk, or from the bucket and then kept, if there is room for it."""
        if not storage.is_remote(url):
            with storage.open_reader(url) as stream:
                yield stream
            return
        stat = storage.stat(url)
        name = hashlib.sha256(f"{url}#{stat.generation}".encode()).hexdigest()
        path = self.directory / f"{name}{_SUFFIX}"
        file = self._open(path)
        opened = self._fetch(url, stat, path) if file is None else self._verify(file, path, stat)
        with opened as stream:
            yield stream

    def _open(self, path: Path) -> BinaryIO | None:
        try:
            file = path.open("rb")
            os.utime(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None
        return file

    @contextmanager
    def _verify(self, file: BinaryIO, path: Path, stat: storage.FileStat) -> Iterator[BinaryIO]:
        """The stream of a cached file; one that is damaged is deleted, and `storage.read` fetches it again."""

        def read_range(start: int, size: int) -> bytes:
            try:
                return os.pread(file.fileno(), size, start)
            except OSError as error:
                raise storage.ChecksumMismatch(f"{path}: {error.strerror}") from error

        with file:
            try:
                with open_checksummed(str(path), stat, read_range) as stream:
                    yield stream
            except storage.ChecksumMismatch:
                path.unlink(missing_ok=True)
                raise

    @contextmanager
    def _fetch(self, url: str, stat: storage.FileStat, path: Path) -> Iterator[BinaryIO]:
        """The stream of an object, copied to `path` on the way."""
        part = self._reserve(stat.size)
        if part is None:
            with storage.open_reader(url) as stream:
                yield stream
            return
        try:
            with gcs.open_reader(url, stat, part.write) as stream:
                yield stream
            part.rename(path, stat.size)
        finally:
            part.discard()
            if part.error is not None:
                self._warn(part.error)

    def _reserve(self, size: int) -> _Part | None:
        """A temporary file of that size; None if there is no room for it or the disk does not allow it."""
        try:
            with self.directory.joinpath(_LOCK).open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                return _Part(self.directory, size) if self._make_room(size) else None
        except OSError as error:
            self._warn(error)
            return None

    def _make_room(self, size: int) -> bool:
        """Deletes files that no process is writing any more, then the least recently used; whether there is room."""
        files = []
        for path in self.directory.iterdir():
            is_part = _UNFINISHED.fullmatch(path.name) is not None
            if is_part and _is_abandoned(path):
                path.unlink(missing_ok=True)
            elif is_part or _FINISHED.fullmatch(path.name):
                try:
                    files.append((path.stat(), path))
                except FileNotFoundError:  # a temporary file that has just been renamed or deleted
                    continue
        room = self.limit - size - sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
            if room >= 0:
                break
            if not path.name.startswith(_PART):
                path.unlink(missing_ok=True)
                room += status.st_size
        return size > 0 and room >= 0

    def _warn(self, error: OSError) -> None:
        """Once for each kind of error: a full disk would otherwise fill the log with every shard."""
        message = error.strerror or str(error)
        if message not in self._warnings:
            self._warnings.add(message)
            _log.warning("data.cache_directory=%s: %s; reading such shards from the bucket", self.directory, message)


class _Part:
    """A temporary file of the cache, locked for as long as its process lives; keeps the first error of its disk."""

    def __init__(self, directory: Path, size: int):
        self.error: OSError | None = None
        self._path = directory / f"{_PART}{secrets.token_hex(8)}"
        self._file = self._path.open("xb", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            os.posix_fallocate(self._file.fileno(), 0, size)  # so that its size counts towards the limit from now on
        except OSError:
            self.discard()
            raise

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and self.error is None:
                view = view[self._file.write(view) :]
        except OSError as error:
            self.error = error

    def rename(self, path: Path, size: int) -> None:
        """Gives a complete file its final name."""
        if self.error is not None or self._file.tell() != size:
            return
        try:
            os.fsync(self._file.fileno())
            os.replace(self._path, path)
        except OSError as error:
            self.error = error

    def discard(self) -> None:
        """Deletes the temporary file unless it was renamed."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def _is_abandoned(part: Path) -> bool:
    try:
        with open(part, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True
