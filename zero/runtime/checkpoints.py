"""Checkpoints that any number of devices can read (orbax).

A checkpoint is one directory a step: `state`, whole logical arrays stored with their padding under the leaf's name, and
`meta`, JSON with the logical shapes and whatever the caller keeps beside them. It is written aside and then renamed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from zero.partition.collectives import Axis
from zero.partition.layout import Layout, PyTree
from zero.partition.state import global_shapes
from zero.runtime import UserError

logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax tells every step of a save, and what it raises anyway


class Checkpoints:
    """The checkpoints of one run, newest `keep` of them; a context manager that waits for the last save.

    Args:
      directory: a local path or `gs://bucket/path`; made at the first save.
      keep: how many to keep; None only reads, and leaves alone what another process may be writing there.
    """

    def __init__(self, directory: Path | str, keep: int | None) -> None:
        self.directory = str(directory) if str(directory).startswith("gs://") else Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_names=("state", "meta"),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                read_only=keep is None,
                create=False,
                cleanup_tmp_directories=keep is not None,
                enable_async_checkpointing=True,
            ),
        )

    def steps(self) -> list[int]:
        """The steps that were saved, oldest first."""
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

    def save(self, step: int, state: PyTree, layout: Layout, meta: dict[str, Any]) -> None:
        """Copies whole arrays, as `zero.to_global` labels them, to the host; writing goes on in the background.

        Raises:
          UserError: storage did not take this checkpoint or the one before; what stood before still stands.
        """
        arrays = {leaf.name: x for leaf, x in zip(layout.leaves, layout.treedef.flatten_up_to(state), strict=True)}
        shapes = {leaf.name: list(leaf.shape) for leaf in layout.leaves}
        with self._write_errors():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave({"shapes": shapes, **meta})
                ),
            )

    def meta(self, step: int) -> dict[str, Any]:
        """What the caller kept beside the arrays, and `shapes`, the logical shape of each leaf."""
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, step: int, layout: Layout, axis: Axis, *, within: str | None = None) -> PyTree:
        """Whole arrays for `zero.from_global`, cropped or padded to this layout, whatever N they were saved from.

        Args:
          step: of the checkpoint.
          layout: of the state, or of a part of it.
          axis: of the pmap that will use it.
          within: the part, as "params" for the weights alone.

        Raises:
          UserError: a leaf is missing, left over, or of another logical shape.
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
        restore_args = {
            name: ocp.ArrayRestoreArgs(dtype=x.dtype, sharding=x.sharding, global_shape=x.shape, strict=False)
            for name, x in targets.items()
        }
        arrays = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(targets, restore_args=restore_args, partial_restore=True)
            ),
        )["state"]
        return jax.tree.unflatten(layout.treedef, [arrays[prefix + leaf.name] for leaf in layout.leaves])

    def read(self, step: int, name: str) -> np.ndarray:
        """One leaf, whole on this host and without its padding."""
        shape = self.meta(step)["shapes"][name]
        how = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        item = ocp.args.PyTreeRestore({name: 0}, restore_args=how, partial_restore=True)
        padded = self._manager.restore(step, args=ocp.args.Composite(state=item))["state"][name]
        return padded[tuple(slice(length) for length in shape)]

    def wait(self) -> None:
        """Returns when everything saved so far is on storage; raises as `save`."""
        with self._write_errors():
            self._manager.wait_until_finished()

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # a full disk reaches us as either, from a background thread
            reason = str(error).splitlines()[0]
            raise UserError(f"{self.directory}: the checkpoint could not be written: {reason}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._manager.close()
