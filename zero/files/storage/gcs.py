"""Google Cloud Storage, for gs:// URLs (google-cloud-storage).

Buckets are accessed with Application Default Credentials if this machine has any, and anonymously otherwise;
STORAGE_EMULATOR_HOST is honoured. Every request is repeated after status 429, 5xx, a reset or a timeout, with
exponential back-off and jitter, until `DEADLINE`; a read continues at the byte where the connection broke.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero.base.errors import Unavailable, first_line
from zero.files.storage.failures import AccessDenied, replaced
from zero.files.storage.fsspec_store import TIMEOUT, Waiting, deadline
from zero.files.storage.objects import Checksum, ObjectStat
from zero.files.storage.urls import SCHEME, split

if TYPE_CHECKING:
    from google.cloud import storage

PAYER = "GS_USER_PROJECT"  # the environment variable in which GDAL takes it too


def stat(url: str | Path) -> ObjectStat:
    blob = _blob(url)
    with _translated_errors(url):
        blob.reload(timeout=TIMEOUT, retry=_retry(url))
    return _stat(blob)


def list_stats(directory: str | Path, is_deep: bool) -> dict[str, ObjectStat]:
    """All objects below a directory, or only those in it, by URL."""
    bucket, name = split(directory)
    options = {"prefix": name.rstrip("/") + "/" if name.rstrip("/") else "", "delimiter": None if is_deep else "/"}
    with _translated_errors(directory):
        listed = client(os.getpid()).list_blobs(_bucket(bucket), timeout=TIMEOUT, retry=_retry(directory), **options)
        blobs = list(listed)
    return {f"{SCHEME}://{bucket}/{blob.name}": _stat(blob) for blob in blobs}


def _stat(blob: storage.Blob) -> ObjectStat:
    return ObjectStat(blob.size, blob.generation, Checksum("crc32c", blob.crc32c))


def copy(url: str | Path, target: str | Path) -> None:
    copied = _blob(target)
    token = None
    with _translated_errors(url):
        while True:  # a large object takes several requests
            token, _, _ = copied.rewrite(_blob(url), token=token, timeout=TIMEOUT, retry=_retry(url))
            if token is None:
                break


def read(url: str | Path, known: ObjectStat) -> bytes:
    blob = _blob(url, int(known.version))
    with _translated_errors(url):
        # Google's library compares no checksum after a connection has broken.
        return blob.download_as_bytes(raw_download=True, checksum=None, timeout=TIMEOUT, retry=_retry(url))


def read_range(url: str | Path, known: ObjectStat, start: int, stop: int) -> bytes:
    blob = _blob(url, int(known.version))
    with _translated_errors(url):
        options = {"raw_download": True, "checksum": None, "timeout": TIMEOUT, "retry": _retry(url)}
        return blob.download_as_bytes(start=start, end=stop - 1, **options)


def write(url: str | Path, data: bytes) -> None:
    with _translated_errors(url):
        _blob(url).upload_from_string(data, checksum="crc32c", timeout=TIMEOUT, retry=_retry(url))


def remove(url: str | Path) -> None:
    with _translated_errors(url):
        _blob(url).delete(timeout=TIMEOUT, retry=_retry(url))


@functools.lru_cache(maxsize=1)
def client(process: int) -> storage.Client:
    """One client per process id, because connections do not survive a fork."""
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
    bucket, name = split(url)
    return _bucket(bucket).blob(name, generation=generation)


def _bucket(name: str) -> storage.Bucket:
    """A bucket; of one that bills its readers, the project that pays is named by the environment."""
    return client(os.getpid()).bucket(name, user_project=os.environ.get(PAYER))


def _retry(url: str | Path) -> Any:
    from google.cloud.storage.retry import DEFAULT_RETRY

    waiting = Waiting(url)

    def is_temporary(error: Exception) -> bool:
        is_repeated = bool(DEFAULT_RETRY._predicate(error))
        if is_repeated:
            waiting.tell(error)
        return is_repeated

    patient = DEFAULT_RETRY.with_predicate(is_temporary).with_delay(initial=0.5, maximum=30, multiplier=2)
    return patient.with_timeout(deadline())


def bills_readers(url: str | Path) -> AccessDenied:
    return AccessDenied(
        f"{url}: the bucket bills its readers; set {PAYER}=PROJECT in the environment to the project that pays"
    )


@contextmanager
def _translated_errors(url: str | Path) -> Iterator[None]:
    """Turns the exceptions of Google's library into those that `zero.files.storage` documents."""
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

    try:
        yield
    except exceptions.NotFound:
        raise FileNotFoundError(f"{url}: no such object") from None
    except exceptions.PreconditionFailed as error:
        raise replaced(url) from error
    except exceptions.BadRequest as error:
        if "requester pays" not in str(error):
            raise Unavailable(f"{url}: request failed: {first_line(error)}") from error
        raise bills_readers(url) from error
    except (exceptions.Unauthorized, exceptions.Forbidden, GoogleAuthError) as error:
        raise AccessDenied(
            f"{url}: access denied; a private bucket needs the credentials of an account with access to it "
            f"(gcloud auth application-default login): {first_line(error)}"
        ) from error
    except exceptions.RetryError as error:
        raise Unavailable(f"{url}: no answer within {deadline():.0f} s: {first_line(error.cause or error)}") from error
    except (exceptions.GoogleAPIError, DataCorruption, InvalidResponse, OSError) as error:
        raise Unavailable(f"{url}: request failed: {first_line(error)}") from error
