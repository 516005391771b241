"""Tasks of lm-evaluation-harness during training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax

from zero.base.keys import key
from zero.inference.harness_tasks import numbers_of, run_tasks
from zero.inference.scoring import Scorer
from zero.inference.trained_model import TrainedModel
from zero.record.metrics_file import Line, line_of
from zero.run.feature import Feature, Moment
from zero.run.run import Run
from zero.tracking.metrics import Metric


class Harness(Feature):
    """Adds the results of `harness.tasks` to the line of each evaluation, as `harness/TASK/METRIC`."""

    @dataclass(frozen=True)
    class Keys:
        tasks: list[str] = key(
            [],
            None,
            "Tasks of lm-evaluation-harness that run at each evaluation, such as lambada_openai, or paths of its YAML "
            "files, which can run Python; needs the extra lm-eval.",
        )

    name = "harness"
    changes_nothing = True
    metrics = (Metric(("harness/TASK/METRIC",), "tasks of `harness.tasks`"),)
    phase = "evaluation"
    is_deferrable = True

    def __init__(self, keys: Keys, run: Run) -> None:
        self._tasks = keys.tasks
        self._batch_size = run.position.global_rows // jax.process_count()

    @classmethod
    def is_done(cls, run_directory: Path, now: Moment) -> bool:
        return any(name.startswith("harness/") for name in line_of(run_directory, now.step) or {})

    def due(self, now: Moment) -> bool:
        return bool(self._tasks) and now.is_evaluation

    def do(self, run: Run, now: Moment, line: Line) -> None:
        trained = TrainedModel(run.job.model, run.weights, run.data.tokenizer, now.step)
        scorer = Scorer(trained, run.data.context.full, self._batch_size)
        line |= numbers_of(run_tasks(scorer, self._tasks))
