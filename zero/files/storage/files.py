"""Files on local disks and in buckets through one set of functions, by local path or URL.

All of them raise FileNotFoundError for a file that does not exist, and UserError, which names the URL, where a bucket
denies access or does not answer. The library of a store is not imported before a URL of it is used.
"""

from __future__ import annotations

import fcntl
import glob
import io
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from zero.base.errors import Unavailable, UserError
from zero.files.storage.failures import NoSuchBucket, replaced
from zero.files.storage.objects import ObjectStat
from zero.files.storage.stores import STORES, Store
from zero.files.storage.urls import is_remote, is_root, parent, scheme

BLOCK = 1 << 20  # bytes of a file that are in memory at once
CHECKSUM_ATTEMPTS = 5  # at reading an object whose bytes do not match its checksum, or its length
_log = logging.getLogger(__name__)


def _store(url: str | Path) -> Store:
    return STORES[scheme(url)]


def stat(url: str | Path) -> ObjectStat:
    """Size, version and checksum of an object in a bucket."""
    if is_root(url):
        raise FileNotFoundError(f"{url}: this is a bucket, not a file")
    return _store(url).stat(url)


def list_stats(directory: str | Path, is_deep: bool = True) -> dict[str, ObjectStat]:
    """All objects below a directory in a bucket, by URL; or only those in the directory itself."""
    try:
        return _store(directory).list_stats(directory, is_deep)
    except FileNotFoundError:
        raise NoSuchBucket(f"{directory}: no such bucket") from None


def read_object(url: str | Path, known: ObjectStat | None = None) -> bytes:
    """The version of an object that is `known`, or else the newest, whose checksum is compared.

    Of a store that states none, the version must be the same before and after.
    """
    store = _store(url)
    known = known or stat(url)
    checksum = known.checksum
    for attempt in range(CHECKSUM_ATTEMPTS):
        try:
            data = store.read(url, known)
        except FileNotFoundError:
            if (now := stat(url)).version == known.version:
                raise
            raise replaced(url, f"{now.version}, not {known.version}") from None
        if checksum is not None and (actual := checksum.of(data)) == checksum:
            return data
        if (now := store.stat(url)).version != known.version:
            raise replaced(url, f"{now.version}, not {known.version}")
        if checksum is None:
            return data
        message = f"{url}: {checksum.algorithm} is {actual.value}, expected {checksum.value}"
        _log.warning("%s; attempt %d of %d", message, attempt + 1, CHECKSUM_ATTEMPTS)
    raise Unavailable(f"{message}, {CHECKSUM_ATTEMPTS} times in a row")


class RangeReader(io.RawIOBase):
    """An object of a bucket that is too large for memory, read in ranges, of one version; no checksum covers a range.

    Wrap it into an io.BufferedReader, whose buffer is what one request asks for.
    """

    def __init__(self, url: str | Path):
        self._url = url
        self._known = stat(url)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._known.size}
        self._position = starts[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._known.size)
        if stop <= self._position:
            return 0
        for attempt in range(CHECKSUM_ATTEMPTS):
            data = _store(self._url).read_range(self._url, self._known, self._position, stop)
            if len(data) == stop - self._position:
                break
            message = f"{self._url}: {len(data)} of {stop - self._position} bytes arrived"
            _log.warning("%s; attempt %d of %d", message, attempt + 1, CHECKSUM_ATTEMPTS)
        else:
            raise Unavailable(f"{message}, {CHECKSUM_ATTEMPTS} times in a row")
        buffer[: len(data)] = data
        self._position = stop
        return len(data)

    def close(self) -> None:
        """Raises Unavailable if the object was replaced while it was being read."""
        if not self.closed and (now := stat(self._url)).version != self._known.version:
            super().close()
            raise replaced(self._url, now.version)
        super().close()


def exists(url: str | Path) -> bool:
    try:
        stat(url) if is_remote(url) else os.stat(url)
    except FileNotFoundError:
        return False
    return True


def list_files(directory: str | Path) -> list[str]:
    """All files below a directory, sorted; an empty list if the directory does not exist."""
    if is_remote(directory):
        return sorted(list_stats(directory))
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names)


