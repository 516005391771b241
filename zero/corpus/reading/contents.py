"""What identifies the contents of a corpus, without reading its shards: a start costs no more for a larger corpus.

For each shard the first of these that there is:

- the SHA-256 in the manifest of its directory, which zero-prepare writes,
- in a bucket, what a list states: size and checksum, else size and version,
- on a disk, the size and a digest of a few blocks.

Reasons, and what is not noticed: docs/decisions/data-order.md.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from stat import S_ISREG
from typing import NamedTuple

import numpy as np

from zero.base.errors import UserError
from zero.corpus.format.index_files import Shards
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


def contents_of(shards: Shards, used: np.ndarray | None = None) -> Contents:
    """The contents of shards, which do not depend on their paths.

    Args:
      used: how many rows are used of each, (shards,); None: all.
    """
    facts = shard_facts(shards)
    # The text of a named tuple, as in the digests of saved cursors.
    lines = [
        f"Facts(known_by={known_by!r}, value={value!r}) {rows}"
        for (known_by, value), rows in zip(facts, shards.rows.tolist(), strict=True)
    ]
    known_by = "+".join(sorted({fact.known_by for fact in facts}))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    if used is None:
        used = shards.rows
    return Contents(int(used.sum()), known_by, digest)


def contents_on_one_host(
    index: str, shards: Shards, on_one_host: OnOneHost, used: np.ndarray | None = None
) -> Contents:
    """The contents of the shards of an index file, looked up on one host if they are in buckets."""
    if used is None:
        used = shards.rows
    rows = [shards.rows.tolist(), used.tolist()]
    look = functools.partial(contents_of, shards, used)
    return Contents(*looked_up(on_one_host, f"contents of {index}", shards.paths, look, given=rows))


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


def shard_facts(shards: Shards) -> list[Facts]:
    """The facts of each shard; a request or two for each folder, and a few reads for each file without manifest."""
    recorded_of, stats_of = functools.cache(recorded_checksums), functools.cache(_listed_folder)
    facts: list[Facts] = []
    unlisted: list[int] = []  # places of files without a manifest
    for _, files in shards.by_folder:
        folder = storage.parent(files[0])
        recorded = recorded_of(folder)
        is_remote = storage.is_remote(folder)
        versions = f"versions in {folder}"  # a copy elsewhere has others
        for path in files:
            checksum = recorded(path.rpartition("/")[2])
            if checksum is not None:
                facts.append(Facts(_MANIFEST, checksum))
            elif is_remote:
                facts.append(_facts_of_object(path, stats_of(folder).get(path), versions))
            else:
                unlisted.append(len(facts))
                facts.append(Facts(_UNKNOWN, ""))
    for place, found in zip(unlisted, _facts_of_files([shards.paths[place] for place in unlisted]), strict=True):
        facts[place] = found
    return facts


def _facts_of_files(paths: list[str]) -> list[Facts]:
    """Each thread reads a part of the files: a million calls of threads would take longer than the reading."""

    def of_part(thread: int) -> list[Facts]:
        return list(map(_facts_of_file, paths[thread::_THREADS]))

    with ThreadPoolExecutor(_THREADS) as pool:
        parts = itertools.zip_longest(*pool.map(of_part, range(_THREADS)))
        return list(itertools.chain.from_iterable(parts))[: len(paths)]


def _facts_of_file(path: str) -> Facts:
    unknown = Facts(_UNKNOWN, os.path.basename(path))
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait forever
    except OSError:  # `data.max_skipped_rows` may allow that; else whoever reads the shard names the error
        return unknown
    try:
        status = os.fstat(file)
        if not S_ISREG(status.st_mode):
            return unknown
        size = status.st_size
        digest = hashlib.sha256(str(size).encode())
        for number in range(BLOCKS):
            digest.update(os.pread(file, BLOCK_BYTES, number * size // BLOCKS))
    except OSError:
        return unknown
    finally:
        os.close(file)
    return Facts(_BLOCKS, digest.hexdigest())


def _listed_folder(folder: str) -> Mapping[str, ObjectStat]:
    """The files of a folder in a bucket; none if it may not be listed."""
    try:
        return storage.list_stats(folder, is_deep=False)
    except storage.AccessDenied as error:
        _log.warning("the contents of the shards are not compared with the contents at the start of the run: %s", error)
        return {}


def _facts_of_object(url: str, stat: ObjectStat | None, versions: str) -> Facts:
    if stat is None:
        return Facts(_UNKNOWN, os.path.basename(url))
    if stat.checksum is not None:
        return Facts(stat.checksum.algorithm, f"{stat.size} {stat.checksum.value}")
    return Facts(versions, f"{stat.size} {stat.version}")
