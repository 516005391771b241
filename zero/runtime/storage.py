"""Files here and in buckets: local paths and gs://bucket/name, read, written and listed alike (google-cloud-storage).

A bucket is read with Application Default Credentials where this machine has any, and anonymously where it has none.
STORAGE_EMULATOR_HOST is honoured. Every request is tried again after 429, 5xx, resets and silences, with exponential
back-off and jitter, until `DEADLINE`; a read goes on at the byte where the connection broke.

Raises, all of it: FileNotFoundError where nothing is there, and UserError, which names the address, where access is
denied or a bucket does not answer.
"""

from __future__ import annotations

import base64
import functools
import io
import logging
import os
import posixpath
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

from zero.runtime.errors import UserError

if TYPE_CHECKING:
    from google.cloud import storage

TIMEOUT = 10, 30  # seconds to connect, and of silence while reading
DEADLINE = 300  # seconds that one request and its repetitions may take
GARBLED_ATTEMPTS = 5  # at reading a file whose checksum is wrong
CHUNK = 8 << 20  # bytes asked for at once: of a bucket in 50 ms or so, which is what a request takes to be answered
_SCHEME = "gs://"
_Result = TypeVar("_Result")
_Opened = AbstractContextManager[BinaryIO]
log = logging.getLogger(__name__)


class Garbled(Exception):
    """What was read of an object does not have the checksum that was stored with it."""


class AccessDenied(UserError):
    """This machine's account, or anybody without one, may not do this with a bucket."""


class Stat(NamedTuple):
    """What is known of a file without reading it."""

    size: int  # bytes
    generation: int  # another one wherever the content may be another
    crc32c: str | None  # base64, as Google writes it; None for local files


def is_remote(url: str | Path) -> bool:
    """Whether this lies in a bucket.

    Raises:
      UserError: an address of another kind, as s3://.
    """
    if "://" not in str(url):
        return False
    bucket, _, name = str(url).removeprefix(_SCHEME).partition("/")
    if not str(url).startswith(_SCHEME) or not bucket or not name:
        raise UserError(f"{url}: expected a local path or gs://bucket/name")
    return True


def bucket(path: str) -> str:
    """The address of `data.bucket_path`: a bucket, or a directory in one, with gs:// or without.

    >>> bucket("name/of/it/")
    'gs://name/of/it'
    """
    return _SCHEME + path.removeprefix(_SCHEME).strip("/")


def join(directory: str | Path, path: str | Path) -> str:
    """`path` as seen from a directory, here or in a bucket; absolute paths and addresses are left alone.

    >>> join("gs://bucket/index", "../corpus/0.tar")
    'gs://bucket/corpus/0.tar'
    >>> join("gs://bucket/index", "/data/0.tar")
    '/data/0.tar'
    """
    if "://" in str(path) or os.path.isabs(path):
        return str(path)
    if "://" not in str(directory):
        return str(Path(directory, path))
    scheme, place = str(directory).split("://", 1)
    return f"{scheme}://{posixpath.normpath(posixpath.join(place, Path(path).as_posix()))}"


def parent(url: str | Path) -> str:
    """The directory that a file lies in."""
    return str(url).rpartition("/")[0] if "://" in str(url) else os.path.dirname(url) or "."


def stat(url: str | Path) -> Stat:
    """Size, generation and checksum of a file."""
    if is_remote(url):
        blob = _blob(url)
        with _errors(url):
            blob.reload(timeout=TIMEOUT, retry=_retry())
        return Stat(blob.size, blob.generation, blob.crc32c)
    status = os.stat(url)
    return Stat(status.st_size, status.st_mtime_ns, None)


def exists(url: str | Path) -> bool:
    """Whether a file is there."""
    try:
        stat(url)
    except FileNotFoundError:
        return False
    return True


