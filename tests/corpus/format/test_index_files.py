"""Index files: names, row counts, and what is wrong with them."""

import errno
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.shards import first_tokens, loader, npy, write_corpus, write_tar
from zero.base.errors import Unavailable, UserError
from zero.corpus.format import index_files
from zero.corpus.format.index_files import _paths_of, index_paths, listed_shards, read_index
from zero.corpus.preparing.corpus_files import index_text
from zero.files import storage

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("counted", [True, False])
def test_rows_are_counted(tmp_path: Path, counted: bool):
    """Rows are counted where the index does not give their number."""
    index = write_corpus(tmp_path, [700, 3, 1200], rows_per_member=300, counted=counted)
    assert [shard.rows for shard in read_index(index)] == [700, 3, 1200]
    (rows,) = first_tokens(loader(index, global_rows=1903, max_epochs=1).batches())
    assert sorted(rows) == list(range(1903))


@pytest.mark.parametrize("folder", [".", "c/d", "../c", "/a"])
@pytest.mark.parametrize("comment", ["", " # 7 rows"])
def test_lines_are_read_alike(tmp_path: Path, folder: str, comment: str):
    """The lines of zero-prepare, which are read all at once, mean the same as beside a line of another form."""
    lines = "".join(f"{folder}/{number}.tar{comment}\n" for number in range(3))
    (tmp_path / "plain.index").write_text(lines)
    (tmp_path / "other.index").write_text(f"  # as people write them\n{lines}")
    plain, other = listed_shards(tmp_path / "plain.index"), listed_shards(tmp_path / "other.index")
    assert plain.paths == other.paths == [storage.join(tmp_path, f"{folder}/{number}.tar") for number in range(3)]
    assert plain.rows.tolist() == other.rows.tolist() == [7 if comment else 0] * 3
    assert plain.names == [shard.name for shard in plain]


def test_an_index_of_zero_prepare_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the comment at its beginning: a million lines that are read one by one take half a minute."""
    index = tmp_path / "index" / "a_train.index"
    index.parent.mkdir()
    summary = {"tokens": 8, "documents": 2, "shards": [{"name": "0.tar", "rows": 3}, {"name": "1.tar", "rows": 4}]}
    index.write_bytes(index_text(str(index), str(tmp_path / "a"), "train", summary))
    monkeypatch.setattr(index_files, "_listed_lines", lambda index, text: pytest.fail("lines were read one by one"))
    assert [shard.rows for shard in listed_shards(index)] == [3, 4]


def test_any_character_in_a_name(tmp_path: Path):
    """A name may contain any character but a line feed."""
    names = ["a\u2028b.tar", "a\x0bb.tar", "a\x85b.tar", "a\x1cb.tar"]  # splitlines() would cut them in two
    for name in names:
        write_tar(tmp_path / name, {"a.input_id.npy": npy(np.arange(4))})
    (tmp_path / "it.index").write_bytes("".join(f"{name} # 1 rows\r\n" for name in names).encode())
    assert [shard.name for shard in read_index(tmp_path / "it.index")] == [f"{tmp_path.name}/{name}" for name in names]


def test_names_with_spaces_and_sharps(tmp_path: Path):
    write_tar(tmp_path / "a #1.tar", {"a.input_id.npy": npy(np.arange(4))})
    write_tar(tmp_path / "a#1 b.tar", {"a.input_id.npy": npy(np.arange(4))})
    (tmp_path / "it.index").write_text("# 3 rows\na#1 b.tar\t# 1 rows, all of them\n")
    assert [(shard.name, shard.rows) for shard in read_index(tmp_path / "it.index")] == [
        (f"{tmp_path.name}/a#1 b.tar", 1)
    ]


def test_byte_order_marks_are_left_out(tmp_path: Path):
    """A mark is no part of a name: at the beginning, and where two files were joined."""
    mark = b"\xef\xbb\xbf"
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", {"a.input_id.npy": npy(np.arange(4))})
    (tmp_path / "it.index").write_bytes(mark + b"a.tar # 1 rows\r\n" + mark + b"# more\r\n" + mark + b" b.tar\r\n")
    assert [(shard.name, shard.rows) for shard in read_index(tmp_path / "it.index")] == [
        (f"{tmp_path.name}/{name}.tar", 1) for name in "ab"
    ]


# ---- what can be wrong -----------------------------------------------------------------------------------------------


def test_status_of_missing_index_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The exit status tells whether an index file may be read later."""
    (tmp_path / "latin.index").write_bytes(b"\xe9.tar\n")
    for name, message in (("latin.index", "is not UTF-8 text"), ("", "cannot be read: .*Is a directory")):
        with pytest.raises(UserError, match=message) as caught:
            read_index(tmp_path / name)
        assert caught.value.status == 2

    def fail(url: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage, "read_bytes", fail)
    with pytest.raises(Unavailable, match="Input/output error"):
        read_index(tmp_path / "latin.index")


