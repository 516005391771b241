"""Rows longer than the context: no token lost with `all`, offsets from (seed, epoch, row) with `random`."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.shards import loader, npy, write_tar
from zero.base.errors import UserError
from zero.corpus.reading.loader import Loader

ROW = 11  # tokens of a row: two sequences of 4, or 8 offsets
COUNTS = [5, 3, 7]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of consecutive numbers: token p of row r is 100 r + p; odd positions are completions."""
    directory = tmp_path_factory.mktemp("long")
    numbers = itertools.count()
    for shard, count in enumerate(COUNTS):
        members = {}
        for start in range(0, count, 2):
            rows = np.array([[100 * next(numbers)] for _ in range(min(2, count - start))]) + np.arange(ROW)
            members[f"{start:03}.input_id.npy"] = npy(rows.astype(np.uint16))
            members[f"{start:03}.completion.npy"] = npy((rows % 2).astype(np.uint8))
        write_tar(directory / f"{shard}.tar", members)
    (directory / "it.index").write_text("".join(f"{i}.tar # {count} rows\n" for i, count in enumerate(COUNTS)))
    return directory / "it.index"


def read(data: Loader, count: int | None = None, cursor: dict[str, int] | None = None) -> list[list[int]]:
    batches = itertools.islice(data.batches(cursor), count)
    return np.concatenate([batch.tokens for batch in batches]).tolist()


def test_all_pieces_once_an_epoch(index: Path):
    """Each row gives floor(11 / 4) sequences, of which each comes once an epoch."""
    expected = [list(range(100 * r + p, 100 * r + p + 4)) for r in range(sum(COUNTS)) for p in (0, 4)]
    data = loader(index, crop="all", max_epochs=1, global_rows=5)
    assert data.rows == len(expected) == 30
    assert sorted(read(data)) == expected
    in_order = loader(index, crop="all", max_epochs=1, global_rows=5, shuffle=False)
    assert read(in_order) == expected
    capped = loader(index, crop="all", max_epochs=1, global_rows=3, train_samples=6)
    assert sorted(read(capped)) == expected[:12]


def test_random_offsets_of_an_epoch(index: Path):
    """One sequence per row and epoch, at an offset that fits, another one in another epoch and with another seed."""
    offsets: dict[tuple[int, int], dict[int, int]] = {}
    for seed in (0, 1):
        rows = read(loader(index, crop="random", max_epochs=2, global_rows=5, seed=seed))
        for epoch, part in enumerate((rows[:15], rows[15:])):
            assert all(row == list(range(row[0], row[0] + 4)) for row in part)
            offsets[seed, epoch] = {row[0] // 100: row[0] % 100 for row in part}
            assert offsets[seed, epoch].keys() == set(range(15))
            assert set(offsets[seed, epoch].values()) <= set(range(ROW - 4 + 1))
    assert len({json.dumps(one, sort_keys=True) for one in offsets.values()}) == 4
    assert len({offset for one in offsets.values() for offset in one.values()}) == ROW - 4 + 1


def test_offsets_are_fixed(index: Path):
    """Written down, because a resumed run must find the same offsets under any version of numpy."""
    rows = sorted(read(loader(index, crop="random", max_epochs=1, global_rows=5, seed=7)))
    assert [row[0] % 100 for row in rows] == [2, 4, 0, 1, 0, 4, 7, 2, 6, 4, 3, 4, 5, 7, 0]


@pytest.mark.parametrize("crop", ["all", "random"])
@pytest.mark.parametrize("hosts", [1, 3])
def test_resumes_on_other_hosts(index: Path, crop: str, hosts: int):
    """From any cursor, on any number of hosts, the sequences are those of an uninterrupted run on one."""
    options: dict[str, Any] = {"crop": crop, "global_rows": 6, "seed": 3, "shuffle_shards": 2}
    batches = list(itertools.islice(loader(index, **options).batches(), 12))
    for done in (1, 2, 7):  # within the first epoch, at its end, and later
        parts = [
            loader(index, **options, host=host, hosts=hosts).batches(batches[done - 1].cursor) for host in range(hosts)
        ]
        for expected in batches[done:]:
            got = np.concatenate([next(part).tokens for part in parts])
            np.testing.assert_array_equal(got, expected.tokens)


@pytest.mark.parametrize("crop", ["all", "random"])
def test_masks_are_cut_alike(index: Path, crop: str):
    """A token that is not learned is ~t, wherever its sequence begins."""
    options: dict[str, Any] = {"crop": crop, "max_epochs": 1, "global_rows": 5}
    plain, masked = (np.array(read(loader(index, **options, only_completions=one))) for one in (False, True))
    np.testing.assert_array_equal(masked, np.where(plain % 2, plain, ~plain))


@pytest.mark.parametrize(("crop", "expected"), [("all", {0: [4, 2], 1: [4, 0]}), ("random", {0: [4], 1: [4]})])
def test_padding_of_pieces(tmp_path: Path, crop: str, expected: dict[int, list[int]]):
    """Of padded rows each piece has its own length, and no random one begins in the padding."""
    rows = np.array([range(10), range(100, 110)], np.uint16)
    members = {"0.input_id.npy": npy(rows), "0.length.npy": npy(np.array([6, 4]))}
    write_tar(tmp_path / "0.tar", members)
    (tmp_path / "it.index").write_text("0.tar # 2 rows\n")
    got = loader(tmp_path / "it.index", crop=crop, max_epochs=1, global_rows=2)
    lengths: dict[int, list[int]] = {0: [], 1: []}
    for row, sequence in zip(itertools.cycle((0, 0, 1, 1) if crop == "all" else (0, 1)), sorted(read(got), key=_place)):
        lengths[row].append(sum(token >= 0 for token in sequence))
    assert lengths == expected


def _place(sequence: list[int]) -> int:
    """Sorts by the first token; an empty piece, here of the second row, comes last."""
    return sequence[0] if sequence[0] >= 0 else 999


def test_warns_of_discarded_tokens(index: Path, caplog: pytest.LogCaptureFixture):
    """Where more than 1 % is left out, the first sample that is read says how much, once."""
    for crop, warning in (("first", "63.6% of the tokens"), ("all", "27.3% of the tokens"), ("random", None)):
        caplog.clear()
        read(loader(index, crop=crop, max_epochs=1, global_rows=5))
        found = [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()]
        assert len(found) == (warning is not None) and (warning is None or warning in found[0])
    caplog.clear()
    read(loader(index, context=ROW, max_epochs=1, global_rows=5))
    assert not caplog.records


def test_cursor_of_another_crop(index: Path):
    """A cursor of another crop is refused."""
    cursor = next(loader(index, crop="random").batches()).cursor
    with pytest.raises(UserError, match="cursor belongs to crop=2, not to crop=0"):
        next(loader(index).batches(cursor))


def test_rows_of_several_lengths(tmp_path: Path):
    """`all` expects rows of one length: the order is made before they are read."""
    for number, length in enumerate((8, 12)):
        write_tar(tmp_path / f"{number}.tar", {"0.input_id.npy": npy(np.zeros((4, length), np.uint16))})
    (tmp_path / "it.index").write_text("0.tar # 4 rows\n1.tar # 4 rows\n")
    with pytest.raises(
        UserError, match=r"1\.tar, sample 0: data.crop=all expects rows of one length; these give: 3 seq"
    ):
        read(loader(tmp_path / "it.index", crop="all", max_epochs=1))
