"""Conditions for orbax to commit a checkpoint: read back, synced, then renamed."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import orbax.checkpoint as ocp
import tensorstore as ts


def temporary_path_class(
    is_remote: bool, commit_times: dict[int, float], leaves: list[str], check_owner: Callable[[], None]
) -> type:
    """The class of orbax's temporary directories.

    It adds `time.monotonic()` of each commit to `commit_times`, by step. The save fails if one of `leaves`, names of
    its leaves, cannot be read back, or if `check_owner` raises, which is called just before the commit.
    """
    base: type = _BucketPath if is_remote else _LocalPath
    # Orbax takes a class, not an instance.
    attributes = {"commit_times": commit_times, "leaves": leaves, "check_owner": staticmethod(check_owner)}
    return type("TemporaryPath", (base,), attributes)


class _LocalPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Renamed once everything in it is synced; committed once the rename is synced."""

    commit_times: ClassVar[dict[int, float]]
    leaves: ClassVar[list[str]]

    async def finalize(self) -> None:
        if _is_whole(self):
            await asyncio.to_thread(self.check_owner)  # else it would be committed where the directory was
        await _check_merged(self)
        await asyncio.to_thread(_fsync_tree, Path(self.get()))
        await super().finalize()  # writes two more files, which no reader needs, and renames
        await asyncio.to_thread(_fsync_tree, Path(self.get_final()))
        await asyncio.to_thread(_fsync, Path(self.get_final()).parent)
        _record_commit(self)


class _BucketPath(ocp.path.atomicity.CommitFileTemporaryPath):
    """Uploaded objects are durable, and the one that marks the commit is uploaded last."""

    commit_times: ClassVar[dict[int, float]]
    leaves: ClassVar[list[str]]

    @classmethod
    async def validate(cls, temporary_path: Any) -> None:
        """Only a step is an unfinished one: orbax removes those, and would remove any folder beside the checkpoints."""
        if not temporary_path.name.isdigit():
            raise ocp.path.atomicity.ValidationError(f"{temporary_path} is not a step")
        await super().validate(temporary_path)

    async def finalize(self) -> None:
        await _check_merged(self)
        if _is_whole(self):
            await asyncio.to_thread(self.check_owner)
        await super().finalize()
        _record_commit(self)


async def _check_merged(path: Any) -> None:
    """Checks the leaves in the merged files of all hosts: orbax does not notice if it has merged none.

    Raises:
      ValueError: some are missing.
    """
    if _is_whole(path):
        base = {"driver": "file", "path": f"{path.get()}/state/"}
        if in_bucket := re.fullmatch("gs://([^/]+)/(.*)", str(path.get())):
            bucket, name = in_bucket.groups()
            base = {"driver": "gcs", "bucket": bucket, "path": f"{name}/state/"}
        context = ocp.type_handlers.get_ts_context()
        store = await ts.KvStore.open({"driver": "ocdbt", "base": base}, context=context)
        merged = {os.path.dirname(key) for key in await store.list()}
        if missing := [name for name in path.leaves if name.encode() not in merged]:
            raise ValueError(f"read back before it was committed, leaves {', '.join(sorted(missing))} are missing")


def _is_whole(path: Any) -> bool:
    return str(path.get_final().name).isdigit()  # orbax also finalizes the items of a checkpoint


def _record_commit(path: Any) -> None:
    if _is_whole(path):
        path.commit_times[int(path.get_final().name)] = time.monotonic()


def _fsync_tree(directory: Path) -> None:
    for place, _, names in os.walk(directory):
        for name in names:
            _fsync(Path(place, name))
        _fsync(Path(place))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def barrier_unless_failing(*, key: str, timeout_ms: int) -> None:
    """Orbax's barrier between hosts, skipped by a host whose save has failed: it would wait minutes for the others."""
    if sys.exception() is None:
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)
