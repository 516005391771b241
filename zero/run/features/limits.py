"""Ends a run that has passed a limit of the configuration, and marks the end of the data."""

from __future__ import annotations

import math

from zero.base.errors import UserError
from zero.corpus.reading.keys import RowSelectionKeys
from zero.record.metrics_file import Line
from zero.run.feature import Feature, Moment
from zero.run.run import Run
from zero.tracking.metrics import Metric
from zero.training.guard import GuardKeys
from zero.training.schedules import ScheduleKeys


class Limits(Feature):
    """Adds the count of skipped rows to each line of metrics, and ends the run if too much was skipped.

    If training.max_epochs ends the data before the schedule, the last line has `end_of_data`: the run is finished.

    It comes before everything that writes, so that a state beyond a limit is never saved.
    """

    name = "limits"
    changes_nothing = True
    metrics = (
        Metric(("skipped_rows",), "rows so far that could not be read, if `data.max_skipped_rows` allows any"),
        Metric(("end_of_data",), "1 in the last line of a run that `training.max_epochs` ends before its last step"),
    )
    acts_on_every_line = True

    def __init__(self, guarding: GuardKeys, rate: ScheduleKeys, reading: RowSelectionKeys) -> None:
        self._max_skipped_rows = reading.max_skipped_rows
        self._max_skipped_in_a_row = guarding.max_skipped_in_a_row
        self._spikes = guarding.skip_spikes
        self._total_steps = rate.total_steps

    def do(self, run: Run, now: Moment, line: Line) -> None:
        """Checks a line of metrics.

        Raises:
          UserError: too many rows or steps were skipped, or the gradient is not finite and no step may be skipped.
        """
        if self._max_skipped_rows:
            line["skipped_rows"] = run.position.skipped_rows
            if run.position.skipped_rows > self._max_skipped_rows:
                raise UserError(
                    f"step {now.step}: {run.position.skipped_rows} rows of the data were skipped, but "
                    f"data.max_skipped_rows={self._max_skipped_rows}; the log names their shards and samples"
                )
        if now.is_last and now.step < self._total_steps:
            line["end_of_data"] = 1
        if run.metrics.skipped_in_a_row > self._max_skipped_in_a_row:
            spikes = f" or were spikes by training.skip_spikes={self._spikes}" if self._spikes else ""
            raise UserError(
                f"step {now.step}: {run.metrics.skipped_in_a_row} steps in a row had no finite gradient{spikes}; lower "
                "training.peak_learning_rate and --resume from an earlier step (data.resume_step)"
            )
        if not self._max_skipped_in_a_row and not math.isfinite(line["gradient_norm"]):
            raise UserError(
                f"step {now.step}: the gradient is not finite and training.max_skipped_in_a_row=0; lower "
                "training.peak_learning_rate and --resume"
            )
