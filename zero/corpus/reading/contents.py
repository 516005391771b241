"""What identifies the contents of a corpus, without reading its shards: a start costs no more for a larger corpus.

For each shard the first of these that there is:

- the SHA-256 in the manifest of its directory, which zero-prepare writes,
- in a bucket, what a list states: size and checksum, else size and version,
- on a disk, the size and a digest of a few blocks.

Reasons, and what is not noticed: docs/decisions/data-order.md.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from zero.base.errors import UserError
from zero.corpus.format.index_files import Shard
from zero.corpus.format.manifest import recorded_checksums
from zero.corpus.format.one_host import OnOneHost, looked_up
from zero.files import storage
from zero.files.storage.objects import ObjectStat

BLOCKS = 4  # that are read of a file without a manifest, at equal distances from its beginning on
BLOCK_BYTES = 4096
REMEDY = (
    "a run only continues on the data it started with: restore the data, or start a new run from its weights, "
    "model.warm_start=true model.model_path=RUN"
)
_THREADS = 16  # which wait for a disk of the network
_MANIFEST = "manifest"  # kinds of facts; in buckets, the names of checksums or versions
_BLOCKS = "blocks"
_UNKNOWN = "nothing"
_log = logging.getLogger(__name__)


class Facts(NamedTuple):
    """What identifies the contents of a shard."""

    known_by: str
    value: str  # the name of the shard, if nothing else is known


class Contents(NamedTuple):
    """What identifies the shards of an index file, in their order."""

    rows: int  # that are used
    known_by: str  # the kinds of facts
    digest: str


class IndexContents(NamedTuple):
    """The contents of an index file, with its path or URL for messages."""

    path: str
    rows: int
    known_by: str
    digest: str


def contents_of(shards: Sequence[tuple[Shard, int]]) -> Contents:
    """The contents of shards, each with the number of its rows that are used. It does not depend on their paths."""
    facts = shard_facts([shard.path for shard, _ in shards])
    lines = [f"{facts[shard.path]} {shard.rows}" for shard, _ in shards]
    known_by = "+".join(sorted({facts[shard.path].known_by for shard, _ in shards}))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return Contents(sum(rows for _, rows in shards), known_by, digest)


def contents_on_one_host(index: str, shards: Sequence[tuple[Shard, int]], on_one_host: OnOneHost) -> Contents:
    """The contents of the shards of an index file, looked up on one host if they are in buckets."""
    paths = [shard.path for shard, _ in shards]
    rows = [(shard.rows, used) for shard, used in shards]
    return Contents(*looked_up(on_one_host, f"contents of {index}", paths, lambda: contents_of(shards), given=rows))


def check_contents(
    before: Sequence[IndexContents], now: Sequence[IndexContents], message: str, is_warning: bool = False
) -> bool:
    """Compares the contents of index files, in order, with the contents at an earlier start; paths may differ.

    Args:
      message: the beginning of the error message.
      is_warning: of contents that are known by their own bytes a difference may be damage that is tolerated.

    Returns:
      Whether all could be compared: only what is known by the same facts can.

    Raises:
      UserError: they differ; the message names the index file.
    """
    if len(before) != len(now):
        old_paths = ", ".join(index.path for index in before)
        new_paths = ", ".join(index.path for index in now)
        raise UserError(f"{message}: to {old_paths}, not to {new_paths}; {REMEDY}")
    not_compared = []
    for old, new in zip(before, now, strict=True):
        if old.rows != new.rows:
            more = "" if new.rows < old.rows else f"; data.train_samples={old.rows} reads only the first {old.rows}"
            raise UserError(f"{message}: {new.path} had {old.rows} rows and has {new.rows} now{more}; {REMEDY}")
        if old.known_by != new.known_by or _UNKNOWN in new.known_by:
            not_compared.append(f"{new.path} (known by {old.known_by}, now by {new.known_by})")
        elif old.digest != new.digest:
            problem = f"{new.path} has as many rows as before, but other contents (by {new.known_by})"
            if not is_warning or new.known_by == _MANIFEST:
                raise UserError(f"{message}: {problem}; {REMEDY}")
            _log.warning("%s; data.max_skipped_rows allows for damage", problem)
    if not_compared:
        _log.warning(
            "compared by the names and rows of shards only; comparing contents needs the same manifest.json beside "
            "them: %s",
            ", ".join(not_compared),
        )
    return not not_compared


def shard_facts(paths: Iterable[str]) -> dict[str, Facts]:
    """The facts of each shard; a request or two for each directory, and a few reads for each file without manifest."""
    by_directory: dict[str, list[str]] = {}
    for path in paths:
        by_directory.setdefault(storage.parent(path), []).append(path)
    facts: dict[str, Facts] = {}
    for directory, shards in by_directory.items():
        recorded = recorded_checksums(directory)
        unlisted = []
        for path in shards:
            checksum = recorded(path.rpartition("/")[2])
            if checksum is not None:
                facts[path] = Facts(_MANIFEST, checksum)
            else:
                unlisted.append(path)
        if storage.is_remote(directory):
            facts |= _facts_of_objects(directory, unlisted)
        else:
            facts |= _facts_of_files(unlisted)
    return facts


def _facts_of_files(paths: list[str]) -> dict[str, Facts]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(paths, pool.map(_facts_of_file, paths), strict=True))


def _facts_of_file(path: str) -> Facts:
    if not os.path.isfile(path):  # `data.max_skipped_rows` may allow that; to open a pipe would wait forever
        return Facts(_UNKNOWN, os.path.basename(path))
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest = hashlib.sha256(str(size).encode())
            for number in range(BLOCKS):
                file.seek(number * size // BLOCKS)
                digest.update(file.read(BLOCK_BYTES))
    except OSError:  # whoever reads the shard names the error
        return Facts(_UNKNOWN, os.path.basename(path))
    return Facts(_BLOCKS, digest.hexdigest())


def _facts_of_objects(directory: str, paths: list[str]) -> dict[str, Facts]:
    if not paths:
        return {}
    try:
        stats = storage.list_stats(directory, is_deep=False)
    except storage.AccessDenied as error:
        _log.warning("the contents of the shards are not compared with the contents at the start of the run: %s", error)
        stats = {}
    versions = f"versions in {directory}"  # a copy elsewhere has others
    return {path: _facts_of_object(path, stats.get(path), versions) for path in paths}


def _facts_of_object(url: str, stat: ObjectStat | None, versions: str) -> Facts:
    if stat is None:
        return Facts(_UNKNOWN, os.path.basename(url))
    if stat.checksum is not None:
        return Facts(stat.checksum.algorithm, f"{stat.size} {stat.checksum.value}")
    return Facts(versions, f"{stat.size} {stat.version}")
