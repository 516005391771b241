"""Reading a checkpoint on all hosts together, while another process may delete it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax

from zero.base.errors import Unavailable, UserError
from zero.checkpoints.damage import DamagedCheckpoint
from zero.hosts import agreement
from zero.record.run_files import committed_steps

DELETION_SECONDS = 10  # within which a deletion that another process has begun ends
_Result = TypeVar("_Result")


def on_all_hosts(name: str, action: Callable[[], _Result]) -> _Result:
    """The result of an action on a checkpoint of this name; where any host raises UserError, all of them do."""
    failure = None
    try:
        result = action()
    except UserError as error:
        failure = error
    if jax.process_count() > 1:
        failed, damaged = agreement.sum_over_hosts(failure is not None, isinstance(failure, DamagedCheckpoint))
        if failed:
            kind = DamagedCheckpoint if failed == damaged else Unavailable
            raise kind(failure or f"{name}: another host could not read it")
    if failure is not None:
        raise failure
    return result


def is_deleted(directory: Path | str, step: int) -> bool:
    """Whether another process deletes this step: its files go one by one. All hosts get the answer of host 0."""
    answer = ""
    if agreement.is_host_0() and _disappears(directory, step):
        answer = "yes"
    return bool(agreement.broadcast("deleted", answer))


def _disappears(directory: Path | str, step: int) -> bool:
    """Whether a step is gone within some seconds; the newest one is never deleted."""
    ends = time.monotonic() + DELETION_SECONDS
    while step in (steps := committed_steps(directory)):
        if step == steps[-1] or time.monotonic() > ends:
            return False
        time.sleep(0.1)
    return True
