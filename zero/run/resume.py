"""Resumes a run: the directory that its hosts share, the checkpoint that it continues, and what was done since."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from hydra.core.hydra_config import HydraConfig

from zero.base.errors import UserError
from zero.checkpoints.emergency import EmergencyCheckpoints
from zero.checkpoints.manager import Checkpoints
from zero.files import storage
from zero.hosts import agreement
from zero.job.job import Job
from zero.record import run_files
from zero.record.metrics_file import line_of
from zero.record.starts import last_start, note_start, start_now, time_of
from zero.run import find_run
from zero.run.restore import TrainingPosition, restore
from zero.tracking.goodput import Goodput
from zero.training.optimizers.optimizer_keys import Optimizer
from zero.training.parts import TrainState


class Joined(NamedTuple):
    """The run directory of all hosts.

    Attributes:
      is_fork: whether the run continues another run's checkpoint there.
    """

    path: Path
    is_fork: bool


def join_run_directory(run_directory: Path, resume: str | None) -> Joined:
    """The run directory of host 0. Other hosts write nothing but their logs there."""
    host = jax.process_index()
    is_fork = resume is not None and Path(resume) != run_directory
    message = agreement.broadcast("run", json.dumps([str(run_directory), resume is not None, is_fork]))
    shared, is_resume, is_fork = json.loads(message)
    if is_resume != (resume is not None):
        does = "resumes" if is_resume else "starts afresh"
        raise UserError(
            f"host 0 {does} and host {host} does not: all hosts must see the same runs; set data.bucket_path, or put "
            "hydra.run.dir on a shared disk"
        )
    if host:
        _move_log(run_directory, Path(shared), host)
    return Joined(Path(shared), is_fork)


def check_new(resume: str | None, step: int | None, run_directory: Path, checkpoint_path: Path | str) -> None:
    """Raises UserError if a run that starts or forks here would overwrite another run; all hosts call it.

    Args:
      resume: the run that it forks from, at this step; None for a fresh start.
    """
    if resume is not None and run_files.saved_checkpoint_directory(Path(resume)) == checkpoint_path:
        raise UserError(
            f"data.resume_step={step} forks the run into {run_directory}, but {checkpoint_path} has the checkpoints of "
            f"the run itself; choose another data.checkpoint_directory, and hydra.run.dir={resume}"
        )
    used: Path | str = ""
    if agreement.is_host_0():
        if run_files.committed_steps(checkpoint_path):
            used = checkpoint_path
        elif (run_directory / run_files.CONFIG_FILE).exists() and run_files.saved_steps(run_directory):
            used = run_directory
    used = agreement.broadcast("used", str(used))
    if used:
        raise UserError(
            f"{used} has checkpoints: --resume continues that run, and another hydra.run.dir starts a new one"
        )


class Restored(NamedTuple):
    """The state that a run continues with."""

    position: TrainingPosition
    state: TrainState


def resume_state(
    resume: str,
    step: int | None,
    optimizer: Optimizer,
    job: Job,
    joined: Joined,
    *,
    checkpoints: Checkpoints,
    emergency: EmergencyCheckpoints | None,
    check: Callable[[TrainingPosition], None],
) -> Restored:
    """Restores an emergency checkpoint if it is the newest, else a durable one.

    Args:
      resume: the run directory that is resumed.
      step: of the checkpoint; None: the newest.
      check: raises UserError for a position that cannot be continued here.
    """
    hyperparameters = optimizer.hyperparameters()
    adam = {key: hyperparameters[key] for key in ("b1", "b2", "eps") if key in hyperparameters}
    if joined.is_fork:
        with Checkpoints(run_files.saved_checkpoint_directory(Path(resume)), keep=None) as origin:
            return Restored(*restore(origin, step, job.model.config, job.storage, is_own=False, check=check, **adam))
    durable = checkpoints.steps()
    if not durable:
        before = run_files.saved_checkpoint_directory(Path(resume))
        if before != checkpoints.directory:
            raise UserError(
                f"data.checkpoint_directory: {checkpoints.directory} has no checkpoint; the checkpoints of the run are "
                f"in {before}"
            )
    if emergency is not None and step is None and durable:
        in_memory = emergency.restore(last_lineages(joined.path), after=durable[-1])
        if in_memory is not None:
            position, state = in_memory
            return Restored(TrainingPosition(**position), state)
    return Restored(*restore(checkpoints, step, job.model.config, job.storage, is_own=True, check=check, **adam))


def is_durable(emergency: EmergencyCheckpoints | None) -> bool:
    """Whether a durable checkpoint has the state that this start continues; otherwise only hosts' memory has it."""
    return emergency is None or emergency.restored is None


def write_command(run_directory: Path, resume: str | None) -> None:
    """Writes the keys that the command lines of this run have set; `--resume=auto` identifies jobs by them."""
    arguments = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    find_run.write_command(run_directory, None if resume is None else Path(resume), arguments)


def write_start(run_directory: Path, step: int) -> None:
    """Numbers this start among the starts of all runs in `runs`; `--resume` finds the last one by this number."""
    root = find_run.DEFAULT_ROOT
    is_below = run_directory.absolute().is_relative_to(root.absolute())
    others = find_run.runs_in(root) if is_below else []
    note_start(run_directory, start_now(step), others)


def write_lineage(run_directory: Path, emergency: EmergencyCheckpoints | None) -> None:
    """Writes which emergency checkpoints the next start may use; `mirror` follows, and only then the first step.

    Without emergency checkpoints the file is empty rather than absent: later steps belong to a new attempt, and an
    absent file would leave the previous attempt's lineages in the mirror.
    """
    lineages = [] if emergency is None else emergency.lineages
    storage.write(run_directory / run_files.LINEAGE_FILE, "".join(f"{name}\n" for name in lineages).encode())


def resumed_clock(began: float, run_directory: Path, step: int, is_new: bool) -> Goodput:
    """The clock of a run. A resumed run continues from the metrics of its step, on host 0, which logs them.

    Args:
      began: when this start of the run did, as `zero.hosts.startup.begin_run` returns it.
    """
    age = time.monotonic() - began
    if is_new or not agreement.is_host_0():
        return Goodput(age)
    return Goodput(age, line_of(run_directory, step), time_of(last_start(run_directory, step)))


def last_lineages(run_directory: Path) -> list[str]:
    """The lineages of emergency checkpoints that the last start left, read by host 0."""
    path = run_directory / run_files.LINEAGE_FILE
    return agreement.broadcast("last lineages", path.read_text() if path.exists() else "").split()


def _move_log(run_directory: Path, shared: Path, host: int) -> None:
    """Sends the log of this host to `NAME.HOST.log` of the shared run directory, and removes the empty one here."""
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler):
            old = Path(handler.baseFilename)
            handler.close()
            handler.baseFilename = os.path.abspath(shared / f"{old.stem}.{host}{old.suffix}")
            shared.mkdir(parents=True, exist_ok=True)
            if shared != run_directory:
                old.unlink(missing_ok=True)
    if shared != run_directory and run_directory.is_dir() and not any(run_directory.iterdir()):
        run_directory.rmdir()
