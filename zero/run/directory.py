"""The directory of a run in progress: its files, its checkpoints and their mirror, opened and locked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax

from zero.base.errors import Unavailable, UserError
from zero.checkpoints.emergency import EmergencyCheckpoints, EmergencyKeys
from zero.checkpoints.manager import CheckpointKeys, Checkpoints
from zero.checkpoints.retention import RetentionKeys
from zero.corpus.reading.keys import SetKeys
from zero.files import storage
from zero.hosts import agreement
from zero.job.job import Job
from zero.partition.layout import make_grouped_layout
from zero.partition.memory import memory_of
from zero.record import run_files
from zero.record.metrics_file import copy_lines
from zero.record.ownership import Claim, locked, owned, reopen_logs
from zero.record.run_files import CheckpointDirectoryKeys
from zero.run.resume import check_new, write_command, write_lineage, write_start

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run in progress; host 0 writes its files.

    Attributes:
      is_fork: whether the run continues the checkpoint of another run here.
      emergency: the emergency checkpoints; None if they are off.
      check_owner: raises UserError if another process has taken the checkpoints over, or the directory was renamed or
        removed; None except on host 0.
      claims: the locks of the directory and of its checkpoints; none except on host 0.
    """

    path: Path
    is_fork: bool
    checkpoints: Checkpoints
    emergency: EmergencyCheckpoints | None
    check_owner: Callable[[], None] | None = None
    claims: tuple[Claim, ...] = ()

    def was_removed(self, record: dict[str, Any], job: Job, step: int) -> bool:
        """Whether the directory was removed during the run, or its configuration; both are then here again.

        The next checkpoint is whole where the run was started; earlier ones and the metrics are gone. Host 0 alone
        knows; `begin_again` follows on all hosts, before that checkpoint.

        Args:
          record, job, step: as `write_start` has them.

        Raises:
          UserError: it was renamed, or another process has used its name since.
          Unavailable: several hosts were saving there: the others wait for a commit that cannot come.
        """
        removed = [claim for claim in self.claims if claim.is_removed()]
        if not removed and (not self.claims or (self.path / run_files.CONFIG_FILE).exists()):
            return False
        try:
            self.checkpoints.wait()  # what it began to save is not committed
        except UserError as error:
            if jax.process_count() > 1:
                raise Unavailable(
                    f"{self.path} was removed while {jax.process_count()} hosts saved a checkpoint there: all exit, "
                    "and no checkpoint is left; start the run again"
                ) from error
            log.error("%s", error)
        for claim in removed:
            claim.take_again()
        reopen_logs(self.path)
        log.error(
            "%s was removed while this process trained there: its checkpoints and metrics so far are gone; step %d is "
            "saved there with the configuration, and the run continues",
            self.path,
            step,
        )
        self.write_start(record, job, step)
        write_lineage(self.path, self.emergency)
        return True

    def begin_again(self) -> None:
        """On all hosts, after `was_removed` on host 0: logs go on, and earlier checkpoints are forgotten."""
        reopen_logs(self.path)
        self.checkpoints.reload()

    def mirror(self) -> None:
        """Copies the files that a resume needs next to the checkpoints, if those are outside the directory.

        The lines of metrics so far are on the disk then, so that a checkpoint that follows never has none before it.

        Raises:
          UserError: another process has taken the checkpoints over.
        """
        if self.check_owner is not None:
            self.check_owner()
        if jax.process_index() == 0:
            run_files.mirror(self.path, self.checkpoints.directory)
            try:
                run_files.sync_growing(self.path)
            except OSError as error:  # the checkpoint, which follows, ends the run if the disk refuses it too
                log.warning("%s: lines of metrics may be lost: %s", self.path, error.strerror)

    def write_start(self, record: dict[str, Any], job: Job, step: int) -> None:
        """On host 0, writes the configuration and the layout with its memory table.

        A fork begins with the metrics of its origin up to `step`.

        Args:
          record: the whole configuration as nested dictionaries.
        """
        if jax.process_index() != 0:
            return
        if self.is_fork:
            origin = Path(str(record["resume"])) / run_files.METRICS_FILE
            copy_lines(origin, step, self.path / run_files.METRICS_FILE)
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
class DirectoryKeys(SetKeys, CheckpointDirectoryKeys, CheckpointKeys, RetentionKeys):
    """The keys of section `data` for opening a run directory: where checkpoints are, and which are kept."""


@contextmanager
def open_directory(
    path: Path, data: DirectoryKeys, protecting: EmergencyKeys, job: Job, *, resume: str | None, is_fork: bool
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
        claims: tuple[Claim, ...] = ()
        if jax.process_index() == 0:
            claim = stack.enter_context(locked(path, "choose another hydra.run.dir"))
            ownership = stack.enter_context(owned(checkpoint_path, str(path)))
            claims = (claim,) if ownership.claim is None else (claim, ownership.claim)
            check_owner = partial(_check, claim.check, ownership.check)
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
        yield RunDirectory(path, is_fork, checkpoints, in_memory, check_owner, claims)


def _check(*checks: Callable[[], None]) -> None:
    for check in checks:
        check()


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
