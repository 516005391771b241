"""Steps, rows and tokens of a run, by the definition of each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero.corpus.reading.batch_schedule import BatchSchedule
from zero.run.position import Position

pytestmark = pytest.mark.quick
SMALL = st.integers(1, 7)


@given(SMALL, st.lists(st.tuples(SMALL, SMALL), max_size=3), SMALL, SMALL)
def test_conversions(rows: int, stages: list[tuple[int, int]], steps_per_batch: int, row_tokens: int) -> None:
    """A walk over all steps: each batch is counted when its last step is made."""
    in_steps = tuple((batches * steps_per_batch, size) for batches, size in stages)
    sizes = [size for batches, size in stages for _ in range(batches)] + [rows] * 4
    start = Position(0, BatchSchedule(rows, in_steps, steps_per_batch), row_tokens * steps_per_batch)
    seen = 0
    steps = start.steps_to(len(sizes) * steps_per_batch)
    for number, (step, size) in enumerate(zip(steps, sizes, strict=True), 1):
        now = start.at(step)
        assert (now.batches, now.first_row, now.tokens_of_step) == (number, seen, size * row_tokens)
        seen += size
        assert (now.rows, now.tokens) == (seen, seen * start.row_tokens)
        assert list(now.steps_to(steps[-1])) == list(steps)[number:]


def test_data_that_end_early() -> None:
    """Steps are counted, not batches."""
    start = Position(0, BatchSchedule(8, steps_per_batch=4), 32)
    assert start.last_step(12, None) == start.last_step(12, 3) == start.last_step(12, 9) == 12
    assert start.last_step(12, 2) == 8