def test_bad_index_files(tmp_path: Path, corpus):
    with pytest.raises(UserError, match=r"index file .*none\.index: no such file"):
        loader(tmp_path / "none.index")
    (tmp_path / "it.index").write_text("# nothing\n\n")
    with pytest.raises(UserError, match=r"it\.index lists no shards"):
        loader(tmp_path / "it.index")
    (tmp_path / "it.index").write_text("a/b.tar # 4 rows\n")
    with pytest.raises(UserError, match=r"it\.index: shard .*a/b\.tar is missing"):
        loader(tmp_path / "it.index")
    (tmp_path / "it.index").write_text("a\u200bb.tar # 4 rows\n")  # a blank without width
    with pytest.raises(UserError, match=r"shard '.*a\\u200bb\.tar' is missing"):
        loader(tmp_path / "it.index")
    (tmp_path / "it.index").write_text("pipe:gsutil cat gs://b/a.tar\n")
    with pytest.raises(UserError, match=r"pipe:gsutil cat gs://b/a\.tar: commands are never run; download the data"):
        loader(tmp_path / "it.index")
    (tmp_path / "folder").mkdir()
    (tmp_path / "it.index").write_text("folder # 4 rows\n")
    with pytest.raises(UserError, match=r"shard .*folder is not a file"):
        loader(tmp_path / "it.index")
    (tmp_path / "it.index").write_text("good.tar # 4 rows\nb\0d.tar # 4 rows\n")
    for skip_bad in (True, False):
        with pytest.raises(UserError, match=r"it\.index, line 2: expected the path of a shard, got 'b\\x00d.tar'"):
            loader(tmp_path / "it.index", skip_bad=skip_bad)
    for rows in ("0", "-4"):  # a shard that holds some would be left out, or counted, without a line
        (tmp_path / "it.index").write_text(f"good.tar # 4 rows\nother.tar # {rows} rows\n")
        with pytest.raises(UserError, match=rf"it\.index, line 2: {rows} rows: expected at least 1"):
            loader(tmp_path / "it.index")
    (tmp_path / "it.index").write_text("good.tar # 4 rows\nother.tar # 4 rows\ngood.tar # 4 rows\n")
    with pytest.raises(UserError, match=r"it\.index, line 3: lists .*good\.tar twice; each row is read once per epoch"):
        loader(tmp_path / "it.index")
    with pytest.raises(UserError, match="7 rows cannot be split into 2 parts"):
        loader(corpus([4]), global_rows=7, hosts=2)
    with pytest.raises(UserError, match="2 epochs of 4 rows do not fill one batch of 9"):
        loader(corpus([4]), global_rows=9, max_epochs=2)
    with pytest.raises(UserError, match="hold no rows"):
        loader(corpus([4]), train_samples=0)


@pytest.mark.parametrize(
    ("value", "bucket_path", "index"),
    [
        ("a/b.index", None, "a/b.index"),
        ("a/b.index", "gs://bucket/place/", "gs://bucket/place/a/b.index"),
        ("/a/b.index", "bucket", "/a/b.index"),
        (["a", "gs://other/b"], "bucket", ["gs://bucket/a", "gs://other/b"]),
        ([{"index": "a", "weight": 0.7}, {"index": "b", "weight": 3}], None, {"a": 0.7, "b": 3}),
        ([{"index": "a", "weight": 0.7}], "bucket", {"gs://bucket/a": 0.7}),
    ],
)
def test_places_of_index_files(value: Any, bucket_path: str | None, index: Any) -> None:
    """Index files are in the bucket, or where their own address says."""
    assert index_paths(value, bucket_path) == index


@pytest.mark.parametrize("folder", ["data/index", "gs://b/i", "gs://b", "/a", ".", "", "../x"])
def test_paths_are_those_of_a_join(folder: str) -> None:
    """A folder that many names share is joined once, and no path is another one than by itself."""
    parts = ["c", ".", "..", "", "gs:", "a.tar"]
    folders = itertools.chain.from_iterable(itertools.product(parts, repeat=length) for length in range(4))
    names = ["/".join([*names, file]) for names in folders for file in ("a.tar", "0.tar")]
    assert _paths_of(folder, names) == [storage.join(folder, name) for name in names]


def test_each_folder_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work grows with the shards, not with folders times shards: each path is compared with its own folder."""
    lines = [f"gs://bucket/{folder}/{shard}.tar # 1 rows" for folder in range(30) for shard in range(4)]
    (tmp_path / "it.index").write_text("\n".join(lines))
    listed: list[str] = []
    parents: list[str] = []
    parent = storage.parent

    def list_stats(directory: str, is_deep: bool) -> set[str]:
        listed.append(directory)
        return {f"{directory}/{shard}.tar" for shard in range(4)}

    def counted(path: str) -> str:
        parents.append(path)
        return parent(path)

    monkeypatch.setattr(storage, "list_stats", list_stats)
    monkeypatch.setattr(storage, "parent", counted)
    assert len(read_index(tmp_path / "it.index")) == 120
    assert listed == [f"gs://bucket/{folder}" for folder in range(30)]
    assert len(parents) <= 121