def list_files(directory: str | Path) -> list[str]:
    """All files below a directory, sorted; none where there is no such directory."""
    if is_remote(join(directory, "x")):
        bucket, _, name = str(directory).removeprefix(_SCHEME).partition("/")
        prefix = name.rstrip("/") + "/" if name.rstrip("/") else ""
        try:
            with _errors(directory):
                blobs = list(_client(os.getpid()).list_blobs(bucket, prefix=prefix, timeout=TIMEOUT, retry=_retry()))
        except FileNotFoundError:
            raise UserError(f"{directory}: no such bucket") from None
        return sorted(f"{_SCHEME}{bucket}/{blob.name}" for blob in blobs)
    return sorted(os.path.join(place, name) for place, _, names in os.walk(directory) for name in names)


def move(directory: str | Path, target: str | Path) -> None:
    """Renames a directory. In a bucket every object is copied, by the server, before the first one is deleted."""
    if not is_remote(directory):
        os.rename(directory, target)
        opened = os.open(parent(target), os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
        return
    files = list_files(directory)
    for url in files:
        copy, token = _blob(str(target) + url.removeprefix(str(directory))), None
        with _errors(url):
            while True:  # a large object takes several requests
                token, _, _ = copy.rewrite(_blob(url), token=token, timeout=TIMEOUT, retry=_retry())
                if token is None:
                    break
    for url in files:
        with _errors(url):
            _blob(url).delete(timeout=TIMEOUT, retry=_retry())


@contextmanager
def reading(url: str | Path, copy_to: BinaryIO | None = None, known: Stat | None = None) -> Iterator[BinaryIO]:
    """A file to read from front to back, and to seek forward in.

    An object is streamed: `CHUNK` bytes are held at a time, all of one generation. Unless some of it was passed over,
    leaving the block, also by an exception, reads what is left and compares the checksum, so whoever leaves it has
    seen what was stored. `copy_to` takes a copy of every byte on the way; `known` saves asking for it again.
    """
    if not is_remote(url):
        with open(url, "rb") as file:
            yield file
        return
    with _Object(url, known or stat(url), copy_to) as raw, io.BufferedReader(raw, CHUNK) as stream:
        try:
            yield stream
        finally:
            while raw.is_unbroken and stream.read(CHUNK):
                pass


def read(
    url: str | Path, use: Callable[[BinaryIO], _Result], opened: Callable[[str], _Opened] | None = None
) -> _Result:
    """What `use` makes of a file; where bytes came garbled, it is called again with right ones.

    `opened` is `reading`, or does as it does (zero.runtime.data.cache).
    """
    for attempt in range(GARBLED_ATTEMPTS):
        try:
            with (opened or reading)(str(url)) as stream:
                return use(stream)
        except Garbled as error:
            garbled = str(error.args[0])  # who reads a stream may add to them
            log.warning("%s; attempt %d of %d", garbled, attempt + 1, GARBLED_ATTEMPTS)
    raise UserError(f"{garbled}, {GARBLED_ATTEMPTS} times in a row")


def read_bytes(url: str | Path) -> bytes:
    """All of a file."""
    return read(url, lambda stream: stream.read())


def write(url: str | Path, data: bytes | BinaryIO) -> None:
    """Writes a file whole or not at all, in place of one of that name."""
    if is_remote(url):
        source = io.BytesIO(data) if isinstance(data, bytes) else data
        with _errors(url):
            _blob(url).upload_from_file(source, rewind=True, checksum="crc32c", timeout=TIMEOUT, retry=_retry())
        return
    path = Path(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(aside, "xb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                data.seek(0)
                while block := data.read(CHUNK):
                    file.write(block)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def remove(url: str | Path) -> None:
    """Deletes a file; one that is not there is no error."""
    if is_remote(url):
        try:
            with _errors(url):
                _blob(url).delete(timeout=TIMEOUT, retry=_retry())
        except FileNotFoundError:
            pass
    else:
        Path(url).unlink(missing_ok=True)


# ---- Google Cloud Storage --------------------------------------------------------------------------------------------


class _Object(io.RawIOBase):
    """An object as a raw stream: every read is one range of one generation."""

    def __init__(self, url: str | Path, known: Stat, copy_to: BinaryIO | None):
        import google_crc32c

        self._url, self._stat, self._copy_to = str(url), known, copy_to
        self._blob = _blob(url, self._stat.generation)
        self._position = 0
        self._sum, self._summed = google_crc32c.Checksum(), 0

    @property
    def is_unbroken(self) -> bool:
        """Whether every byte so far was read, in order."""
        return self._summed == self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._stat.size}[whence]
        return self._position

    def readall(self) -> bytes:
        data = bytearray()
        while block := self.read(CHUNK):
            data += block
        return bytes(data)

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._stat.size - self._position)
        if wanted <= 0:
            return 0
        with _errors(self._url):
            data = self._blob.download_as_bytes(
                start=self._position,
                end=self._position + wanted - 1,
                raw_download=True,
                checksum=None,  # of the whole, below: Google keeps none of a range
                timeout=TIMEOUT,
                retry=_retry(),
            )
        if not 0 < len(data) <= wanted:
            raise Garbled(f"{self._url}: {len(data)} bytes came where {wanted} were asked for")
        if self.is_unbroken:
            self._sum.update(data)
            self._summed += len(data)
            if self._copy_to is not None:
                self._copy_to.write(data)
        self._position += len(data)
        if self._summed == self._stat.size:
            came = base64.b64encode(self._sum.digest()).decode()
            if came != self._stat.crc32c:
                raise Garbled(f"{self._url}: crc32c {came} came where {self._stat.crc32c} is stored")
        buffer[: len(data)] = data
        return len(data)


@functools.lru_cache(maxsize=1)
def _client(process: int) -> storage.Client:
    """One a process: connections do not survive a fork."""
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import storage

    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return storage.Client.create_anonymous_client()
    try:
        credentials, project = google.auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])
    except DefaultCredentialsError:
        return storage.Client.create_anonymous_client()
    return storage.Client(project=project or "<none>", credentials=credentials)


