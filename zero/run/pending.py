"""Actions that were due when a run was stopped or killed; its next start does them."""

from __future__ import annotations

import json
from pathlib import Path

from zero.hosts import agreement
from zero.record.metrics_file import Line, line_of
from zero.run.feature import Moment
from zero.run.feature_table import FEATURES
from zero.run.features.report import Report
from zero.run.features.save import Save
from zero.run.restore import Pending, TrainingPosition


def pending_actions(line: Line, features: list[str]) -> Pending | None:
    """A record of these actions for a checkpoint's metadata, with a copy of the line; None if there are none."""
    if not features:
        return None
    return Pending(features=features, line=dict(line))


def still_pending(position: TrainingPosition, run_directory: Path, last_step: int, is_durable: bool) -> Pending | None:
    """The actions that remain for the step that a run resumes. All hosts call it; host 0 reads the files of the run.

    A checkpoint is saved before the actions that follow it, so its metadata cannot say whether they were done. A state
    that is in no durable checkpoint has to be saved first.
    """
    pending = position.pending or Pending(features=[], line={})
    if is_durable and not pending["features"]:
        return None
    now = Moment(position.step, False, position.step >= last_step)
    names = pending["features"]
    line = pending["line"]
    if agreement.is_host_0():
        names = [kind.name for kind in FEATURES if kind.name in names and not kind.is_done(run_directory, now)]
        if not is_durable:
            names = [Save.name, *names]
        if names and now.is_last and Report.name in pending["features"] and Report.name not in names:
            names.append(Report.name)  # the line of this resume makes the page older than the metrics
        line = line | (line_of(run_directory, position.step) or {})
    names, line = json.loads(agreement.broadcast("pending", json.dumps([names, line])))
    return pending_actions(line, names)
