"""Actions that were due when a run was stopped or killed, and that its next start does."""

from __future__ import annotations

import json
from pathlib import Path

from zero.hosts import agreement
from zero.run.feature import Moment
from zero.run.features import FEATURES
from zero.run.restore import Pending, TrainingPosition
from zero.run.run import Line


def pending_actions(line: Line, features: list[str]) -> Pending | None:
    """A record of these actions for the metadata of a checkpoint, with a copy of the line; None if there are none."""
    return Pending(features=features, line=dict(line)) if features else None


def still_pending(position: TrainingPosition, run_directory: Path, last_step: int) -> Pending | None:
    """What remains of the pending actions of a position, by the files of the run, which host 0 reads.

    A checkpoint is saved before the actions that follow it, so its metadata cannot tell whether they were done. All
    hosts call it.
    """
    if position.pending is None:
        return None
    now = Moment(position.step, False, position.step >= last_step)
    names = position.pending["features"]
    if agreement.is_host_0():
        names = [kind.name for kind in FEATURES if kind.name in names and not kind.is_done(run_directory, now)]
    names = json.loads(agreement.broadcast("pending", json.dumps(names)))
    return pending_actions(position.pending["line"], names)
