"""Checkpoints that any number of devices can read (orbax).

A checkpoint is one directory a step: `state`, whole logical arrays stored with their padding under the leaf's name, and
`meta`, JSON with the logical shapes and whatever the caller keeps beside them. It is written aside, synced, and then
renamed; in a bucket, where nothing can be renamed, a last file says that it is whole.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from zero.partition.collectives import Axis
from zero.partition.layout import Layout, PyTree
from zero.partition.state import global_shapes
from zero.runtime import storage
from zero.runtime.errors import UserError
from zero.runtime.hosts import agreement

PACKAGES = ("zero-pmap", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# What tensorstore's errors begin with when something other than the stored bytes is wrong.
OUTAGES = {"ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"}
OUTAGES |= {"UNAUTHENTICATED", "UNAVAILABLE", "UNKNOWN"}
TENSORSTORE_ERROR = re.compile(r"(?:(?P<code>[A-Z_]+): )?Error (?:opening|reading|decoding) ")
LEAF = re.compile(r'(?:Error reading|Metadata at) "([^"]+)/[^"/]+"')
_Result = TypeVar("_Result")
log = logging.getLogger(__name__)
logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax tells every step of a save, and what it raises anyway


class Damaged(UserError):
    """What is stored of a checkpoint is truncated, missing, or cannot be decoded."""


class _Save(NamedTuple):
    step: int
    size: int  # bytes
    started: float


class Checkpoints:
    """The checkpoints of one run: the newest `keep` of them and the best; a context manager that waits for the last.

    All hosts call every method together. What one of them cannot read, none of them takes.

    Args:
      directory: a local path or `gs://bucket/path`; made at the first save.
      keep: how many to keep besides the one with the lowest validation loss; None only reads, and leaves alone what
        another process may be writing there.
    """

    def __init__(self, directory: Path | str, keep: int | None) -> None:
        self.directory = str(directory) if str(directory).startswith("gs://") else Path(directory).absolute()
        self._keep = keep
        self._losses: dict[int, float] | None = None
        self._unreported: _Save | None = None
        self._is_stale = False  # what was to be deleted after a save that failed still stands
        self._committed: dict[int, float] = {}  # when each was; orbax asks for a class, so that is where this goes
        path: type = _LocalPath
        if storage.is_remote(storage.join(self.directory, "0")):
            path = _BucketPath
            import zero.runtime.checkpoints.orbax_buckets  # noqa: F401  of use where there is one, and a second to import
        self._arrays = ocp.PyTreeCheckpointHandler(use_compression=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=None if keep is None else _NewestAndBest(keep, self._known_losses),
            read_only=keep is None,
            create=False,
            cleanup_tmp_directories=keep is not None,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=_barrier,
                # Else threads wait minutes for a directory that could not be made, and the process for them at its end.
                create_directories_asynchronously=False,
            ),
            temporary_path_class=type("_Path", (path,), {"committed": self._committed}),
            lightweight_initialize=True,  # else it reads a file of each checkpoint, which may be torn
        )
        handlers = {"state": self._arrays}

        def open_place() -> ocp.CheckpointManager:
            return ocp.CheckpointManager(
                self.directory, item_names=("state", "meta"), item_handlers=handlers, options=options
            )

        try:
            try:
                self._manager = open_place()
            except FileNotFoundError:
                # A bucket's directory is gone with its last file: host 0 has just cleared away what was half written.
                self._manager = open_place()
        except Exception as error:
            if not storage.is_outage(error):
                raise
            raise UserError(f"{self.directory} cannot be read now: {_first_line(error)}") from error

    def steps(self) -> list[int]:
        """The steps that were saved, oldest first."""
        if self._is_stale:
            self._manager.reload()
            self._is_stale = False
        return sorted(self._manager.all_steps())

    def choose(self, asked: int | None) -> int:
        """The step that was asked for, or the newest.

        Raises:
          UserError: it is not here.
        """
        steps = self.steps()
        if not steps:
            raise UserError(f"{self.directory} holds no checkpoint")
        if asked is not None and asked not in steps:
            raise UserError(f"data.resume_step={asked}: {self.directory} holds steps {', '.join(map(str, steps))}")
        return steps[-1] if asked is None else asked

    def save(
        self, step: int, state: PyTree, layout: Layout, meta: dict[str, Any], *, validation_loss: float | None = None
    ) -> None:
        """Copies whole arrays, as `zero.to_global` labels them, to the host; writing goes on in the background.

        Beside `meta`, which is the caller's, `shapes`, `versions` and `validation_loss` are stored. A step below one
        that stands counts as the newest as long as this object lives.

        Raises:
          UserError: the step stands already, or storage did not take this checkpoint or the one before; what stood
            before still stands.
        """
        self.wait()
        if step in self.steps():
            raise UserError(f"{self.directory}: step {step} is saved already, and nothing is overwritten")
        arrays = {leaf.name: x for leaf, x in zip(layout.leaves, layout.treedef.flatten_up_to(state), strict=True)}
        meta = meta | {
            "shapes": {leaf.name: list(leaf.shape) for leaf in layout.leaves},
            "versions": {name: version(name) for name in PACKAGES},
            "validation_loss": validation_loss,
        }
        losses = self._known_losses()
        if validation_loss is not None and math.isfinite(validation_loss):
            losses[step] = validation_loss
        started = time.monotonic()
        self._committed.pop(step, None)  # of one that was set aside
        with self._write_errors():
            self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta)),
                force=True,  # else a step below one that stands is skipped, and only the result would tell
            )
        self._unreported = _Save(step, sum(x.nbytes for x in arrays.values()), started)

    def meta(self, step: int) -> dict[str, Any]:
        """What the caller kept beside the arrays, and `shapes`, the logical shape of each leaf.

        Raises:
          Damaged: it is missing or cannot be decoded.
          UserError: storage does not give it.
        """
        self.wait()
        return self._together(step, lambda: self._read_meta(step))

    def restore(self, step: int, layout: Layout, axis: Axis, *, within: str | None = None) -> PyTree:
        """Whole arrays for `zero.from_global`, cropped or padded to this layout, whatever N they were saved from.

        Args:
          step: of the checkpoint.
          layout: of the state, or of a part of it.
          axis: of the pmap that will use it.
          within: the part, as "params" for the weights alone.

        Raises:
          Damaged: what is stored is truncated, missing, or cannot be decoded.
          UserError: a leaf is missing, left over, or of another logical shape; or storage does not give it.
        """
        prefix = f"{within}/" if within else ""
        saved = {name: tuple(shape) for name, shape in self.meta(step)["shapes"].items()}
        wanted = {prefix + leaf.name: leaf.shape for leaf in layout.leaves}
        for name in dict.fromkeys([*wanted, *(name for name in saved if name.startswith(prefix))]):
            if saved.get(name) != wanted.get(name):
                raise UserError(
                    f"checkpoint {self.directory}, step {step}, leaf {name}: "
                    f"holds {saved.get(name, 'nothing')}, this run expects {wanted.get(name, 'nothing')}"
                )
        shapes = layout.treedef.flatten_up_to(global_shapes(layout, axis))
        targets = {prefix + leaf.name: x for leaf, x in zip(layout.leaves, shapes, strict=True)}
        how = {
            name: ocp.ArrayRestoreArgs(dtype=x.dtype, sharding=x.sharding, global_shape=x.shape, strict=False)
            for name, x in targets.items()
        }
        arrays = self._together(step, lambda: self._read_arrays(step, targets, how))
        return jax.tree.unflatten(layout.treedef, [arrays[prefix + leaf.name] for leaf in layout.leaves])

    def read(self, step: int, name: str) -> np.ndarray:
        """One leaf, whole on this host and without its padding; raises as `restore`."""
        shape = self.meta(step)["shapes"][name]
        how = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        padded = self._together(step, lambda: self._read_arrays(step, {name: 0}, how))[name]
        return padded[tuple(slice(length) for length in shape)]

    def set_aside(self, step: int) -> None:
        """Takes a damaged checkpoint out of the list, as STEP.damaged beside it; nothing of it is deleted.

        Raises:
          UserError: storage does not let this happen.
        """
        if self._keep is None:
            raise ValueError(f"{self.directory} was opened to be read")
        self._together(step, lambda: self._move_aside(step) if jax.process_index() == 0 else None)
        self._manager.reload()
        self._losses = None

    def check(self) -> None:
        """Raises what a save in the background has met, as `save` does, and logs what has become durable since."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when everything saved so far is on storage for good; raises as `save`, logs as `check`."""
        saved, self._unreported = self._unreported, None
        failure = None
        try:
            with self._write_errors():
                self._manager.wait_until_finished()
        except UserError as error:
            if saved is None or saved.step not in self._committed:
                raise
            failure = error
        if saved is not None and jax.process_index() == 0:  # the host that commits
            seconds = self._committed[saved.step] - saved.started
            log.info("checkpoint %d saved: %.2f GB in %.1f s", saved.step, saved.size / 1e9, seconds)
            if failure is not None:
                log.warning("older checkpoints than %d could not be deleted: %s", saved.step, failure.__cause__)

    def _known_losses(self) -> dict[int, float]:
        """The validation losses of the checkpoints that stand."""
        if self._losses is None:
            self._losses = {}
            for step in self.steps():
                try:
                    loss = self._read_meta(step).get("validation_loss")
                except Damaged as error:
                    log.warning("%s", error)
                    continue
                if loss is not None and math.isfinite(loss):
                    self._losses[step] = loss
        return self._losses

    def _read_meta(self, step: int) -> dict[str, Any]:
        file = storage.join(self.directory, f"{step}/meta/metadata")
        with self._read_errors(step, [file]):
            return storage.read(file, json.load)

    def _read_arrays(self, step: int, targets: PyTree, how: PyTree) -> PyTree:
        place = storage.join(self.directory, f"{step}/state")
        with self._read_errors(step, [file for file in storage.list_files(place) if _is_json(file)]):
            # Not through the manager, whose hosts wait for each other, and so for one that cannot read.
            with _patient_loops():
                return self._arrays.restore(
                    self._manager.directory / str(step) / "state",
                    args=ocp.args.PyTreeRestore(targets, restore_args=how, partial_restore=True),
                )

    def _move_aside(self, step: int) -> None:
        source = storage.join(self.directory, str(step))
        target, number = f"{source}.damaged", 1
        while storage.list_files(target):
            number += 1
            target = f"{source}.damaged-{number}"
        with self._write_errors():
            storage.move(source, target)
        log.warning("checkpoint %d set aside as %s", step, target)

    def _together(self, step: int, act: Callable[[], _Result]) -> _Result:
        """The result; or, on every host, the error that any of them met, so that all go on in the same way."""
        failure = None
        try:
            result = act()
        except UserError as error:
            failure = error
        if jax.process_count() > 1:
            failed, damaged = agreement.sum_over_hosts(failure is not None, isinstance(failure, Damaged))
            if failed:
                kind = Damaged if failed == damaged else UserError
                raise kind(failure or f"checkpoint {self.directory}, step {step}: another host could not read it")
        if failure is not None:
            raise failure
        return result

    @contextmanager
    def _read_errors(self, step: int, json_files: Sequence[str]) -> Iterator[None]:
        """Tells damage from an outage; whatever is certainly neither is left as it is."""
        where = f"checkpoint {self.directory}, step {step}"
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            for cause in _causes(error):
                if isinstance(cause, json.JSONDecodeError | UnicodeDecodeError):
                    file = next(filter(_is_torn, json_files), json_files[0])
                    raise Damaged(f"{where}: file {file} cannot be read: no JSON, {_first_line(cause)}") from error
                if isinstance(cause, FileNotFoundError):
                    raise Damaged(f"{where}: a file cannot be read: {_first_line(cause)}") from error
                if isinstance(cause, MemoryError) or storage.is_outage(cause):
                    raise UserError(f"{where} cannot be read now: {_first_line(cause)}") from error
                if isinstance(cause, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(cause):
                    raise UserError(f"{where} cannot be read now: {_first_line(cause)}") from error
                if isinstance(cause, ValueError) and (told := TENSORSTORE_ERROR.match(str(cause))):
                    if told["code"] in OUTAGES:
                        raise UserError(f"{where} cannot be read now: {_first_line(cause)}") from error
                    leaf = LEAF.search(str(cause))
                    what = f"leaf {leaf[1]}" if leaf else "a file"
                    raise Damaged(f"{where}: {what} cannot be read: {_first_line(cause)}") from error
            raise

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            # A full disk reaches us as OSError or ValueError, from a background thread.
            if not isinstance(error, ValueError) and not storage.is_outage(error):
                raise
            self._is_stale = True
            raise UserError(f"{self.directory}: the checkpoint could not be written: {_first_line(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except UserError as late:
            if error is None:
                raise
            log.error("%s", late)  # it must not hide what ended the block
        finally:
            self._manager.close()


@dataclass(frozen=True)
class _NewestAndBest:
    """Tells orbax which checkpoints stay. Its own policies know only losses that it stored, and it stores too few."""

    newest: int
    losses: Callable[[], dict[int, float]]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]  # in the order of saving
        losses = self.losses()
        best = min((step for step in steps if step in losses), key=lambda step: (losses[step], -step), default=None)
        return [step in steps[-self.newest :] or step == best for step in steps]


class _LocalPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Is renamed when all that it holds is synced; counts as committed when the rename is."""

    committed: ClassVar[dict[int, float]]

    async def finalize(self) -> None:
        await asyncio.to_thread(_sync, Path(self.get()))
        await super().finalize()  # writes two more files, which no reader needs, and renames
        await asyncio.to_thread(_sync, Path(self.get_final()))
        await asyncio.to_thread(_sync_one, Path(self.get_final()).parent)
        if self.get_final().name.isdigit():
            self.committed[int(self.get_final().name)] = time.monotonic()


class _BucketPath(ocp.path.atomicity.CommitFileTemporaryPath):
    """An object that was written is durable, and the one that commits comes last."""

    committed: ClassVar[dict[int, float]]

    async def finalize(self) -> None:
        await super().finalize()
        if self.get_final().name.isdigit():
            self.committed[int(self.get_final().name)] = time.monotonic()


def _barrier(*, key: str, timeout_ms: int) -> None:
    """Orbax's, but a host whose save has failed does not wait there for others, which wait for its part elsewhere."""
    if sys.exception() is None:
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


class _Loop(asyncio.SelectorEventLoop):
    """Ends when all its tasks have."""

    def close(self) -> None:
        if not self.is_closed() and (pending := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        super().close()


@contextmanager
def _patient_loops() -> Iterator[None]:
    """Orbax closes its loop at the first error; each read that is still under way would then print a traceback."""
    before = asyncio.new_event_loop
    setattr(asyncio, "new_event_loop", _Loop)  # noqa: B010, mypy has it for constant
    try:
        yield
    finally:
        setattr(asyncio, "new_event_loop", before)  # noqa: B010


def _sync(directory: Path) -> None:
    for place, _, names in os.walk(directory):
        for name in names:
            _sync_one(Path(place, name))
        _sync_one(Path(place))


def _sync_one(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_json(file: str) -> bool:
    return file.endswith("/_METADATA") or "/array_metadatas/" in file


def _is_torn(file: str) -> bool:
    try:
        storage.read(file, json.load)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return True
    return False


def _first_line(error: BaseException) -> str:
    """Without what tensorstore adds in brackets: the whole specification, and lines of its source."""
    return (str(error) or type(error).__name__).splitlines()[0].partition(" [")[0]
