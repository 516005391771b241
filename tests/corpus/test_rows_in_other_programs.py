"""`zero.corpus.Rows` as other programs use it: interrupted, forked, iterated twice, on other numbers of hosts."""

import json
import multiprocessing
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.shards import write_corpus
from zero.base.errors import UserError
from zero.corpus import Rows

COUNTS = [12, 9, 15, 6, 12, 12]
LIKE: dict[str, Any] = {"batch": 24, "context": 4, "seed": 3}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("rows") / "c", COUNTS)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    return write_corpus(folder, [30, 30], first=10_000).rename(folder / "other.index")


def taken(rows: Rows, count: int | None = None) -> list[Any]:
    return [tokens.tolist() for tokens in islice(rows, count)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_hosts_in_turn_with_all_options(index: Path, other: Path, tmp_path: Path, prefetch: int):
    """A mixture whose weights change, staged lengths, rows that are skipped: on 1, 3 and 8 hosts, as on one."""
    damaged = write_corpus(tmp_path / "c", COUNTS)
    (tmp_path / "c" / "shard-1.tar").unlink()
    corpora = {str(damaged): [[0, 0.5], [4, 0.9]], str(other): [[0, 0.5], [4, 0.1]]}
    options = LIKE | {"stages": [(3, 1), (3, 2)], "skip": 40, "prefetch": prefetch}
    alone = Rows(corpora, **options)
    expected = taken(alone, 12)
    found: list[Any] = []
    state = None
    checksum = skipped = 0
    for hosts, count in ((1, 2), (3, 3), (8, 4), (3, 2), (1, 1)):
        all_rows = [Rows(corpora, host=host, hosts=hosts, state=state, **options) for host in range(hosts)]
        before = state["skipped"] if state else 0
        parts = [taken(rows, count) for rows in all_rows]
        found += [np.concatenate(batch).tolist() for batch in zip(*parts, strict=True)]
        states = [json.loads(json.dumps(rows.state())) for rows in all_rows]
        assert len({json.dumps(one | {"skipped": 0}) for one in states}) == 1
        checksum += sum(rows.checksum for rows in all_rows)
        skipped += sum(one["skipped"] - before for one in states)
        state = states[0]
    assert found == expected and checksum % 2**32 == alone.checksum
    assert skipped == alone.skipped > 0
    assert alone.rows_seen() == all_rows[0].rows_seen()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_exception_in_the_loop(index: Path, prefetch: int):
    """After an exception in the loop's body, the next loop starts with the batch after the one that was being used."""
    expected = taken(Rows(index, **LIKE), 6)
    rows = Rows(index, prefetch=prefetch, **LIKE)
    with pytest.raises(RuntimeError, match="a device failed"):
        for number, _ in enumerate(rows):
            if number == 2:
                raise RuntimeError("a device failed")
    assert rows.state()["batches"] == 3
    assert taken(rows, 3) == expected[3:]


def test_two_iterators_of_one_object(index: Path):
    """They would share one position, and one would give batches that the other's state does not know."""
    rows = Rows(index, **LIKE)
    first = iter(rows)
    batches = [next(first), next(first)]
    second = iter(rows)
    batches.append(next(second))
    with pytest.raises(UserError, match="another loop over these rows has begun"):
        next(first)
    batches.append(next(second))
    assert [batch.tolist() for batch in batches] == taken(Rows(index, **LIKE), 4)
    assert rows.state()["batches"] == 4


def test_a_restored_object_leaves_a_running_loop(index: Path):
    rows = Rows(index, **LIKE)
    loop = iter(rows)
    next(loop)
    state = rows.state()
    next(loop)
    rows.restore(state)
    with pytest.raises(UserError, match="another loop over these rows has begun, or a state was restored"):
        next(loop)
    assert taken(rows, 2) == taken(Rows(index, **LIKE), 3)[1:]


def test_a_batch_with_too_many_skipped_rows_is_not_counted(tmp_path: Path):
    index = write_corpus(tmp_path / "c", COUNTS)
    (tmp_path / "c" / "shard-3.tar").unlink()
    rows = Rows(index, skip=2, **LIKE)
    given = 0
    with pytest.raises(UserError, match="rows could not be read, more than skip=2"):
        for _ in rows:
            given += 1
    assert rows.state()["batches"] == given and rows.skipped <= 2


def test_changing_a_batch_changes_no_other(index: Path):
    """A step may write into its batch."""
    expected = taken(Rows(index, **LIKE), 8)
    found = []
    for tokens in islice(Rows(index, **LIKE), 8):
        found.append(tokens.tolist())
        tokens[:] = -7
    assert found == expected


def _of_child(rows: Rows, connection: Any) -> None:
    connection.send((taken(rows, 3), rows.state()))
    connection.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")  # other tests have started jax
def test_in_a_worker(index: Path, method: str):
    """As a worker of PyTorch: forked in the middle of a loop, whose threads it has not, or started anew."""
    rows = Rows(index, **LIKE)
    loop = iter(rows)
    next(loop)
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_of_child, args=(rows, there))
    child.start()
    there.close()
    assert here.poll(120)
    found, state = here.recv()
    child.join()
    assert found == taken(Rows(index, **LIKE), 4)[1:]
    assert state["batches"] == 4 and rows.state()["batches"] == 1
    loop.close()  # type: ignore[attr-defined]


def test_ten_thousand_members(tmp_path: Path):
    index = write_corpus(tmp_path, [10_000], rows_per_member=1)
    rows = [row for tokens in Rows(index, batch=500, context=4, epochs=1) for row in tokens.tolist()]
    assert sorted(rows) == [[i, i + 1, i + 2, i + 3] for i in range(10_000)]


def test_pickled_in_the_middle_of_a_loop(index: Path):
    rows = Rows(index, **LIKE)
    loop = iter(rows)
    next(loop)
    assert taken(pickle.loads(pickle.dumps(rows)), 2) == taken(Rows(index, **LIKE), 3)[1:]
    loop.close()  # type: ignore[attr-defined]


def test_a_state_without_an_entry_is_refused(index: Path):
    state = Rows(index, **LIKE).state()
    for missing in state:
        with pytest.raises(UserError, match=f"{missing}"):
            Rows(index, state={key: value for key, value in state.items() if key != missing}, **LIKE)
    for batches in (-1, 2.5, "3", None):
        with pytest.raises(UserError, match="batches"):
            Rows(index, state=state | {"batches": batches}, **LIKE)
