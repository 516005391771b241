"""Orbax's manager of checkpoints, opened for one directory."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zero.base.errors import Unavailable, UserError
from zero.checkpoints.damage import without_brackets
from zero.checkpoints.quiet_orbax import drain_loops_of_orbax
from zero.checkpoints.retention import Retention
from zero.files import storage

if TYPE_CHECKING:  # orbax is imported where it is used: a fresh start of one process does not wait for it
    import orbax.checkpoint as ocp

COPIED_GB = 8  # of a state that fills the host's memory, at a time


def check_path(directory: Path | str) -> None:
    """Raises UserError for a path that cannot be written to.

    Orbax lists directories by patterns, which it makes of their paths; tensorstore takes only UTF-8.
    """
    if re.search(r"[*?\[\\\ud800-\udfff]", str(directory)):
        raise UserError(f"{str(directory)!r}: expected a path in UTF-8 without *, ?, [ or a backslash")


def array_handler(*, from_host: bool) -> ocp.PyTreeCheckpointHandler:
    """Writes and reads the arrays of a checkpoint.

    Without orbax's files that describe the arrays of each host, which nothing here needs: at a restore each host would
    read those of all, and at a save host 0.

    Args:
      from_host: whether what is saved fills the host's memory; then a few GB are copied at a time.
    """
    import orbax.checkpoint as ocp

    of_arrays: dict[str, Any] = {"array_metadata_store": None}
    of_all: dict[str, Any] = {"use_compression": False}
    if from_host:
        # Otherwise each copy of the state would write a part of an array, which a device would have to cut.
        of_arrays["use_replica_parallel"] = False
        of_all["save_device_host_concurrent_gb"] = COPIED_GB
    arrays = ocp.type_handlers.ArrayHandler(**of_arrays)
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, **of_all)


def open_manager(
    directory: Path | str,
    retention: Retention | None,
    arrays: ocp.PyTreeCheckpointHandler,
    *,
    cleans_up: bool,
    commit_times: dict[int, float],
    leaves: list[str],
    check_owner: Callable[[], None],
) -> ocp.CheckpointManager:
    """The manager of a directory that exists.

    Args:
      retention: which checkpoints are kept; None only reads.
      arrays: of `array_handler`.
      cleans_up: whether unfinished saves are removed.
      commit_times: gets the time of each commit, by step.
      leaves: the names of the leaves of the save under way.
      check_owner: raises UserError before a commit if another process has taken the directory over.

    Raises:
      Unavailable: the bucket cannot be read for the moment.
    """
    import orbax.checkpoint as ocp

    from zero.checkpoints.orbax_commit import barrier_unless_failing, temporary_path_class

    drain_loops_of_orbax()
    is_remote = storage.is_remote(directory)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=retention,
        read_only=retention is None,
        create=False,
        cleanup_tmp_directories=cleans_up,
        enable_async_checkpointing=True,
        async_options=ocp.AsyncOptions(
            barrier_sync_fn=barrier_unless_failing,
            # Otherwise threads wait minutes for a directory that could not be created, and the exit of the process
            # waits for them.
            create_directories_asynchronously=False,
        ),
        temporary_path_class=temporary_path_class(is_remote, commit_times, leaves, check_owner),
        lightweight_initialize=True,  # otherwise it reads a file of each checkpoint, which may be damaged
    )

    def create() -> ocp.CheckpointManager:
        return ocp.CheckpointManager(
            directory, item_names=("state", "meta"), item_handlers={"state": arrays}, options=options
        )

    try:
        with _patient_buckets() if is_remote else nullcontext():
            try:
                return create()
            except FileNotFoundError:
                # A directory in a bucket disappears with its last file: host 0 has just deleted an unfinished save.
                return create()
    except Exception as error:
        if not storage.is_outage(error):
            raise
        raise Unavailable(f"{directory} cannot be read now: {without_brackets(error)}") from error


def _patient_buckets() -> AbstractContextManager[None]:
    from zero.checkpoints.orbax_buckets import patient_buckets  # takes a second to import

    return patient_buckets()
