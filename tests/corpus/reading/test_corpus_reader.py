"""Bad data: named, or skipped alike on all hosts."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.shards import loader, write_corpus
from zero.errors import UserError


def bad_corpus(directory: Path) -> Path:
    """Six shards of 9 rows in members of 3: one is missing, one cut in its third member, one has a bad second one."""
    index = write_corpus(directory, [9] * 6)
    (directory / "shard-1.tar").unlink()
    (directory / "shard-3.tar").write_bytes((directory / "shard-3.tar").read_bytes()[:2200])
    data = bytearray((directory / "shard-4.tar").read_bytes())
    data[1536:1544] = b"no array"
    (directory / "shard-4.tar").write_bytes(data)
    return index


LOST = {*range(9, 18), *range(30, 36), *range(39, 42)}  # a sample before a cut may miss a member: it is lost as well


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_bad_rows_are_skipped_alike(tmp_path: Path, caplog, hosts: int, position: int):
    """Bad rows are skipped alike on every host."""
    index = bad_corpus(tmp_path)
    options = {"skip_bad": True, "max_epochs": 2, "global_rows": 4}
    whole = list(loader(index, **options).batches())
    rows = np.concatenate([batch.tokens for batch in whole])
    seen = rows[rows[:, 0] >= 0]
    assert Counter(seen[:, 0].tolist()) == dict.fromkeys(set(range(54)) - LOST, 2) and (np.diff(seen) == 1).all()
    assert (rows == -1).all(axis=1).sum() == 2 * len(LOST)  # each keeps its place and holds nothing
    assert sum(batch.skipped for batch in whole) == 2 * len(LOST)
    for name in ("shard-1.tar is missing", "shard-3.tar is truncated", "shard-4.tar, sample 000039: member input_id"):
        assert f"skipped: shard {tmp_path}/{name}" in caplog.text
    cursor = whole[position - 1].cursor if position else None
    shares = [loader(index, **options, host=host, hosts=hosts).batches(cursor) for host in range(hosts)]
    for batch, *parts in zip(whole[position:], *shares, strict=True):
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), batch.tokens)
        assert sum(part.skipped for part in parts) == batch.skipped


def test_nothing_is_skipped_unasked(tmp_path: Path):
    index = bad_corpus(tmp_path)
    with pytest.raises(UserError, match=r"it\.index: shard .*shard-1\.tar is missing"):
        loader(index)
    index.write_text(index.read_text().replace("shard-1.tar # 9 rows\n", ""))
    with pytest.raises(UserError, match=r"shard-3\.tar is truncated or damaged|sample 000039: member input_id\.npy"):
        list(loader(index, max_epochs=1).batches())


def test_missing_shard_is_named(tmp_path: Path):
    """A shard that goes missing is named."""
    data = loader(write_corpus(tmp_path, [9] * 2), max_epochs=1)
    (tmp_path / "shard-1.tar").unlink()
    with pytest.raises(UserError, match=r"^shard .*shard-1\.tar is missing$"):
        list(data.batches())


def test_skipped_rows_are_counted(tmp_path: Path):
    """Skipped rows must be counted, and an index must not be wrong."""
    index = bad_corpus(tmp_path)
    index.write_text(index.read_text().replace("shard-1.tar # 9 rows", "shard-1.tar"))
    with pytest.raises(
        UserError, match=r"shard-1\.tar is missing, and the index file does not record its number of rows"
    ):
        loader(index, skip_bad=True)
    index.write_text("shard-0.tar # 8 rows\nshard-4.tar # 5 rows\n")
    for shard, rows in (("shard-0.tar", 9), ("shard-4.tar", 6)):
        index.write_text(f"{shard} # {rows - 1} rows\n")
        with pytest.raises(UserError, match=rf"{shard} holds {rows} rows, but the index file records {rows - 1}"):
            list(loader(index, skip_bad=True, max_epochs=1).batches())


def test_shard_contradicts_the_index(tmp_path: Path):
    """A shard that contradicts the index is named."""
    index = write_corpus(tmp_path, [9])
    for said in (8, 10):
        index.write_text(f"shard-0.tar # {said} rows\n")
        with pytest.raises(UserError, match=rf"shard-0\.tar holds 9 rows, but the index file records {said}"):
            list(loader(index, max_epochs=1).batches())
