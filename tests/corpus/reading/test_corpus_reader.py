"""Bad data: named, or skipped alike on all hosts."""

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.shards import Unsliced, loader, npy, write_corpus, write_tar
from zero.base.errors import UserError
from zero.corpus.format.shards import BadData


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
    assert sum(batch.is_skipped.sum() for batch in whole) == 2 * len(LOST)
    for name in ("shard-1.tar is missing", "shard-3.tar is truncated", "shard-4.tar, sample 000039: member input_id"):
        assert f"skipped: shard {tmp_path}/{name}" in caplog.text
    cursor = whole[position - 1].cursor if position else None
    shares = [loader(index, **options, host=host, hosts=hosts).batches(cursor) for host in range(hosts)]
    for batch, *parts in zip(whole[position:], *shares, strict=True):
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), batch.tokens)
        np.testing.assert_array_equal(np.concatenate([part.is_skipped for part in parts]), batch.is_skipped)


def test_nothing_is_skipped_unasked(tmp_path: Path):
    index = bad_corpus(tmp_path)
    with pytest.raises(UserError, match=r"it\.index: shard .*shard-1\.tar is missing"):
        loader(index)
    index.write_text(index.read_text().replace("shard-1.tar # 9 rows\n", ""))
    with pytest.raises(UserError, match=r"shard-3\.tar is truncated or damaged|sample 000039: member input_id\.npy"):
        list(loader(index, max_epochs=1).batches())


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def fill_with_zeros(path: Path, first: int = 0) -> None:
    """As a disk that has failed leaves a file: zeros from this byte on."""
    data = path.read_bytes()
    path.write_bytes(data[:first] + bytes(len(data) - first))


@pytest.mark.parametrize(
    ("damage", "lost", "problem"),
    [
        (make_folder, 9, "is not a file"),
        (make_pipe, 9, "is not a file"),
        (fill_with_zeros, 9, "holds 0 rows, but the index file records 9"),
        (lambda path: fill_with_zeros(path, 1024), 6, "holds 3 rows, but the index file records 9"),
        (lambda path: path.write_bytes(b""), 9, "is truncated or damaged: unexpected end of file"),
    ],
    ids=["folder", "pipe", "zeros", "zeros at the end", "empty"],
)
def test_shards_of_all_kinds_of_damage_are_skipped(
    tmp_path: Path, caplog, damage: Callable[[Path], None], lost: int, problem: str
):
    """What is no shard, or a part of one, is skipped and counted like one that is missing."""
    index, shard = write_corpus(tmp_path, [9] * 3), tmp_path / "shard-1.tar"
    damage(shard)
    assert (
        sum(batch.is_skipped.sum() for batch in loader(index, skip_bad=True, max_epochs=1, global_rows=3).batches())
        == lost
    )
    assert f"skipped: shard {shard} {problem}" in caplog.text
    with pytest.raises(BadData, match=f"{re.escape(str(shard))} {problem}"):
        list(loader(index, max_epochs=1).batches())


def test_name_that_no_file_can_have_is_skipped(tmp_path: Path, caplog):
    index = write_corpus(tmp_path, [9] * 3)
    name = "a" * 300
    index.write_text(index.read_text().replace("shard-1.tar", name))
    assert (
        sum(batch.is_skipped.sum() for batch in loader(index, skip_bad=True, max_epochs=1, global_rows=3).batches())
        == 9
    )
    assert f"{name} is missing: File name too long" in caplog.text


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("lengths_first", [False, True])
def test_members_that_are_no_neighbors_are_refused(tmp_path: Path, skip_bad: bool, lengths_first: bool):
    """Rows whose lengths stand elsewhere in the shard would be read without them: padding would be learned."""
    rows = {f"{i}.input_id.npy": npy(np.arange(8).reshape(2, 4)) for i in range(3)}
    lengths = {f"{i}.length.npy": npy(np.array([1, 2])) for i in range(3)}
    write_tar(tmp_path / "s.tar", lengths | rows if lengths_first else rows | lengths)
    (tmp_path / "it.index").write_text("s.tar # 6 rows\n")
    data = loader(tmp_path / "it.index", max_epochs=1, global_rows=2, skip_bad=skip_bad)
    is_noticed_before = lengths_first and not skip_bad
    message = " has no member input_id" if is_noticed_before else ": its members are not adjacent"
    with pytest.raises(UserError, match=rf"s\.tar, sample 0{message}") as caught:
        next(data.batches())
    assert isinstance(caught.value, BadData) == is_noticed_before


def test_joined_shards_may_repeat_a_key(tmp_path: Path):
    """Two whole samples of one key are two samples."""
    (tmp_path / "s.tar").write_bytes(
        write_tar(tmp_path / "one.tar", {"0.input_id.npy": npy(np.arange(4)), "1.input_id.npy": npy(np.arange(4))})
        .read_bytes()
        .rstrip(b"\0")
        .ljust(2 * 1024, b"\0")
        + write_tar(tmp_path / "two.tar", {"0.input_id.npy": npy(np.arange(4))}).read_bytes()
    )
    (tmp_path / "it.index").write_text("s.tar # 3 rows\n")
    (batch,) = loader(tmp_path / "it.index", max_epochs=1, global_rows=3).batches()
    assert batch.tokens[:, 0].tolist() == [0, 0, 0]


def test_size_beyond_memory_is_damage(tmp_path: Path):
    """A header that states 8 GiB, more than the shard has, is damage, and nothing of that size is allocated."""
    index = write_corpus(tmp_path, [9] * 2)
    data = bytearray((tmp_path / "shard-1.tar").read_bytes())
    data[124:136] = b"77777777777\0"
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * 32 + sum(data[156:512]))
    (tmp_path / "shard-1.tar").write_bytes(data)
    with pytest.raises(BadData, match=r"shard-1\.tar is truncated or damaged: unexpected end of file; copy it again"):
        list(loader(index, max_epochs=1, shuffle=False).batches())


def test_first_sample_without_rows_discards_nothing(tmp_path: Path, caplog):
    """The warning of tokens that a crop leaves out is about the first sample that has some."""
    rows = np.arange(4 * 3).reshape(2, 6)
    write_tar(tmp_path / "s.tar", {"0.input_id.npy": npy(rows[:0]), "1.input_id.npy": npy(rows)})
    (tmp_path / "it.index").write_text("s.tar # 2 rows\n")
    list(loader(tmp_path / "it.index", max_epochs=1, global_rows=2).batches())
    (warning,) = caplog.messages
    assert "leaves out 33.3% of the tokens" in warning


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


def test_rows_before_a_shard_are_added_up_once(tmp_path: Path):
    """Not once for each range that is read: a corpus of a million shards would take the square."""
    data = loader(write_corpus(tmp_path, [9] * 20), max_epochs=1)
    order = data.corpora[0].order
    object.__setattr__(order, "rows", Unsliced(order.rows))
    assert sorted(np.concatenate([batch.tokens[:, 0] for batch in data.batches()]).tolist()) == list(range(180))
