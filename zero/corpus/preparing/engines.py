"""Where the parts of a corpus are prepared: in processes of this machine, or on the workers of an Apache Beam runner.

An engine calls a function with the argument of each task, anywhere, in any order, perhaps twice. The function leaves
what it makes in storage, so that nothing depends on the engine. A third engine is a class beside these.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from zero.base.errors import Unavailable, UserError, first_line, install_command
from zero.corpus.format import directory
from zero.corpus.preparing.processes import Task, run_in_processes
from zero.files import storage

Work = Callable[[Any], None]
ERROR = ".error"  # the suffix of a Beam worker's note about a part that cannot be prepared


class Engine(Protocol):
    """Runs tasks; yields each as it ends, or all of them at the end."""

    @property
    def workers(self) -> int:
        """The processes of this machine that may be used."""

    def remainder(self, count: int) -> int:
        """How many processes of this machine would have no task."""

    def run(self, work: Work, tasks: Sequence[Task], folder: str) -> Iterator[Task]:
        """Calls `work`, which can be pickled, with the argument of each task; `folder` is the corpus's directory.

        Raises:
          UserError: a task cannot be done; the message names it.
        """


@dataclass(frozen=True)
class LocalEngine:
    """Processes of this machine, one per task; with one worker all tasks are done in the caller's own process."""

    workers: int

    def remainder(self, count: int) -> int:
        if self.workers > 1:
            return count % self.workers
        return count

    def run(self, work: Work, tasks: Sequence[Task], folder: str) -> Iterator[Task]:
        if self.workers > 1:
            yield from run_in_processes(work, tasks, self.workers)
            return
        for task in tasks:
            work(task.argument)
            yield task


@dataclass(frozen=True)
class BeamEngine:
    """The workers of a runner of Apache Beam (the extra beam).

    Args:
      arguments: the options of Beam, such as ("--runner", "DataflowRunner", "--project", ...).
    """

    arguments: tuple[str, ...]
    workers: int = 1

    def remainder(self, count: int) -> int:
        return 0

    def run(self, work: Work, tasks: Sequence[Task], folder: str) -> Iterator[Task]:
        try:
            import apache_beam as beam
            from apache_beam.options.pipeline_options import PipelineOptions
        except ImportError:
            raise UserError(f"--runner: the apache_beam library is missing; {install_command('beam')}") from None
        _remove_errors(folder)
        options = PipelineOptions(list(self.arguments))
        failure: BaseException | None = None
        try:
            with beam.Pipeline(options=options) as pipeline:
                numbered = pipeline | "tasks" >> beam.Create(list(tasks))
                # Else a runner may do all of them in the process that has made the list.
                spread = numbered | "spread" >> beam.Reshuffle()
                spread | "do" >> beam.Map(_OnWorker(work, folder))
        except Exception as error:  # noqa: BLE001 - each runner has exceptions of its own, and some text in each
            failure = error
        _raise_errors(folder)
        if failure is not None:
            raise Unavailable(f"the runner failed: {first_line(failure)}") from failure
        yield from tasks


@dataclass(frozen=True)
class _OnWorker:
    """A task on a Beam worker, in a separate process: if it is killed, the worker survives and can name it.

    An error is left in storage for the caller, whose other tasks are still done. One that a repeat may mend is raised
    too, so that the runner repeats the task.
    """

    work: Work
    folder: str

    def __call__(self, task: Task) -> None:
        try:
            for _ in run_in_processes(self.work, [task], 1):
                pass
        except UserError as error:
            directory.write(self._error_file(task), f"{error.status} {error}".encode())
            if isinstance(error, Unavailable):
                raise
        else:
            storage.remove(self._error_file(task))  # of an earlier attempt

    def _error_file(self, task: Task) -> str:
        digest = hashlib.sha256(task.name.encode()).hexdigest()
        return storage.join(self.folder, f"{digest[:16]}{ERROR}")


def _raise_errors(folder: str) -> None:
    """Raises what workers have left about tasks that cannot be done: the first three, and how many there are."""
    names = [name for name in directory.file_names(folder) if name.endswith(ERROR)]
    errors = sorted(directory.read(storage.join(folder, name)).decode().split(" ", 1) for name in names)
    if not errors:
        return
    _remove_errors(folder)
    shown = "; ".join(message for _, message in errors[:3])
    more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
    is_temporary = all(int(status) == Unavailable.status for status, _ in errors)
    raise (Unavailable if is_temporary else UserError)(shown + more)


def _remove_errors(folder: str) -> None:
    for name in directory.file_names(folder):
        if name.endswith(ERROR):
            storage.remove(storage.join(folder, name))


def local_engine(workers: int | None) -> LocalEngine:
    """The number of processes; None: one per core."""
    return LocalEngine(workers or os.cpu_count() or 1)
