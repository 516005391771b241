"""Buckets as orbax sees them, through fsspec: as patient as `storage`, and listed anew each time (gcsfs)."""

from __future__ import annotations

import logging
import time
from typing import Any

import fsspec
from gcsfs.retry import is_retriable

from zero.runtime.storage import DEADLINE

log = logging.getLogger(__name__)
# They tell of caches, of what they cannot find out, and of what they raise anyway.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
logging.getLogger("fsspec").setLevel(logging.WARNING)


class Bucket(fsspec.get_filesystem_class("gs")):  # type: ignore[misc]
    """gcsfs gives up after half a minute, and does not see what others change once it has listed a directory."""

    def __init__(self, *args: Any, use_listings_cache: bool = False, **options: Any) -> None:
        super().__init__(*args, use_listings_cache=use_listings_cache, **options)

    async def _request(self, *args: Any, **options: Any) -> Any:
        ends = time.monotonic() + DEADLINE
        while True:
            try:
                return await super()._request(*args, **options)  # pauses between attempts of its own
            except Exception as error:
                if not is_retriable(error) or time.monotonic() > ends:
                    raise
                log.warning("a bucket does not answer, trying again: %s", str(error).partition("\n")[0])


for name in ("gs", "gcs"):
    fsspec.register_implementation(name, Bucket, clobber=True)
