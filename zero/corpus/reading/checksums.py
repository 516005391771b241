"""Compares each shard, when it is read, with the SHA-256 recorded in the manifest beside it."""

from __future__ import annotations

import functools
import hashlib
import logging

from zero.corpus.format.manifest import shard_checksums
from zero.corpus.format.own_formats import MANIFEST
from zero.corpus.format.shards import BadData
from zero.files import storage

_log = logging.getLogger(__name__)


class ShardChecksums:
    """The checksums of a loader's shards. Each is compared once: that takes half as long as reading its rows.

    Args:
      is_warning: a shard that differs is named and read, as far as it can be.
    """

    def __init__(self, is_warning: bool):
        self._is_warning = is_warning
        self._recorded = functools.cache(shard_checksums)  # by directory
        self._compared: set[str] = set()

    def check(self, path: str, data: memoryview) -> None:
        """Raises BadData if these are not the bytes of the shard that the manifest lists; others pass."""
        if path in self._compared:
            return
        folder = storage.parent(path)
        expected = self._recorded(folder)(path.rpartition("/")[2])
        if expected is not None and hashlib.sha256(data).hexdigest() != expected:
            problem = (
                f"shard {path} does not match its checksum in {storage.join(folder, MANIFEST)}: it was damaged or "
                "replaced; restore it, or prepare the corpus again"
            )
            if not self._is_warning:
                raise BadData(problem)
            _log.warning("%s; data.max_skipped_rows allows for damage", problem)
        self._compared.add(path)
