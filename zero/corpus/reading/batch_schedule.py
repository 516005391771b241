"""How many rows the batch of each step has, and which rows those are."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSchedule:
    """The rows of each step's batch: stages of `(steps, rows)` in order, then `rows`.

    Steps and rows are numbered from 0 on. Steps that share a batch, each with a part of its rows, have the same rows.

    Attributes:
      rows: of a batch after the last stage.
      stages: `(steps, rows of a batch)`, with a multiple of `steps_per_batch` steps.
      steps_per_batch: steps that share a batch.

    >>> schedule = BatchSchedule(8, ((2, 4),))
    >>> [schedule.rows_at(step) for step in range(4)], schedule.rows_before(3), schedule.step_of(16)
    ([4, 4, 8, 8], 16, 3)
    """

    rows: int
    stages: tuple[tuple[int, int], ...] = ()
    steps_per_batch: int = 1

    def rows_at(self, step: int) -> int:
        """The rows of the batch of a step."""
        for steps, rows in self.stages:
            if step < steps:
                return rows
            step -= steps
        return self.rows

    def rows_before(self, step: int) -> int:
        """The rows of all batches before the batch of a step."""
        before = 0
        for steps, rows in self.stages:
            before += min(step, steps) // self.steps_per_batch * rows
            step -= min(step, steps)
        return before + step // self.steps_per_batch * self.rows

    def step_of(self, row: int) -> int:
        """The first step of the batch with this row: the largest step with at most `row` rows before its batch."""
        first = 0
        for steps, rows in self.stages:
            stage_rows = steps // self.steps_per_batch * rows
            if row < stage_rows:
                return first + row // rows * self.steps_per_batch
            row -= stage_rows
            first += steps
        return first + row // self.rows * self.steps_per_batch

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of batches, stage by stage."""
        return (*(rows for _, rows in self.stages), self.rows)

    @property
    def divisor(self) -> int:
        """The largest number that divides the rows of every batch."""
        return math.gcd(*self.sizes)
