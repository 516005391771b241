"""The progress of the run on host 0, with the newest metrics."""

from __future__ import annotations

from zero.hosts import agreement
from zero.record.metrics_file import Line
from zero.run.feature import Feature, Moment
from zero.run.run import Run
from zero.tracking.progress import Progress
from zero.training.batch import Batch


class Bar(Feature):
    """Shows the step and the newest metrics; an evaluation is also logged as a line."""

    name = "bar"
    changes_nothing = True
    acts_on_every_line = True

    def __init__(self, run: Run) -> None:
        self._lengths: set[int] = set()  # of sequences, for which the step is compiled
        self._progress = Progress(run.position.step, run.last_step, run.clock, is_shown=agreement.is_host_0())
        self._progress.open()

    def before_step(self, run: Run, step: int) -> None:
        length = run.data.context.at(step - 1)
        if length not in self._lengths:
            self._lengths.add(length)
            self._progress.compiling(f"the step for sequences of {length} tokens")

    def after_step(self, run: Run, step: int, batch: Batch) -> None:
        self._progress.done(step)

    def do(self, run: Run, now: Moment, line: Line) -> None:
        self._progress.show(line, now.is_evaluation)

    def close(self) -> None:
        self._progress.close()
