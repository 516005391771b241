"""Buckets for orbax.

Through fsspec it retries as long as `zero.files.storage` does, and lists without a cache (gcsfs). Arrays go through
tensorstore, which here learns which project pays.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from gcsfs.retry import is_retriable
from orbax.checkpoint._src.serialization import tensorstore_utils

from zero.files.storage import DEADLINE
from zero.files.storage.gcs import PAYER, bills_readers

log = logging.getLogger(__name__)


class PatientBucket(fsspec.get_filesystem_class("gs")):  # type: ignore[misc]
    """gcsfs gives up after half a minute, and does not see later changes of a directory that it has listed."""

    def __init__(self, *args: Any, use_listings_cache: bool = False, **options: Any) -> None:
        payer = os.environ.get(PAYER) or False
        super().__init__(*args, use_listings_cache=use_listings_cache, requester_pays=payer, **options)

    async def _request(self, *args: Any, **options: Any) -> Any:
        ends = time.monotonic() + DEADLINE
        while True:
            try:
                return await super()._request(*args, **options)  # pauses between attempts of its own
            except Exception as error:
                if "requester pays" in str(error):
                    raise bills_readers("/".join(["gs:/", *args[2:]])) from error
                if not is_retriable(error) or time.monotonic() > ends:
                    raise
                log.warning("a bucket does not respond; trying again: %s", str(error).partition("\n")[0])


@contextmanager
def patient_buckets() -> Iterator[None]:
    """In this context, fsspec opens gs:// as a `PatientBucket`.

    Orbax's paths keep the file system that they first opened, so creating a checkpoint manager within is enough.
    """
    _name_payer()
    before = {name: fsspec.get_filesystem_class(name) for name in ("gs", "gcs")}
    try:
        for name in before:
            fsspec.register_implementation(name, PatientBucket, clobber=True)
        yield
    finally:
        for name, filesystem in before.items():
            fsspec.register_implementation(name, filesystem, clobber=True)


def _name_payer() -> None:
    """Requests of tensorstore name the project that pays, if the environment does.

    Orbax makes a context of tensorstore for each save and restore from these two tables, and has no option for it.
    """
    if payer := os.environ.get(PAYER):
        for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
            context["gcs_user_project"] = {"project_id": payer}
