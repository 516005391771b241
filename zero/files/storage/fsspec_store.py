"""Buckets through fsspec, with the same promises as Google's.

Every request is repeated after status 429, 5xx, a reset or a timeout, with exponential back-off and jitter, until
`DEADLINE`. A read is made in ranges of `RANGE` bytes, and continues at the range in which the connection broke.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from zero.base.errors import WRONG_PATH, Unavailable, UserError, first_line, install_command
from zero.files.storage.failures import CONNECTION_ERRORS, AccessDenied, imported, outages, replaced
from zero.files.storage.objects import ObjectStat

TIMEOUT = 10, 30  # seconds to connect, and without a byte while reading
DEADLINE = 300  # seconds for one request and its repetitions
_SHORTER: ContextVar[float | None] = ContextVar("shorter deadline", default=None)
TOLD_AFTER = 3.0  # seconds of failing attempts before the wait is logged: one timeout, or several refusals
PAUSES = 0.5, 30.0  # seconds between repetitions: the first, doubled from then on, and the longest
SLOWEST = 1e5  # bytes per second of an upload that is not taken for stalled
RANGE = 8 << 20  # bytes of one request
_PERMANENT = WRONG_PATH | {errno.EINVAL, errno.EMSGSIZE, errno.ENOSYS}  # numbers of errors that come again
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class FsspecStore(ABC):
    """A kind of bucket; each subclass is one, and names its library, its credentials and its checksums."""

    package: ClassVar[str]
    extra: ClassVar[str]  # of pyproject.toml, which installs the package
    access: ClassVar[str]  # the credentials that a user needs
    is_threadsafe: ClassVar[bool] = True  # otherwise each thread has its own file system

    def options(self) -> dict[str, Any]:
        """The arguments of the file system."""
        return {}

    def range_options(self) -> dict[str, Any]:
        """The arguments of `cat_file` besides the range."""
        return {}

    def info(self, files: Any, path: str) -> dict[str, Any]:
        """What the store tells of a file."""
        files.invalidate_cache()
        return files.info(path)

    @abstractmethod
    def object_stat(self, info: dict[str, Any]) -> ObjectStat:
        """From what `info` or a list gives about a file."""

    def stat(self, url: str | Path) -> ObjectStat:
        files, path = self._open(url)

        def request() -> ObjectStat:
            info = self.info(files, path)
            if info.get("type", "file") != "file":
                raise FileNotFoundError
            return self.object_stat(info)

        return self._repeated(url, request)

    def list_stats(self, directory: str | Path, is_deep: bool) -> dict[str, ObjectStat]:
        """All objects below a directory, or only those in it, by URL.

        Without checksums, because a list does not tell of encryption.
        """
        root = str(directory).rstrip("/")
        files, path = self._open(root)

        def request() -> dict[str, dict[str, Any]]:
            files.invalidate_cache()
            if not is_deep:
                with suppress(FileNotFoundError):  # a bucket without such a directory, or no such bucket: `find` tells
                    return {entry["name"]: entry for entry in files.ls(path, detail=True)}
            return files.find(path, detail=True)

        return {
            root + name.removeprefix(path): self.object_stat(info)._replace(checksum=None)
            for name, info in self._repeated(root, request).items()
            if name.startswith(f"{path}/") and info["type"] == "file"
        }

    def read(self, url: str | Path, known: ObjectStat) -> bytes:
        return b"".join(self._range(url, start, known.size) for start in range(0, known.size, RANGE))

    def read_range(self, url: str | Path, known: ObjectStat, start: int, stop: int) -> bytes:
        return b"".join(self._range(url, first, stop) for first in range(start, stop, RANGE))

    def write(self, url: str | Path, data: bytes) -> None:
        """Uploads an object, which readers see once it is complete, and compares the store's size and checksum."""
        files, path = self._open(url)
        # No library limits the wait for a server that does not let an upload begin.
        limit = {"timeout": TIMEOUT[1] + len(data) / SLOWEST} if files.async_impl else {}
        self._repeated(url, lambda: files.pipe_file(path, data, **limit))
        stat = self.stat(url)
        if stat.size != len(data) or (stat.checksum is not None and stat.checksum.of(data) != stat.checksum):
            raise Unavailable(f"{url}: {stat} was stored instead of the {len(data)} bytes sent")

    def copy(self, url: str | Path, target: str | Path) -> None:
        files, path = self._open(url)
        _, copy = self._open(target)
        self._repeated(url, lambda: files.cp_file(path, copy))

    def remove(self, url: str | Path) -> None:
        files, path = self._open(url)
        self._repeated(url, lambda: files.rm_file(path))

    def _range(self, url: str | Path, start: int, size: int) -> bytes:
        """The bytes of an object from `start`, at most `RANGE`."""
        files, path = self._open(url)
        stop = min(start + RANGE, size)

        def request() -> bytes:
            data = files.cat_file(path, start=start, end=stop, **self.range_options())
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data)} of {stop - start} bytes arrived")
            return data

        return self._repeated(url, request)

    def _open(self, url: str | Path) -> tuple[Any, str]:
        """The file system of a URL, and the path in it."""
        scheme, _, name = str(url).partition("://")
        thread = 0 if self.is_threadsafe else threading.get_ident()
        try:
            files = file_system(self, f"{scheme}://{name.partition('/')[0]}", os.getpid(), thread)
        except ImportError:
            raise UserError(f"{url}: {self.package} is missing; {install_command(self.extra)}") from None
        return files, files._strip_protocol(str(url))

    def _repeated(self, url: str | Path, request: Callable[[], _Result]) -> _Result:
        """The result of a request; raises the errors that `zero.files.storage` documents."""
        seconds = deadline()
        waiting = Waiting(url)
        ends = time.monotonic() + seconds
        pause, longest = PAUSES
        while True:
            try:
                return request()
            except FileNotFoundError:
                raise FileNotFoundError(f"{url}: no such object") from None
            except ValueError as error:  # of the name, before anything is sent
                raise UserError(f"{url}: the name is invalid: {first_line(error)}") from error
            except outages() as error:
                if (status := _status(error)) == 404:
                    raise FileNotFoundError(f"{url}: no such object") from None
                if status == 412:
                    raise replaced(url) from error
                if isinstance(error, PermissionError) or status in (401, 403):
                    message = f"{url}: access denied; a private bucket needs {self.access}: {first_line(error)}"
                    raise AccessDenied(message) from error
                if not _is_temporary(error, status):
                    raise Unavailable(f"{url}: request failed: {first_line(error)}") from error
                if time.monotonic() + pause > ends:
                    raise Unavailable(f"{url}: no answer within {seconds:.0f} s: {first_line(error)}") from error
                waiting.tell(error)
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, longest)


