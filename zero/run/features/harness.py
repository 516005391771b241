"""Tasks of lm-evaluation-harness during training."""

from __future__ import annotations

from pathlib import Path

from zero.config.schema import Config
from zero.inference.harness_tasks import numbers_of, run_tasks
from zero.inference.scoring import Scorer
from zero.inference.trained_model import TrainedModel
from zero.run.feature import Feature, Moment
from zero.run.run import Line, Run
from zero.tracking.metrics_file import line_of


class Harness(Feature):
    """Adds the results of `harness.tasks` to the line of an evaluation, as `harness/TASK/METRIC`.

    Every `harness.every` evaluations, and at the last step.
    """

    name = "harness"
    phase = "evaluation"
    may_wait = True

    def __init__(self, config: Config, run: Run) -> None:
        evaluations = config.harness.every
        self._every = None if evaluations is None else evaluations * config.training.evaluation_frequency
        self._tasks = config.harness.tasks
        self._batch_size = config.training.batch_size

    @classmethod
    def is_done(cls, run_directory: Path, now: Moment) -> bool:
        return any(name.startswith("harness/") for name in line_of(run_directory, now.step) or {})

    def due(self, now: Moment) -> bool:
        if self._every is None or not now.is_evaluation:
            return False
        return now.is_last or now.step % self._every == 0

    def do(self, run: Run, now: Moment, line: Line) -> None:
        trained = TrainedModel(run.job.model, run.weights, run.data.tokenizer, now.step)
        scorer = Scorer(trained, run.data.context.full, self._batch_size)
        line |= numbers_of(run_tasks(scorer, self._tasks))
