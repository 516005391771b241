"""The loader: one order for any number of hosts, and exact after any cursor."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.shards import COUNTS, PATIENT, first_tokens, flat, loader, write_corpus
from zero.base.errors import UserError
from zero.corpus.format.index_files import read_index
from zero.corpus.reading.corpus_reader import CorpusReader


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pieces that loaders read from now on."""
    read, pieces = CorpusReader._read, []

    def watch(corpus, piece, *rest):
        pieces.append(piece)
        return read(corpus, piece, *rest)

    monkeypatch.setattr(CorpusReader, "_read", watch)
    return pieces


@PATIENT
@given(
    counts=COUNTS, rows=st.sampled_from([1, 2, 3, 4, 6, 8]), epochs=st.integers(1, 4), shuffle_shards=st.integers(1, 20)
)
def test_every_sample_once_an_epoch(corpus, counts: list[int], rows: int, epochs: int, shuffle_shards: int):
    total = sum(counts)
    if epochs * total < rows:
        return
    data = loader(corpus(counts), global_rows=rows, max_epochs=epochs, shuffle_shards=shuffle_shards)
    batches = list(data.batches())
    assert len(batches) == data.total_batches == epochs * total // rows
    seen = Counter(np.concatenate([batch.tokens[:, 0] for batch in batches]).tolist())
    assert sum(seen.values()) == epochs * total - epochs * total % rows  # only what fills no batch is dropped
    assert set(seen) <= set(range(total)) and max(seen.values()) <= epochs
    for batch in batches:  # and rows are whole
        assert (np.diff(batch.tokens) == 1).all()
    # Each stream finishes an epoch within a row of the others: no sample comes again before its epoch is over.
    early = flat(first_tokens(iter(batches), total // rows))
    assert len(early) == len(set(early))


@PATIENT
@given(
    counts=COUNTS,
    seed=st.integers(0, 3),
    shuffle_shards=st.integers(1, 20),
    position=st.integers(0, 40),
    data=st.data(),
)
def test_resume_is_exact_at_any_position(corpus, counts, seed: int, shuffle_shards: int, position: int, data):
    options = {"seed": seed, "shuffle_shards": shuffle_shards, "global_rows": 4}
    batches = loader(corpus(counts), **options).batches()
    cursor = None
    for _ in range(position):
        cursor = json.loads(json.dumps(next(batches).cursor))
    expected = first_tokens(batches, 12)
    hosts = data.draw(st.sampled_from([1, 2, 4]))
    resumed = [
        first_tokens(loader(corpus(counts), **options, host=host, hosts=hosts).batches(cursor), 12)
        for host in range(hosts)
    ]
    assert [flat(parts) for parts in zip(*resumed, strict=True)] == expected


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("hosts", [2, 3, 4, 12])
def test_hosts_share_one_order(corpus, hosts: int, shuffle: bool):
    options = {"global_rows": 12, "max_epochs": 3, "shuffle": shuffle}
    index = corpus([7, 3, 12, 5, 9])
    whole = list(loader(index, **options).batches())
    parts = [list(loader(index, **options, host=host, hosts=hosts).batches()) for host in range(hosts)]
    for batch, *shares in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate([share.tokens for share in shares]), batch.tokens)
        assert {json.dumps(share.cursor) for share in shares} == {json.dumps(batch.cursor)}
        assert all(share.tokens.dtype == np.int32 for share in shares)


def test_hosts_open_own_shards(corpus, monkeypatch):
    """A host opens its own shards only."""
    counts = [6] * 8
    index = corpus(counts)
    opened: list[list[str]] = []
    for host in range(4):
        data = loader(index, global_rows=8, host=host, hosts=4, max_epochs=1)
        pieces = watch_reads(monkeypatch)
        assert len(list(data.batches())) == 6
        opened.append([data.corpora[0].shards[piece.shard].path for piece in pieces])
    assert sorted(flat(opened)) == sorted(shard.path for shard in read_index(index))  # each by one host, once
    assert all(len(mine) == 2 for mine in opened)


def test_order_of_epochs_and_seeds(corpus):
    """Epochs and seeds each have their own order."""
    index = corpus([12] * 6)
    epochs = first_tokens(loader(index, max_epochs=2).batches())
    rows = flat(epochs)
    assert sorted(rows[:72]) == sorted(rows[72:]) == list(range(72))
    assert rows[:72] != rows[72:]
    assert epochs != first_tokens(loader(index, max_epochs=2, seed=1).batches())
    assert epochs == first_tokens(loader(index, max_epochs=2).batches())
    alone = flat(first_tokens(loader(index, max_epochs=2, shuffle_shards=1, global_rows=1).batches()))
    shards = [list(dict.fromkeys(row // 12 for row in part)) for part in (alone[:72], alone[72:])]
    assert sorted(shards[0]) == sorted(shards[1]) == list(range(6)) and shards[0] != shards[1]


def test_order_is_fixed(corpus):
    """The order is the same under any version of numpy.

    Written down, because a resumed run must find the same order under any version of numpy.
    """
    rows = first_tokens(loader(corpus([7, 3, 12, 5]), seed=7).batches(), 3)
    assert rows == [[24, 6, 11, 21], [0, 2, 13, 9], [25, 3, 17, 8]]


def test_a_shuffle_buffer_mixes_its_shards(corpus):
    order = np.array(
        flat(first_tokens(loader(corpus([12] * 8), global_rows=1, shuffle_shards=8, max_epochs=1).batches()))
    )
    assert abs(np.corrcoef(order, np.arange(96))[0, 1]) < 0.3
    assert len(set((order[:24] // 12).tolist())) == 8  # a quarter of the epoch has met every shard


def test_cost_of_resuming(corpus, monkeypatch):
    """A resume far into a run reads no more than an early one."""
    index = corpus([12] * 8)
    reads = []
    for position in (0, 5, 10**9):
        data = loader(index, global_rows=8, shuffle_shards=8)
        cursor = None if position == 0 else {**next(data.batches()).cursor, "batches": position}
        pieces = watch_reads(monkeypatch)
        next(data.batches(cursor))
        reads.append(len(pieces))
    assert max(reads) <= 16  # a shuffle buffer per stream, and the next one ahead


def test_validation_order(corpus):
    """Validation is in order, and its last batch is filled up."""
    index = corpus([5, 4, 2])
    data = loader(index, shuffle=False, max_epochs=1, global_rows=4)
    assert data.total_batches == 3
    assert first_tokens(data.batches()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, -1]]
    *_, last = data.batches()
    assert (last.tokens[3] == -1).all()
    share = loader(index, shuffle=False, max_epochs=1, global_rows=4, host=1, hosts=2)
    assert first_tokens(share.batches()) == [[2, 3], [6, 7], [10, -1]]


def test_train_samples_caps_an_epoch(corpus):
    index = corpus([5, 4, 2])
    batches = loader(index, train_samples=7, max_epochs=4, global_rows=7).batches()
    assert [sorted(rows) for rows in first_tokens(batches)] == [list(range(7))] * 4
    assert loader(index, train_samples=100).rows == 11


def test_unused_data_is_not_read(tmp_path: Path):
    """Data that is not used is not read."""
    index = write_corpus(tmp_path, [12])
    data = bytearray((tmp_path / "shard-0.tar").read_bytes())
    data[3072:4096] = b"?" * 1024  # the fourth member
    (tmp_path / "shard-0.tar").write_bytes(data)
    (rows,) = first_tokens(loader(index, train_samples=4, max_epochs=1).batches())
    assert sorted(rows) == [0, 1, 2, 3]


def test_several_indices_count_as_one(corpus):
    indices = [corpus([5, 4]), corpus([3])]
    (rows,) = first_tokens(loader(indices, global_rows=12, max_epochs=1).batches())
    assert sorted(rows) == sorted([*range(9), *range(3)])


def test_what_is_dropped_is_said(corpus, caplog):
    with caplog.at_level("INFO"):
        list(loader(corpus([5, 4, 2]), max_epochs=1).batches())
    assert "the last 3 rows do not fill a batch" in caplog.text


def test_nothing_is_read_beyond_the_end(corpus, monkeypatch):
    data = loader(corpus([5, 4, 2]), shuffle=False, max_epochs=1)
    pieces = watch_reads(monkeypatch)
    list(data.batches())
    assert len(pieces) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed=0, not to seed=1"),
        ({"global_rows": 2}, "global_rows=4, not to global_rows=2"),
        ({"shuffle_shards": 3}, "shuffle_shards=16, not to shuffle_shards=3"),
        ({"shuffle": False}, "shuffle=1, not to shuffle=0"),
        ({"train_samples": 5}, "other shards"),
    ],
)
def test_cursor_of_another_order(corpus, change: dict[str, Any], message: str):
    """A cursor of another order is refused."""
    cursor = next(loader(corpus([5, 4, 2])).batches()).cursor
    with pytest.raises(UserError, match=f"cursor belongs to {message}"):
        next(loader(corpus([5, 4, 2]), **change).batches(cursor))


def test_cursor_of_other_data(corpus, tmp_path: Path):
    """A cursor of other data is refused by name, and one of moved or renamed data is not."""
    cursor = json.loads(json.dumps(next(loader(write_corpus(tmp_path / "here", [5, 4, 2])).batches()).cursor))
    next(loader(write_corpus(tmp_path / "there" / "renamed", [5, 4, 2])).batches(cursor))
    other = write_corpus(tmp_path / "other" / "here", [5, 4, 2], first=1)
    with pytest.raises(UserError, match=r"cursor belongs to other shards: .*other/here/it.index has as many rows as b"):
        next(loader(other).batches(cursor))
    longer = write_corpus(tmp_path / "longer", [5, 4, 2, 3])
    with pytest.raises(UserError, match=r"longer/it.index had 11 rows and has 14 now; data.train_samples=11 reads"):
        next(loader(longer).batches(cursor))
    next(loader(longer, train_samples=11).batches(cursor))


def test_cursor_that_knows_the_data_by_other_facts(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Contents that cannot be compared are compared by names and rows, and a warning says so."""
    cursor = next(loader(write_corpus(tmp_path / "here" / "mine", [5, 4, 2])).batches()).cursor
    path, rows, _, digest = cursor["contents"][0]
    by_bucket = cursor | {"contents": [[path, rows, "crc32c", digest]]}
    next(loader(write_corpus(tmp_path / "there" / "mine", [5, 4, 2])).batches(by_bucket))
    assert "compared by the names and rows of shards only" in caplog.text
    with pytest.raises(UserError, match="cursor belongs to other shards than the index file lists now"):
        next(loader(write_corpus(tmp_path / "there" / "other", [5, 4, 2])).batches(by_bucket))