class Waiting:
    """A request that is repeated; its wait is logged once, from `TOLD_AFTER` seconds on."""

    def __init__(self, url: str | Path) -> None:
        self._url = url
        self._begun = time.monotonic()
        self._is_told = False

    def tell(self, error: Exception) -> None:
        """Takes the error of an attempt that will be repeated."""
        if not self._is_told and time.monotonic() - self._begun >= TOLD_AFTER:
            self._is_told = True
            _log.warning("waiting for %s: %s; retrying for up to %.0f s", self._url, first_line(error), deadline())


def deadline() -> float:
    """Seconds for one request and its repetitions: `DEADLINE`, or less within `deadline_of`."""
    shorter = _SHORTER.get()
    return DEADLINE if shorter is None else shorter


@contextmanager
def deadline_of(seconds: float) -> Iterator[None]:
    """Within the block, requests of this thread are given up after fewer seconds."""
    token = _SHORTER.set(seconds)
    try:
        yield
    finally:
        _SHORTER.reset(token)


@functools.lru_cache(maxsize=256)
def file_system(store: FsspecStore, bucket: str, process: int, thread: int) -> Any:
    """One file system per bucket and process id, because connections do not survive a fork."""
    import fsspec

    options = {"skip_instance_cache": True, "use_listings_cache": False} | store.options()
    files, _ = fsspec.url_to_fs(bucket, **options)
    return files


def _status(error: BaseException) -> int | None:
    """The status of the answer that a library has made this error of, if it tells."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # of botocore
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    status = getattr(error, "status_code", None) or getattr(answer, "status_code", None)
    if status or error.__cause__ is None:
        return status
    return _status(error.__cause__)


def _is_temporary(error: BaseException, status: int | None) -> bool:
    if status is not None:
        return status in (408, 429) or status >= 500
    if isinstance(error, OSError):
        return not isinstance(error, FileExistsError) and error.errno not in _PERMANENT
    return isinstance(error, imported(CONNECTION_ERRORS))
