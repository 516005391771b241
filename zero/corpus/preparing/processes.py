"""Work in processes of this machine, one for each task: what dies takes nothing else along, and is named.

A killed process is restarted, up to `ATTEMPTS` times; an error in the work ends all processes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from zero.base.child_process import end_with_parent
from zero.base.errors import Unavailable, UserError
from zero.corpus.preparing.workers import delayed_interrupts

ATTEMPTS = 3
_log = logging.getLogger(__name__)


class Task(NamedTuple):
    name: str  # for messages
    argument: Any  # of the work; can be pickled


class _Running(NamedTuple):
    task: Task
    attempt: int
    process: Any  # multiprocessing.process.BaseProcess, whose class depends on how it was started
    answers: Connection


def run_in_processes(work: Callable[[Any], None], tasks: Iterable[Task], workers: int) -> Iterator[Task]:
    """Calls `work`, which can be pickled, with the argument of each task; yields the tasks as they end.

    Raises:
      UserError: the work has raised it.
      Unavailable: a process was killed `ATTEMPTS` times; the message names the task.
    """
    waiting = deque((task, 1) for task in tasks)
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_started(work, *waiting.popleft()))
            ready = wait([entry.process.sentinel for entry in running])
            for entry in [entry for entry in running if entry.process.sentinel in ready]:
                running.remove(entry)
                if _is_done(entry):
                    yield entry.task
                    continue
                died = f"{entry.task.name}: its process was killed by signal {-entry.process.exitcode}"
                if entry.attempt == ATTEMPTS:
                    raise Unavailable(f"{died}, {ATTEMPTS} times; probably out of memory; try fewer --workers")
                _log.warning("%s; restarting it", died)
                waiting.appendleft((entry.task, entry.attempt + 1))
    finally:
        for entry in running:
            entry.process.kill()
        for entry in running:
            entry.process.join()


def _started(work: Callable[[Any], None], task: Task, attempt: int) -> _Running:
    # Not forked: the caller may have threads, jax's among them.
    context = multiprocessing.get_context("spawn")
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, work, task.argument), daemon=True)
    with delayed_interrupts():
        process.start()
    sender.close()
    return _Running(task, attempt, process, answers)


def _is_done(entry: _Running) -> bool:
    """Whether a process that has ended did its work; it did not if it was killed."""
    entry.process.join()
    with entry.answers:
        error = entry.answers.recv() if entry.process.exitcode == 0 else None
    if error is not None:
        raise error
    if entry.process.exitcode > 0:
        raise RuntimeError(f"{entry.task.name}: its process ended with status {entry.process.exitcode}; see above")
    return entry.process.exitcode == 0


def _work(answers: Connection, work: Callable[[Any], None], argument: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its processes
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    end_with_parent()
    error = None
    try:
        work(argument)
    except (UserError, OSError) as raised:
        error = raised
    answers.send(error)
