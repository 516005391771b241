"""Shards of a bucket kept on a local disk, up to a number of bytes. Any number of processes may share one directory.

A file is named after the URL and version of its object; other files of the directory are never touched. Every read
compares its checksum, so a damaged or incomplete file is never used; where the store states none, the file ends with
one of its own. Errors of the disk are logged, and the shard is read from the bucket.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from zero.base.errors import UserError, reason
from zero.files import storage
from zero.files.storage.objects import Checksum

_SUFFIX, _PART, _LOCK = ".zero-cache", ".zero-cache.part", ".zero-cache.lock"  # whoever writes the part has the lock
_DIGEST = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


class ShardCache:
    """A directory with at most `limit` bytes of cached files; the least recently used are deleted first.

    Args:
        limit: in bytes; None: 90 % of the disk's free space at the start, counting already cached shards as free.

    Raises:
        UserError: the directory cannot be created.
    """

    def __init__(self, directory: Path, limit: int | None = None):
        self.directory = directory
        self._warnings: set[str] = set()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if limit is None:
                cached = sum(status.st_size for status, _ in self._files())
                limit = int(0.9 * (shutil.disk_usage(directory).free + cached))
        except OSError as error:
            raise UserError(f"data.cache_directory={directory}: {error}") from error
        self.limit = limit

    def open_reader(self, url: str) -> BinaryIO:
        """Like `storage.open_reader`: from this disk, or from the bucket, and then kept if there is room."""
        if not storage.is_remote(url):
            return storage.open_reader(url)
        stat = storage.stat(url)
        name = hashlib.sha256(f"{url}#{stat.version}".encode()).hexdigest()
        path = self.directory / f"{name}{_SUFFIX}"
        data = self._read(path, stat.checksum)
        if data is None:
            data = storage.read_object(url, stat)
            self._keep(path, data if stat.checksum else data + hashlib.sha256(data).digest())
        return io.BytesIO(data)

    def _read(self, path: Path, checksum: Checksum | None) -> bytes | None:
        """The contents of a cached file; None if it is missing or damaged."""
        try:
            data = path.read_bytes()
            if checksum is None:  # it was appended to the file
                checksum = Checksum("sha256", data[-_DIGEST:].hex())
                data = data[:-_DIGEST]
            actual = checksum.of(data)
            if actual == checksum:
                os.utime(path)
                return data
        except FileNotFoundError:  # also one that another process has deleted in the meantime
            return None
        except OSError as error:
            _log.warning("%s: %s; reading it from the bucket", path, error.strerror)
            return None
        message = "%s: %s is %s, expected %s; reading it from the bucket"
        _log.warning(message, path, checksum.algorithm, actual.value, checksum.value)
        return None

    def _keep(self, path: Path, data: bytes) -> None:
        """Writes a file, if there is room for it. It need not be synced, because every read compares the checksum."""
        part = self.directory / _PART
        try:
            with self.directory.joinpath(_LOCK).open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until this process closes it or ends
                part.unlink(missing_ok=True)  # of a process that was killed
                if self._make_room(path, len(data)):
                    try:
                        part.write_bytes(data)
                        part.replace(path)
                    finally:
                        part.unlink(missing_ok=True)
        except OSError as error:
            message = reason(error)
            if message not in self._warnings:  # once: a full disk would fill the log with every shard
                self._warnings.add(message)
                _log.warning("data.cache_directory=%s: %s; reading shards from the bucket", self.directory, message)

    def _make_room(self, path: Path, size: int) -> bool:
        """Deletes the least recently used files of the cache; whether there is room for `size` bytes at `path`."""
        others = [(status, file) for status, file in self._files() if file != path]
        files = sorted(others, key=lambda pair: pair[0].st_mtime_ns)
        room = self.limit - size - sum(status.st_size for status, _ in files)
        for status, file in files:
            if room >= 0:
                break
            file.unlink()
            room += status.st_size
        return size > 0 and room >= 0

    def _files(self) -> list[tuple[os.stat_result, Path]]:
        """The cached files; other files in the directory do not count."""
        files = []
        for file in self.directory.iterdir():
            if re.fullmatch(rf"[0-9a-f]{{64}}{_SUFFIX}", file.name):
                with suppress(FileNotFoundError):  # another process has deleted it
                    files.append((file.stat(), file))
        return files
