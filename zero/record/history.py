"""The metrics of a run, thinned while they are read: the memory that they take does not grow with their number."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from zero.record.metrics_file import lines_that_count

MOST_POINTS = 400_000  # of all curves together
MOST_EVALUATIONS = 100
MOST_ACTIVATIONS = 400  # lines of statistics with sizes of activations
ACTIVATIONS = "activation/"  # with which their names begin, as `zero.training.statistics` has them
_BATCH = 64  # lines that are in memory at once

Line = Mapping[str, Any]
Point = tuple[int, float | None]  # (step, value); the value is None if it was not finite


@dataclass(frozen=True)
class History:
    """The lines of a metrics.jsonl that count.

    Attributes:
      count: the number of lines.
      first, last: the oldest and the newest line; empty without lines.
      curves: the points of each metric by increasing step: all, or of each of equally long stretches of steps the
        lowest and the highest, and the newest of all. Without sizes of activations.
      evaluations: the newest lines with a validation loss.
      activations: lines with sizes of activations, at equal distances if there are more than `MOST_ACTIVATIONS`.
      resumes: the steps at which the run was resumed, in the order of time.
      null_losses: the number of lines.
    """

    count: int
    first: Line
    last: Line
    curves: Mapping[str, Sequence[Point]]
    evaluations: Sequence[Line]
    activations: Sequence[Line]
    resumes: Sequence[int]
    null_losses: int


def read_history(path: Path) -> History:
    """Reads a metrics.jsonl once, from its end."""
    curves = _Curves()
    evaluations: list[Line] = []
    activations = _Activations()
    resumes: list[int] = []
    count = null_losses = 0
    first: Line = {}
    last: Line = {}
    for batch in _batches(lines_that_count(path, resumes)):
        count += len(batch)
        first = batch[-1]
        last = last or batch[0]
        null_losses += sum(line.get("train/loss", 0.0) is None for line in batch)
        evaluated = (line for line in batch if "validation/loss" in line)
        evaluations += islice(evaluated, MOST_EVALUATIONS - len(evaluations))
        curves.add([activations.take(line) for line in batch])
    return History(
        count,
        first,
        last,
        curves.points(),
        evaluations[::-1],
        activations.lines[::-1],
        resumes[::-1],
        null_losses,
    )


def _batches(lines: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(lines, _BATCH)):
        yield batch


class _Curves:
    """Points of all metrics, added the newest first; 16 bytes each, as there may be millions of them."""

    def __init__(self) -> None:
        self._steps: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        self._values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._newest: dict[str, Point] = {}
        self._held = 0
        self._width = 1  # steps of a stretch

    def add(self, batch: Sequence[Line]) -> None:
        for line in batch:
            step = line["step"]
            for name, value in line.items():
                self._steps[name].append(step)
                self._values[name].append(math.nan if value is None else value)
            self._held += len(line)
        if self._held > MOST_POINTS:
            self._thin()

    def _thin(self) -> None:
        """Keeps the extremes of stretches, which become longer until half of the points go."""
        for name in self._steps.keys() - self._newest.keys():
            self._newest[name] = _point(self._steps[name][0], self._values[name][0])
        while True:
            for name in self._steps:
                steps, values = np.array(self._steps[name]), np.array(self._values[name])
                kept = _extremes(steps, values, self._width)
                self._steps[name], self._values[name] = (
                    array("q", steps[kept].tobytes()),
                    array("d", values[kept].tobytes()),
                )
            self._held = sum(map(len, self._steps.values()))
            if self._held <= max(MOST_POINTS // 2, 2 * len(self._steps)):
                return
            self._width *= 2

    def points(self) -> dict[str, list[Point]]:
        """The points of each metric by increasing step."""
        curves = {name: list(map(_point, self._steps[name][::-1], self._values[name][::-1])) for name in self._steps}
        for name, points in curves.items():
            newest = self._newest.get(name, points[-1])
            if points[-1] != newest:
                points.append(newest)
        return curves


def _point(step: int, value: float) -> Point:
    if math.isnan(value):
        return step, None
    return step, value


def _extremes(steps: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:
    """The indices of the lowest and the highest point of each stretch of `width` steps, which decrease.

    Of a stretch without finite values it is the first.

    >>> _extremes(np.array([7, 6, 5, 4, 3, 2]), np.array([2.0, 3.0, 1.0, math.nan, math.nan, math.nan]), 4).tolist()
    [1, 2, 4]
    """
    stretches = steps // width
    starts = np.flatnonzero(np.diff(stretches, prepend=-1))
    by_value = np.lexsort((values, -stretches))  # what is not finite comes last
    finite = np.add.reduceat(np.isfinite(values), starts, dtype=int)
    lowest, highest = by_value[starts], by_value[starts + np.maximum(finite, 1) - 1]
    return np.unique(np.concatenate([lowest, highest]))


class _Activations:
    """Every n-th line with sizes of activations, added the newest first."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._every = 1
        self._passed = 0

    def take(self, line: Line) -> Line:
        """Adds the sizes of a line, and returns the rest of it."""
        names = [name for name in line if name.startswith(ACTIVATIONS)]
        if not names:
            return line
        if self._passed % self._every == 0:
            self.lines.append({"step": line["step"], **{name: line[name] for name in names}})
        self._passed += 1
        if len(self.lines) > MOST_ACTIVATIONS:
            self.lines = self.lines[::2]
            self._every *= 2
        return {name: value for name, value in line.items() if not name.startswith(ACTIVATIONS)}