def _blob(url: str | Path, generation: int | None = None) -> storage.Blob:
    bucket, _, name = str(url).removeprefix(_SCHEME).partition("/")
    return _client(os.getpid()).bucket(bucket).blob(name, generation=generation)


def _retry() -> Any:
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_delay(initial=0.5, maximum=30, multiplier=2).with_timeout(DEADLINE)


def is_outage(error: BaseException) -> bool:
    """Whether a disk, a network or a bucket raises this: errors of the moment, whose names say nothing of zero."""
    clients = {
        "gcsfs.retry": "HttpError",
        "google.api_core.exceptions": "GoogleAPIError",
        "google.auth.exceptions": "GoogleAuthError",
    }
    known = [getattr(sys.modules[name], kind) for name, kind in clients.items() if name in sys.modules]
    return isinstance(error, (OSError, *known))  # what was never imported has raised nothing


@contextmanager
def _errors(url: str | Path) -> Iterator[None]:
    """What Google's library raises, as this file promises it."""
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

    try:
        yield
    except exceptions.NotFound:
        raise FileNotFoundError(f"{url}: no such object") from None
    except DataCorruption as error:
        raise Garbled(f"{url}: {_first_line(error)}") from error
    except (exceptions.Unauthorized, exceptions.Forbidden, GoogleAuthError) as error:
        raise AccessDenied(
            f"{url}: access denied; a bucket that is not public expects the credentials of an account that may use it "
            f"(gcloud auth application-default login): {_first_line(error)}"
        ) from error
    except exceptions.RetryError as error:
        raise UserError(f"{url}: no answer within {DEADLINE} s: {_first_line(error.cause or error)}") from error
    except (exceptions.GoogleAPIError, InvalidResponse, OSError) as error:
        raise UserError(f"{url}: the bucket refuses: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
