"""Rows before a step, rows of a step and the step of a row are those of a list of all batches."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.shards import first_tokens, flat, loader, write_corpus
from zero.base.errors import UserError
from zero.corpus.reading.batch_schedule import BatchSchedule

pytestmark = pytest.mark.quick
SMALL = st.integers(1, 9)


@given(SMALL, st.lists(st.tuples(SMALL, SMALL), max_size=4), st.integers(1, 3))
def test_conversions_are_those_of_a_list(rows: int, stages: list[tuple[int, int]], steps_per_batch: int) -> None:
    in_steps = tuple((batches * steps_per_batch, size) for batches, size in stages)
    schedule = BatchSchedule(rows, in_steps, steps_per_batch)
    sizes = [size for batches, size in stages for _ in range(batches)] + [rows] * 5
    step_of_row = [number * steps_per_batch for number, size in enumerate(sizes) for _ in range(size)]
    for step in range(len(sizes) * steps_per_batch):
        assert schedule.rows_at(step) == sizes[step // steps_per_batch]
        assert schedule.rows_before(step) == sum(sizes[: step // steps_per_batch])
    assert [schedule.step_of(row) for row in range(len(step_of_row))] == step_of_row
    assert all(size % schedule.divisor == 0 for size in sizes)
    assert schedule.step_of(schedule.rows_before(steps_per_batch)) == steps_per_batch


STAGED = BatchSchedule(8, ((2, 4), (3, 12)))


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_staged_batches(tmp_path: Path, hosts: int) -> None:
    """Each row is once in an epoch, hosts share each batch, and a resume at any step gives the batches that follow."""
    index = write_corpus(tmp_path, [30, 21, 17])
    options = {"global_rows": STAGED, "seed": 3, "max_epochs": 2, "shuffle_shards": 2}
    batches = list(loader(index, **options).batches())
    rows = [batch.tokens[:, 0].tolist() for batch in batches]
    assert [len(batch) for batch in rows] == [4, 4, 12, 12, 12] + [8] * 11
    assert len(batches) == loader(index, **options).total_batches == STAGED.step_of(2 * 68)
    assert sorted(flat(rows)[:68]) == list(range(68))
    for start in (None, 0, 1, 4, 9):
        cursor = None if start is None else batches[start].cursor
        parts = [loader(index, **options, host=host, hosts=hosts).batches(cursor) for host in range(hosts)]
        got = [flat(part.tokens[:, 0].tolist() for part in of_hosts) for of_hosts in zip(*parts, strict=True)]
        assert got == rows[0 if start is None else start + 1 :]


def test_mixture_by_steps(tmp_path: Path) -> None:
    """A weight that changes at a step changes with its batch, whatever the rows of the batches before."""
    indices = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        place = write_corpus(tmp_path / str(number), [90], first=1000 * number)
        indices.append(str(place.rename(place.parent / f"c{number}.index")))
    mixture = {indices[0]: [[0, 1], [3, 0]], indices[1]: [[0, 0], [3, 1]]}
    data = loader(mixture, global_rows=STAGED, shuffle_shards=1)
    batches = first_tokens(data.batches(), 6)
    assert [{row >= 1000 for row in batch} for batch in batches] == [{False}] * 3 + [{True}] * 3
    assert data.rows_seen(4) == {"c0": 20, "c1": 12}
    assert data.epochs_seen(4)["c0"] == pytest.approx(20 / 90)


def test_other_stages_are_refused(tmp_path: Path) -> None:
    index = write_corpus(tmp_path, [30])
    cursor = next(itertools.islice(loader(index, global_rows=STAGED).batches(), 2, None)).cursor
    with pytest.raises(UserError, match=r"belongs to batch_stages=\[\[2, 4\], \[3, 12\]\], not to batch_stages=\[\]"):
        next(loader(index, global_rows=8).batches(cursor))
    with pytest.raises(UserError, match="a global batch of 4 rows cannot be split into 8 parts"):
        loader(index, global_rows=STAGED, hosts=8)
