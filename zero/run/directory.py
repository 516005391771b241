"""The directory of a run in progress: its files, its checkpoints and their mirror, opened and locked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax

from zero.checkpoints import emergency, manager, retention
from zero.checkpoints.emergency import EmergencyCheckpoints
from zero.checkpoints.manager import Checkpoints
from zero.corpus.reading.keys import SetKeys
from zero.files import storage
from zero.hosts import agreement
from zero.job.job import Job
from zero.partition.layout import make_grouped_layout
from zero.partition.memory import memory_of
from zero.record import run_files
from zero.record.metrics_file import read_metrics
from zero.record.ownership import locked, owned
from zero.run.resume import check_new, write_command, write_lineage, write_start


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run in progress; host 0 writes its files.

    Attributes:
      is_fork: whether the run continues the checkpoint of another run here.
      emergency: the emergency checkpoints; None if they are off.
      check_owner: raises UserError if another process has taken the checkpoints over; None except on host 0.
    """

    path: Path
    is_fork: bool
    checkpoints: Checkpoints
    emergency: EmergencyCheckpoints | None
    check_owner: Callable[[], None] | None = None

    def mirror(self) -> None:
        """Copies the files that a resume needs next to the checkpoints, if those are outside the directory.

        Raises:
          UserError: another process has taken the checkpoints over.
        """
        if self.check_owner is not None:
            self.check_owner()
        if jax.process_index() == 0:
            run_files.mirror(self.path, self.checkpoints.directory)

    def write_start(self, record: dict[str, Any], job: Job, step: int) -> None:
        """On host 0, writes the configuration and the layout with its memory table.

        A fork begins with the metrics of its origin up to `step`.

        Args:
          record: the whole configuration as nested dictionaries.
        """
        if jax.process_index() != 0:
            return
        if self.is_fork:
            lines = read_metrics(Path(str(record["resume"])) / run_files.METRICS_FILE)
            inherited = [json.dumps(line) + "\n" for line in lines if line["step"] <= step]
            storage.write(self.path / run_files.METRICS_FILE, "".join(inherited).encode())
        write_command(self.path, record["resume"])
        write_start(self.path, step)
        run_files.save_config(self.path, record)
        summary = _layout_summary(job, has_average=record["training"]["ema"] is not None)
        storage.write(self.path / run_files.LAYOUT_FILE, summary.encode())

    def begin_lineage(self) -> None:
        """Names the emergency checkpoints that the next start may use, here and in the mirror; removes all others."""
        if jax.process_index() == 0:
            write_lineage(self.path, self.emergency)
        self.mirror()
        if self.emergency is not None:
            self.emergency.remove_earlier()


@dataclass(frozen=True)
class Keys(SetKeys, run_files.Keys, manager.Keys, retention.Keys):
    """The keys of section `data` for opening a run directory: where checkpoints are, and which are kept."""


@contextmanager
def open_directory(
    path: Path, data: Keys, protecting: emergency.Keys, job: Job, *, resume: str | None, is_fork: bool
) -> Iterator[RunDirectory]:
    """Locks the directory of a run and opens its checkpoints; all hosts call it.

    Args:
      resume: the run that is resumed, if any.

    Raises:
      UserError: another process trains here, hosts do not share the checkpoints, or a fresh start would overwrite
        another run.
    """
    with ExitStack() as stack:
        checkpoint_path = run_files.checkpoint_directory(path, data.bucket_path, data.checkpoint_directory)
        if resume is None or is_fork:
            check_new(resume, data.resume_step, path, checkpoint_path)
        check_owner = None
        if jax.process_index() == 0:
            stack.enter_context(locked(path, "choose another hydra.run.dir"))
            check_owner = stack.enter_context(owned(checkpoint_path, str(path)))
            run_files.remove_unfinished(path, checkpoint_path)
        agreement.check_shared("data.checkpoint_directory", checkpoint_path)
        in_memory = None  # opened before the durable checkpoints, so that they finish their last save before it closes
        if protecting.emergency_steps is not None:
            directory = Path(protecting.emergency_directory)
            durable_steps = partial(run_files.committed_steps, checkpoint_path)
            size = asdict(job.model.config)
            in_memory = EmergencyCheckpoints(
                directory, checkpoint_path, durable_steps, size, job.layout, job.model.axis
            )
            stack.enter_context(in_memory)
        from_host = job.storage.host_bytes > 0
        checkpoints = Checkpoints(checkpoint_path, data.retention(), from_host=from_host, check_owner=check_owner)
        stack.enter_context(checkpoints)
        yield RunDirectory(path, is_fork, checkpoints, in_memory, check_owner)


def _layout_summary(job: Job, has_average: bool) -> str:
    """The layout of the parameters, and the bytes per device at each stage."""
    model = job.model
    tx = job.tx
    if has_average:  # counted as optimizer state
        tx = optax.GradientTransformation(lambda params: (job.tx.init(params), params), job.tx.update)
    shapes = model.sharded_layout.shapes()
    in_groups = make_grouped_layout(shapes, model.axis.shards, **model.layout_options)
    table = memory_of(in_groups, tx, [model.compute_dtype])
    frozen = "" if model.tuning is None else f"frozen: {model.frozen_layout}\n\n"
    return (
        f"{model.layout}\n\n{frozen}bytes per device without activations, of parameters that are trained; this run is "
        f"at stage {model.stage}\n{table}\n"
    )
