"""The interface of a feature: something that a run does besides training."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple

from zero.record.metrics_file import Line
from zero.run.run import Run
from zero.tracking.metrics import Metric
from zero.training.batch import Batch


class Stopped(Exception):
    """A stop request interrupted an action that may wait; the resumed run does it."""


class Moment(NamedTuple):
    """The end of a step; the same on all hosts.

    Attributes:
      step: the newest step.
      is_evaluation: whether the run is evaluated after this step.
      is_last: whether no step follows.
      requested: "stop" (a signal), the names of features that asked to act now ("save", by the clock), and at the start
        of a resume those of features whose action an earlier process did not complete.
    """

    step: int
    is_evaluation: bool
    is_last: bool
    requested: frozenset[str] = frozenset()

    @property
    def is_stop(self) -> bool:
        return "stop" in self.requested


class Feature:
    """Something that a run does besides training; `zero.run.feature_table.FEATURES` lists all of them.

    A feature is constructed from sections of the configuration and from the run. It opens what it needs, and raises
    UserError if it cannot work. Its own keys are a nested dataclass `Keys`, which a section inherits.

    All hosts call each method at the same steps, feature by feature in the order of the table.

    Attributes:
      name: identifies the feature in `Moment.requested`, in the metadata of checkpoints, and as a section of the
      configuration.
      metrics: the metrics that it adds to a line.
      phase: the phase that the time of `do` counts for (`zero.tracking.goodput.PHASES`).
      makes_line: a line of metrics is made when it is due. A feature that writes a file of its own
        (`zero.run.growing_file.GrowingFile`) makes none: its clock is its own.
      acts_on_every_line: call `do` for each line of metrics, even if the feature is not due.
      changes_nothing: a run killed right after the action resumes exactly as one killed before it. Tests kill runs
        before and after every feature that does more.
      is_deferrable: if the run is stopped or killed before the action is complete, the next start does it. Everything
        that the action depends on must be durable by then.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]] = ()
    phase: ClassVar[str] = "steps"
    makes_line: ClassVar[bool] = True
    acts_on_every_line: ClassVar[bool] = False
    changes_nothing: ClassVar[bool] = False
    is_deferrable: ClassVar[bool] = False

    @classmethod
    def is_done(cls, run_directory: Path, now: Moment) -> bool:
        """Whether the files of a run show that an action that may wait is complete; host 0 reads them."""
        return False

    def before_step(self, run: Run, step: int) -> None:
        """Called before a step is dispatched."""

    def after_step(self, run: Run, step: int, batch: Batch) -> None:
        """Called after a step is dispatched, with the sequences of this host's devices."""

    def due(self, now: Moment) -> bool:
        """Whether to act after this step. If so, the run makes a line of metrics, but for `makes_line`."""
        return False

    def do(self, run: Run, now: Moment, line: Line) -> None:
        """Acts after a step. Whatever it adds to the line before the line is recorded becomes part of it.

        The line is empty if no feature that makes one is due.

        Raises:
          Stopped: a stop request interrupted the action; only if the feature may wait.
          UserError: the run cannot continue.
        """

    def close(self) -> None:
        """Called at the end of the run, also after an error, in reverse order of the table."""
