"""The position of a run: its step, rows and tokens. Nothing else converts between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zero.corpus.reading.batch_schedule import BatchSchedule


@dataclass(frozen=True)
class Position:
    """The position after `step` steps.

    Attributes:
      step: steps so far.
      schedule: the rows of each step's batch.
      row_tokens: tokens of a full-length row of the data, over all its texts.

    >>> position = Position(3, BatchSchedule(8, ((2, 4),)), row_tokens=10)
    >>> position.rows, position.tokens, position.tokens_of_step
    (16, 160, 80)
    """

    step: int
    schedule: BatchSchedule
    row_tokens: int

    def at(self, step: int) -> Position:
        """The position after another number of steps."""
        return replace(self, step=step)

    @property
    def batches(self) -> int:
        """Whole batches so far."""
        return self.step // self.schedule.steps_per_batch

    @property
    def first_row(self) -> int:
        """The index of the first row in the newest step's batch."""
        return self.schedule.rows_before(self.step - 1)

    @property
    def rows(self) -> int:
        """Rows of whole batches so far."""
        return self.schedule.rows_before(self.step)

    @property
    def tokens(self) -> int:
        """Their tokens."""
        return self.rows * self.row_tokens

    @property
    def tokens_of_step(self) -> int:
        """Tokens of the newest step: its share of the batch's tokens."""
        return self.schedule.rows_at(self.step - 1) * self.row_tokens // self.schedule.steps_per_batch

    def steps_to(self, last: int) -> range:
        """The last step of each batch, from here to step `last`."""
        return range(self.step + self.schedule.steps_per_batch, last + 1, self.schedule.steps_per_batch)

    def last_step(self, total_steps: int, total_batches: int | None) -> int:
        """The last step of a run with this many steps, whose data ends after this many batches; None: never."""
        if total_batches is None:
            return total_steps
        return min(total_steps, total_batches * self.schedule.steps_per_batch)
