"""Checkpoints that any number of devices can read (orbax).

A checkpoint is a directory per step: `state`, whole logical arrays stored with their padding under the leaf's name, and
`meta`, JSON with the logical shapes and the caller's metadata. It is written under a temporary name, synced, and then
renamed. Buckets have no rename, so there a last file marks it as complete.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import jax
import numpy as np

from zero.base.errors import UserError
from zero.base.keys import key
from zero.checkpoints.damage import (
    DamagedCheckpoint,
    MissingCheckpoint,
    move_aside,
    read_errors,
    write_errors,
)
from zero.checkpoints.metadata import (
    check_leaves,
    checkpoint_name,
    complete_metadata,
    metadata_file,
    read_metadata,
    retained,
    with_checksum,
)
from zero.checkpoints.orbax_manager import array_handler, check_path, open_manager
from zero.checkpoints.quiet_orbax import quiet_loggers
from zero.checkpoints.reading import is_deleted, on_all_hosts
from zero.checkpoints.retention import Retention, Saved
from zero.files import storage
from zero.hosts import agreement
from zero.partition.checksums import array_checksum
from zero.partition.collectives.axis import Axis
from zero.partition.global_arrays import global_shapes
from zero.partition.layout import Layout, PyTree
from zero.record.run_files import committed_steps

if TYPE_CHECKING:  # orbax is imported on first use, so that a fresh start of one process does not wait for it
    import orbax.checkpoint as ocp

_Result = TypeVar("_Result")
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckpointKeys:
    """Which checkpoint is read: a key of section `data`."""

    resume_step: int | None = key(
        None, None, "The step whose checkpoint is resumed or used; null: the newest.", anew=True
    )


class _PendingSave(NamedTuple):
    step: int
    size: int  # bytes
    started: float


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for the last save at its exit.

    All hosts call every method together; if one host fails to read, all raise.

    Args:
      directory: a local path or `gs://bucket/path`; made at the first save.
      keep: how many of the newest to keep, besides the one with the lowest validation loss, or a `Retention`; None only
        reads, also while another process writes there.
      from_host: whether the state fills the host's memory. `save` then copies a few GB at a time, and returns when all
        are written.
      check_owner: raises UserError if another process has taken the directory over. A save in progress is then not
        committed, nothing is deleted afterwards, and no checkpoint is changed.
    """

    def __init__(
        self,
        directory: Path | str,
        keep: int | Retention | None,
        *,
        from_host: bool = False,
        check_owner: Callable[[], None] | None = None,
    ) -> None:
        self.directory = str(directory) if str(directory).startswith("gs://") else Path(directory).absolute()
        self._keep = Retention(keep) if isinstance(keep, int) else keep
        self._from_host = from_host
        self._check_owner = check_owner or (lambda: None)
        self._saved: dict[int, Saved] | None = None
        self._pending: _PendingSave | None = None
        self._is_stale = False  # after a failed save, orbax's list may lack steps that still exist
        self._commit_times: dict[int, float] = {}
        self._leaves: list[str] = []  # of the save in progress
        if keep is not None:
            check_path(self.directory)
        with ExitStack() as stack:
            stack.enter_context(quiet_loggers())
            self._cleans_up = keep is not None and not self._is_absent()  # later unfinished saves belong to another run
            if not self._is_absent():
                self._manager  # noqa: B018, opens the directory
            self._until_closed = stack.pop_all()

    def _is_absent(self) -> bool:
        """Whether a local directory is still empty. Several hosts open it together, so for them it never is."""
        if jax.process_count() > 1 or not isinstance(self.directory, Path):
            return False
        try:
            return not (self.directory.exists() and any(self.directory.iterdir()))
        except PermissionError:
            return False  # it exists; opening it names what cannot be read

    @property
    def _is_open(self) -> bool:
        return "_manager" in vars(self)

    @cached_property
    def _arrays(self) -> ocp.PyTreeCheckpointHandler:
        return array_handler(from_host=self._from_host)

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        return open_manager(
            self.directory,
            self._keep and dataclasses.replace(self._keep, saved=self._known),
            self._arrays,
            cleans_up=self._cleans_up,
            commit_times=self._commit_times,
            leaves=self._leaves,
            check_owner=self._check_owner,
        )

    def steps(self) -> list[int]:
        """The saved steps, oldest first.

        If another process may be training, all hosts get the steps that host 0 sees at this call.
        """
        if self._keep is None:
            return [int(step) for step in agreement.broadcast("steps", self._listed()).split()]
        if not self._is_open and self._is_absent():
            return []
        if self._is_stale:
            self._manager.reload()
            self._is_stale = False
        return sorted(self._manager.all_steps())

    def _listed(self) -> str:
        """The steps in the directory now, as text; empty on all hosts except host 0."""
        if not agreement.is_host_0():
            return ""
        return " ".join(map(str, committed_steps(self.directory)))

    def choose(self, step: int | None) -> int:
        """This step, or the newest if it is None.

        Raises:
          MissingCheckpoint: there is no such checkpoint.
        """
        steps = self.steps()
        if not steps:
            raise MissingCheckpoint(f"{self.directory} has no checkpoint")
        if step is not None and step not in steps:
            raise MissingCheckpoint(
                f"data.resume_step={step}: {self.directory} holds steps {', '.join(map(str, steps))}"
            )
        if step is not None:
            return step
        return steps[-1]

    def save(
        self, step: int, state: PyTree, layout: Layout, meta: dict[str, Any], *, validation_loss: float | None = None
    ) -> None:
        """Copies whole arrays, as `zero.to_global` labels them, to the host, and writes them in the background.

        Adds `shapes`, `dtypes`, `versions`, `format`, `validation_loss` and a checksum of all these to the caller's
        `meta`. Retention goes by the order of saving, not by step.

        Raises:
          UserError: the step already exists, or this or the previous save failed; older checkpoints are intact.
        """
        self.wait()
        if step in self.steps():
            raise UserError(f"{self.directory}: step {step} is already saved, and checkpoints are never overwritten")
        arrays = {leaf.name: x for leaf, x in zip(layout.leaves, layout.treedef.flatten_up_to(state), strict=True)}
        dtypes = {name: x.dtype.name for name, x in arrays.items()}
        meta = complete_metadata(meta, layout, dtypes, validation_loss)
        self._known()[step] = retained(meta)
        import orbax.checkpoint as ocp

        started = time.monotonic()
        self._commit_times.pop(step, None)  # from a checkpoint that was set aside
        self._leaves[:] = arrays
        with self._write_errors():
            self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta)),
                force=True,  # else orbax skips a step lower than an existing one, without an error
            )
        self._pending = _PendingSave(step, sum(x.nbytes for x in arrays.values()), started)
        if self._from_host:
            self.wait()

    def set_validation_loss(self, step: int, loss: float) -> None:
        """Adds the validation loss to a checkpoint that was saved without it; retention uses it from now on.

        The metadata file is replaced as a whole.

        Raises:
          DamagedCheckpoint: the metadata cannot be read.
          UserError: storage fails, or another process has taken the directory over.
        """
        meta = with_checksum(self.meta(step) | {"validation_loss": loss})
        self._known()[step] = retained(meta)

        def replace() -> None:
            if jax.process_index() == 0:
                self._check_owner()
                file = metadata_file(self.directory, step)
                storage.remove_unfinished(storage.parent(file))  # left by a process that was killed here
                with write_errors(self.directory):
                    storage.write(file, json.dumps(meta).encode())

        on_all_hosts(self._name(step), replace)

    def meta(self, step: int) -> dict[str, Any]:
        """The caller's metadata, and `shapes`, the logical shape of each leaf, keyed by path.

        Raises:
          MissingCheckpoint: another process, which trains, has deleted the checkpoint.
          DamagedCheckpoint: it is missing or cannot be decoded.
          UserError: it is of another format, or storage fails for the moment.
        """
        self.wait()
        return self._read(step, lambda: read_metadata(self.directory, step))

    def as_saved(self, step: int, layout: Layout) -> Layout:
        """This layout of a state with the dtypes that the checkpoint holds; raises as `meta`."""
        dtypes = self.meta(step)["dtypes"]
        saved = (jax.numpy.dtype(dtypes.get(leaf.name, leaf.dtype)) for leaf in layout.leaves)
        leaves = (dataclasses.replace(leaf, dtype=dtype) for leaf, dtype in zip(layout.leaves, saved, strict=True))
        return dataclasses.replace(layout, leaves=tuple(leaves))

    def restore(
        self,
        step: int,
        layout: Layout,
        axis: Axis,
        *,
        within: str | None = None,
        targets: Sequence[jax.ShapeDtypeStruct] | None = None,
    ) -> PyTree:
        """Whole arrays for `zero.from_global`, cropped or padded to this layout, from any number of devices.

        Floats are cast to the layout's dtypes. Moments in 8 bits are restored `as_saved`, and converted later.
        With `within` the layout is of this subtree of the state, such as "params". `targets` are shapes and places of
        the leaves, by default `zero.global_shapes`.

        Raises:
          MissingCheckpoint: another process, which trains, has deleted the checkpoint.
          DamagedCheckpoint: the stored data is truncated, missing, or cannot be decoded.
          UserError: a leaf is missing, left over, of another logical shape, or of a dtype that no cast converts; or
            storage fails for the moment.
        """
        prefix = "" if within is None else f"{within}/"
        meta = self.meta(step)
        check_leaves(self._name(step), meta, layout, prefix)
        import orbax.checkpoint as ocp

        paths = [prefix + leaf.name for leaf in layout.leaves]
        if targets is None:
            targets = layout.leaves_of(global_shapes(layout, axis))
        by_path = dict(zip(paths, targets, strict=True))
        restore_args = {
            name: ocp.ArrayRestoreArgs(dtype=x.dtype, sharding=x.sharding, global_shape=x.shape, strict=False)
            for name, x in by_path.items()
        }
        arrays = self._read(step, lambda: self._read_arrays(step, by_path, restore_args))
        return jax.tree.unflatten(layout.treedef, [arrays[path] for path in paths])

    def read(self, step: int, name: str) -> np.ndarray:
        """One leaf, whole on this host and without its padding; raises as `restore`.

        If the metadata has `checksums`, as those of a run, it is compared with its own.
        """
        import orbax.checkpoint as ocp

        meta = self.meta(step)
        shape = meta["shapes"][name]
        restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        padded = self._read(step, lambda: self._read_arrays(step, {name: 0}, restore_args))[name]
        array: np.ndarray = padded[tuple(slice(length) for length in shape)]
        saved = meta.get("checksums", {}).get(name)
        if saved is not None and array_checksum(array) != saved:
            raise DamagedCheckpoint(f"{self._name(step)}: {name} differs from what was saved")
        return array

    def set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint to STEP.damaged; nothing of it is deleted, and its step may be saved again.

        Raises:
          UserError: it could not be renamed, or another process has taken the directory over.
        """
        if self._keep is None:
            raise ValueError(f"{self.directory} is open for reading only")

        def rename() -> None:
            if jax.process_index() == 0:
                self._check_owner()
                log.warning("moved checkpoint %d aside to %s", step, move_aside(self.directory, step))

        on_all_hosts(self._name(step), rename)
        self._manager.reload()
        self._saved = None

    def reload(self) -> None:
        """Looks for checkpoints again, after the directory was removed and made again."""
        if self._is_open:
            self._manager.reload()
        self._saved = None

    def check(self) -> None:
        """Raises the error of a background save that has failed, as `save` does; logs one that has finished."""
        if self._is_open and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns once every save so far is durable; raises as `save`, logs as `check`."""
        if not self._is_open:
            return
        saved, self._pending = self._pending, None
        failure = None
        try:
            with self._write_errors():
                self._manager.wait_until_finished()
        except UserError as error:
            if saved is None or saved.step not in self._commit_times:
                raise
            failure = error
        if saved is not None and jax.process_index() == 0:  # the host that commits
            seconds = self._commit_times[saved.step] - saved.started
            log.info("checkpoint %d saved: %.2f GB in %.1f s", saved.step, saved.size / 1e9, seconds)
            if failure is not None:
                log.warning("checkpoints older than %d could not be deleted: %s", saved.step, failure.__cause__)

    def _known(self) -> dict[int, Saved]:
        """What retention depends on of existing checkpoints whose metadata can be read, by step."""
        if self._saved is None:
            steps = self.steps()
            found = agreement.on_host_0("metadata of checkpoints", lambda: self._read_retained(steps))
            self._saved = {step: Saved(*saved) for step, *saved in found}
        return self._saved

    def _read_retained(self, steps: Sequence[int]) -> list[tuple[int, float | None, float | None]]:
        found = []
        for step in steps:
            try:
                found.append((step, *retained(read_metadata(self.directory, step))))
            except DamagedCheckpoint as error:
                log.warning("%s", error)
        return found

    def _read_arrays(self, step: int, targets: PyTree, restore_args: PyTree) -> PyTree:
        import orbax.checkpoint as ocp

        with read_errors(self._name(step), [storage.join(self.directory, f"{step}/state/_METADATA")]):
            # Not through the manager, whose hosts wait for each other, and so for one that cannot read.
            return self._arrays.restore(
                self._manager.directory / str(step) / "state",
                args=ocp.args.PyTreeRestore(targets, restore_args=restore_args, partial_restore=True),
            )

    def _name(self, step: int) -> str:
        return checkpoint_name(self.directory, step)

    def _read(self, step: int, action: Callable[[], _Result]) -> _Result:
        """The result of reading a step, on all hosts. What another process has deleted is missing, not damaged."""
        try:
            return on_all_hosts(self._name(step), action)
        except DamagedCheckpoint as error:
            if self._keep is not None or not is_deleted(self.directory, step):
                raise
            raise MissingCheckpoint(
                f"{self._name(step)} was deleted while it was being read, by the run that trains there; to keep more "
                "checkpoints, set data.keep_checkpoints or data.keep_every"
            ) from error

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            with write_errors(self.directory):
                yield
        except UserError:
            self._is_stale = True
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with self._until_closed:
            try:
                self.wait()
            except UserError as late:
                self._close(late)
                if error is None:
                    raise
                log.error("%s", late)  # raised, it would hide the error that ended the block
            else:
                self._close(error)

    def _close(self, known: BaseException | None) -> None:
        """Closes orbax's manager, which may raise the error of a background save again, or another one of that save."""
        if not self._is_open:
            return
        try:
            with self._write_errors():
                self._manager.close()
        except UserError:
            if known is None:
                raise