def move(directory: str | Path, target: str | Path) -> None:
    """Renames a directory. In a bucket the server copies every object before the first one is deleted."""
    if is_remote(directory):
        urls = list_files(directory)
        for url in urls:
            _store(url).copy(url, str(target) + url.removeprefix(str(directory)))
        for url in urls:
            remove(url)
        return
    os.rename(directory, target)
    opened = os.open(parent(target), os.O_RDONLY)
    try:
        os.fsync(opened)  # so that the new name survives a power failure
    finally:
        os.close(opened)


def open_reader(url: str | Path) -> BinaryIO:
    """A file to read from. An object of a bucket is read into memory first, and its checksum is compared."""
    return io.BytesIO(read_object(url)) if is_remote(url) else open(url, "rb")


def read_bytes(url: str | Path) -> bytes:
    with open_reader(url) as file:
        return file.read()


def write(url: str | Path, data: bytes) -> None:
    """Creates or replaces a file atomically: readers see all of the new contents or none of them.

    Raises:
      OSError: nothing was written; it names the file, which the error of a full disk does not.
    """
    if is_remote(url):
        if is_root(url):
            raise UserError(f"{url}: this is a bucket; expected the name of a file in it")
        _store(url).write(url, data)
        return
    with _named_replacing(Path(url)) as file:
        file.write(data)


def write_blocks(url: str | Path, blocks: Iterable[bytes]) -> None:
    """As `write`, with the contents in blocks. On a disk one block at a time is in memory; in a bucket all are."""
    if is_remote(url):
        write(url, b"".join(blocks))
        return
    with _named_replacing(Path(url)) as file:
        file.writelines(blocks)


def blocks_of(file: BinaryIO) -> Iterator[bytes]:
    """The rest of an open file in blocks of `BLOCK` bytes."""
    while block := file.read(BLOCK):
        yield block


@contextmanager
def _named_replacing(path: Path) -> Iterator[BinaryIO]:
    """As `replacing`, in a directory that is made; an OSError names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new hidden file beside a local `path`, to fill within the block; it replaces `path` when the block succeeds.

    No other process writes to it: its name is its own. What a killed process has left, `remove_unfinished` removes.
    """
    with _unfinished_file(path) as file:
        temporary = Path(file.name)
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def _unfinished_file(path: Path) -> Iterator[BinaryIO]:
    """A new hidden file beside `path`, locked until it is closed: `remove_unfinished` leaves it alone."""
    while True:
        with open(path.with_name(f".{path.name}.{secrets.token_hex(4)}"), "xb") as file:
            with suppress(OSError):  # a file system without locks, where nothing is removed either
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.exists(file.name):  # else it was removed between its creation and its lock
                yield file
                return


def remove_unfinished(directory: str | Path, name: str = "*") -> None:
    """Removes what `write` has left in a directory where its process was killed, of files whose names match a pattern.

    A file that a living process is writing stays. In a bucket nothing is left.
    """
    if is_remote(directory):
        return
    for path in Path(directory).glob(f".{name}." + 8 * "[0-9a-f]"):
        with suppress(OSError), open(path, "r+b") as file:  # it is locked, gone, of another user or a directory
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@contextmanager
def unfinished_directory(path: Path) -> Iterator[Path]:
    """A new hidden directory beside a local `path`, to fill and rename within the block; deleted when the block fails.

    It is locked within the block. Those of this path that killed processes have left, which nobody has locked, are
    removed before.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}." + 8 * "[0-9a-f]"):
        with suppress(OSError), _locked_directory(left, fcntl.LOCK_EX | fcntl.LOCK_NB):  # locked, gone, or a file
            shutil.rmtree(left)
    while True:
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        unfinished.mkdir()
        with ExitStack() as stack:
            with suppress(OSError):  # a file system without locks, where nothing is removed either
                stack.enter_context(_locked_directory(unfinished, fcntl.LOCK_EX))
            if not unfinished.exists():  # it was removed between its creation and its lock
                continue
            try:
                yield unfinished
            except BaseException:
                shutil.rmtree(unfinished)
                raise
            return


@contextmanager
def _locked_directory(path: Path, operation: int) -> Iterator[None]:
    """Locks a directory within the block; raises OSError if `fcntl.flock` does."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def remove(url: str | Path) -> None:
    """Deletes a file, if it exists."""
    with suppress(FileNotFoundError):
        if is_remote(url):
            _store(url).remove(url)
        else:
            os.unlink(url)
