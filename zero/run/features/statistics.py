"""`statistics.every`: statistics per tensor in the lines of metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from zero.base.keys import at_least, key
from zero.partition.layout import PyTree
from zero.record.metrics_file import Line
from zero.run.feature import Feature, Moment
from zero.run.run import Run
from zero.tracking.metrics import Metric
from zero.training.batch import Batch
from zero.training.leaf_statistics import OF_LEAVES


class Statistics(Feature):
    """Computes statistics per tensor every n steps, by programs compiled when first needed; other steps are free."""

    @dataclass(frozen=True)
    class Keys:
        every: int | None = key(
            None,
            at_least(1),
            "Every n steps, log statistics per tensor: the mean magnitude of activations per layer, and for each leaf "
            "its change per learning rate and the norms of its gradient and weights. null: off.",
            "Each time costs another forward and backward pass, and memory for a copy of the weight shards and of the "
            "whole gradient's.",
        )

    name = "statistics"
    changes_nothing = True
    metrics = (
        Metric(
            ("activation/...", *(f"{kind}/..." for kind in OF_LEAVES)),
            "with `statistics.every`, of each tensor",
        ),
    )

    def __init__(self, keys: Keys, run: Run) -> None:
        self._every = keys.every
        self._weights_before: PyTree = None
        self._values: dict[str, float] = {}

    def _is_measured(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def before_step(self, run: Run, step: int) -> None:
        """Copies the trained weights before a step overwrites them."""
        if self._is_measured(step):
            weights = run.job.model.weights(run.state.params, run.state.averages)
            self._weights_before = run.job.programs.hold(weights)

    def after_step(self, run: Run, step: int, batch: Batch) -> None:
        """Computes the statistics of this step from its result and its sequences, and waits."""
        if self._is_measured(step):
            state = run.state._replace(opt_state=())  # which is not read
            arguments = (self._weights_before, state, batch, run.frozen)
            self._values = named(jax.device_get(run.job.programs.statistics(*arguments)))
            self._weights_before = None

    def due(self, now: Moment) -> bool:
        return self._is_measured(now.step)

    def do(self, run: Run, now: Moment, line: Line) -> None:
        line |= self._values
        self._values = {}


def named(statistics: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Statistics as metrics: one per leaf, and for activations one per layer.

    >>> named({"activation": {"query": np.ones(2)}, "change": {"blocks/query/kernel": np.float32(3)}})
    {'activation/query/0': 1.0, 'activation/query/1': 1.0, 'change/blocks/query/kernel': 3.0}
    """
    metrics = {}
    for kind, by_name in statistics.items():
        for name, values in by_name.items():
            for index, value in np.ndenumerate(values):
                metrics["/".join([kind, name, *map(str, index)])] = float(value)
    return metrics
