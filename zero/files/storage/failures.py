"""Errors of storage: those that it raises, and the classes of libraries that may never have been imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from zero.base.errors import Unavailable, UserError

CONNECTION_ERRORS = {  # a repetition of the request may succeed
    "aiohttp": ("ClientError",),
    "azure.core.exceptions": ("ServiceRequestError", "ServiceResponseError"),
    "botocore.exceptions": ("ConnectionError", "FlexibleChecksumError", "HTTPClientError", "IncompleteReadError"),
    "botocore.parsers": ("ResponseParserError",),
    "httpx": ("TransportError",),
    "httpx2": ("TransportError",),
}
LIBRARY_ERRORS = CONNECTION_ERRORS | {
    "azure.core.exceptions": ("AzureError",),
    "botocore.exceptions": ("BotoCoreError",),
    "gcsfs.retry": ("HttpError",),
    "google.api_core.exceptions": ("GoogleAPIError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "httpx": ("HTTPError",),
    "httpx2": ("HTTPError",),
}


class AccessDenied(UserError):
    """The credentials of this machine, or anonymous access, do not allow this operation on a bucket."""


class NoSuchBucket(UserError):
    """The bucket does not exist, or no longer."""


def replaced(url: str | Path, version: object = None) -> Unavailable:
    """The error for an object that was replaced between two requests."""
    now = "" if version is None else f": version {version}"
    return Unavailable(f"{url}: was replaced while it was being read{now}")


def imported(table: Mapping[str, tuple[str, ...]]) -> tuple[type[Exception], ...]:
    """The classes of a table, by module. A library that was never imported cannot have raised an error."""
    return tuple(
        getattr(sys.modules[module], name) for module in table if module in sys.modules for name in table[module]
    )


def outages() -> tuple[type[Exception], ...]:
    """The classes of errors that come from a disk, a network or a bucket."""
    return (OSError, *imported(LIBRARY_ERRORS))


def is_outage(error: BaseException) -> bool:
    """Whether this error comes from a disk, a network or a bucket rather than from a fault in the program."""
    return isinstance(error, outages())
