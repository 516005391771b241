"""`training.statistics`: statistics per tensor in the lines of metrics."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from zero.partition.layout import PyTree
from zero.training.batch import Batch
from zero.training.parts import TrainState
from zero.training.programs import Programs


class StatisticsRecorder:
    """Computes statistics per tensor of every so many steps; costs nothing in the others.

    Args:
      programs: of which `hold` and `statistics` are compiled at the first of these steps.
      every: steps; None: never.
    """

    def __init__(self, programs: Programs, every: int | None) -> None:
        self._programs, self._every = programs, every
        self._before: PyTree = None
        self._found: dict[str, float] = {}

    def is_due(self, step: int) -> bool:
        """Whether there are statistics of this step."""
        return self._every is not None and step % self._every == 0

    def before(self, weights: PyTree) -> None:
        """Keeps a copy of the trained weights before a step, which overwrites them."""
        self._before = self._programs.hold(weights)

    def after(self, state: TrainState, batch: Batch, frozen: PyTree) -> None:
        """Computes the statistics of this step from its result and the rows of this host's devices, and waits."""
        found = jax.device_get(self._programs.statistics(self._before, state, batch, frozen))
        self._before = None
        self._found = named(found)

    def read(self) -> dict[str, float]:
        """The statistics since the last call, by the names of their metrics."""
        found, self._found = self._found, {}
        return found


def named(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Statistics as metrics: one per leaf, and of activations one per layer.

    >>> named({"activation": {"query": np.ones(2)}, "change": {"blocks/query/kernel": np.float32(3)}})
    {'activation/query/0': 1.0, 'activation/query/1': 1.0, 'change/blocks/query/kernel': 3.0}
    """
    return {
        "/".join([kind, name, *map(str, index)]): float(np.asarray(values)[index])
        for kind, by_name in found.items()
        for name, values in by_name.items()
        for index in np.ndindex(np.shape(values))
    }
