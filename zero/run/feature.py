"""The interface of a feature: one thing that a run does besides training."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple

from zero.record.metrics_file import Line
from zero.run.run import Run
from zero.tracking.metrics import Metric
from zero.training.batch import Batch


class Stopped(Exception):
    """A stop request came during an action that may wait: it is done when the run is resumed."""


class Moment(NamedTuple):
    """The end of a step; the same on all hosts.

    Attributes:
      step: the newest step.
      is_evaluation: whether the run is evaluated after this step.
      is_last: whether no step follows.
      asked: "stop" (a signal), the names of features that asked to act now ("save", by the clock), and at the start
        of a resume those of features whose action an earlier process did not complete.
    """

    step: int
    is_evaluation: bool
    is_last: bool
    asked: frozenset[str] = frozenset()

    @property
    def is_stop(self) -> bool:
        return "stop" in self.asked


class Feature:
    """One thing that a run does besides training; `zero.run.feature_table.FEATURES` is their table.

    A feature is made of sections of the configuration and of the run. It opens what it needs, and raises UserError
    where it cannot work. Its own keys are a dataclass `Keys` in it, which its section inherits.

    All hosts call each method at the same steps, feature by feature in the order of the table.

    Attributes:
      name: of the feature in `Moment.asked`, in the metadata of checkpoints, and of its section of the configuration.
      adds: the metrics that it adds to lines.
      phase: in which the time of `do` counts (`zero.tracking.goodput.PHASES`).
      takes_every_line: `do` is called for each line of metrics, also where the feature is not due.
      only_looks: a run killed right after its action continues like a run killed before. Tests kill runs
        before and after each other feature.
      may_wait: an action that is due when the run is stopped, or killed before it is complete, is done at the next
        start of the run. It comes after everything that the action depends on is durable.
    """

    name: ClassVar[str]
    adds: ClassVar[tuple[Metric, ...]] = ()
    phase: ClassVar[str] = "steps"
    takes_every_line: ClassVar[bool] = False
    only_looks: ClassVar[bool] = False
    may_wait: ClassVar[bool] = False

    @classmethod
    def is_done(cls, run_directory: Path, now: Moment) -> bool:
        """Whether the files of a run show that an action that may wait is complete; host 0 reads them."""
        return False

    def before_step(self, run: Run, step: int) -> None:
        """Called before a step is dispatched."""

    def after_step(self, run: Run, step: int, batch: Batch) -> None:
        """Called when a step is dispatched, with the sequences of this host's devices."""

    def due(self, now: Moment) -> bool:
        """Whether to act after this step; then the run makes a line of metrics."""
        return False

    def do(self, run: Run, now: Moment, line: Line) -> None:
        """Acts after a step. What is added to the line before it is recorded becomes part of it.

        Raises:
          Stopped: a stop request came in the middle; only where the feature may wait.
          UserError: the run cannot continue.
        """

    def close(self) -> None:
        """Called at the end of the run, after an error too, in reverse order of the table."""
