"""What a bucket states about an object: its size, its version and a checksum of its bytes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import NamedTuple


class Checksum(NamedTuple):
    """A checksum in the form in which the store states it."""

    algorithm: str  # a key of `ALGORITHMS`
    value: str

    def of(self, data: bytes) -> Checksum:
        """The checksum of these bytes by the same algorithm.

        >>> Checksum("md5", "").of(b"shard").value
        'dbaff3c7deda10c1faaca3e1a6c37adb'
        """
        return Checksum(self.algorithm, ALGORITHMS[self.algorithm](data))


class ObjectStat(NamedTuple):
    size: int  # bytes
    version: int | str  # another one after every write that changes the bytes
    checksum: Checksum | None  # None: the store states none


def _crc32c(data: bytes) -> str:
    import google_crc32c

    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


ALGORITHMS: dict[str, Callable[[bytes], str]] = {
    "crc32c": _crc32c,  # Google, in base64
    "md5": lambda data: hashlib.md5(data, usedforsecurity=False).hexdigest(),
    "sha1 of the git blob": lambda data: hashlib.sha1(
        b"blob %d\0" % len(data) + data, usedforsecurity=False
    ).hexdigest(),
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}
