"""What identifies the contents of shards: their manifest, what a bucket states, or a few blocks."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import bucket
from tests.helpers.corpora import make
from tests.helpers.shards import loader, write_corpus
from zero.base.errors import UserError
from zero.corpus.format.index_files import Shards, read_index
from zero.corpus.format.manifest import MANIFEST
from zero.corpus.reading import contents as contents_module
from zero.corpus.reading.contents import BLOCK_BYTES, BLOCKS, Contents, IndexContents, check_contents, contents_of
from zero.corpus.reading.loader import Cursor, Loader
from zero.files import storage
from zero.files.storage.objects import ObjectStat


def contents(index: str | Path) -> Contents:
    return contents_of(read_index(index))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i:02}.txt").write_text(f"document {i:02} " * 8)
    return tmp_path / "text"


def test_manifest(folder: Path, tmp_path: Path) -> None:
    """The sums of a manifest are the contents, wherever the corpus lies; no shard is read for them."""
    corpus = make(folder, tmp_path)
    before = contents(corpus.train_index)
    assert before.known_by == "manifest" and before.rows == corpus.train.rows
    shutil.copytree(tmp_path / "corpus", tmp_path / "moved")
    shutil.move(tmp_path / "moved" / "c", tmp_path / "moved" / "renamed")
    index = tmp_path / "mine.index"
    for shard in (tmp_path / "moved" / "renamed").glob("*.tar"):
        shard.write_bytes(b"")  # damage is found by those who read it
    rows = [int(line.split("# ")[1].split()[0]) for line in Path(corpus.train_index).read_text().splitlines()[1:]]
    index.write_text("".join(f"moved/renamed/train-{i:05}.tar # {n} rows\n" for i, n in enumerate(rows)))
    assert contents(index) == before
    assert contents(corpus.validation_index) != before


def test_other_files_called_manifest(tmp_path: Path) -> None:
    """A manifest.json of another program is none; shards that a manifest does not list are known by their blocks."""
    index = write_corpus(tmp_path, [3, 2])
    blocks = contents(index)
    assert blocks.known_by == "blocks"
    for text in ("{", "[]", '{"train": 3}', '{"files": []}'):
        (tmp_path / MANIFEST).write_text(text)
        assert contents(index) == blocks
    split = {"shards": [{"name": "shard-0.tar", "rows": 3, "sha256": "0" * 64}], "documents": 1, "tokens": 1, "rows": 3}
    manifest = {"tokenizer": "bytes", "train": split, "validation": split | {"shards": []}}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert contents(index).known_by == "blocks+manifest"


def test_blocks(tmp_path: Path) -> None:
    """Without a manifest size and blocks at equal distances tell, and nothing of times or paths."""
    index = write_corpus(tmp_path / "here", [4000])
    shard = tmp_path / "here" / "shard-0.tar"
    before, data = contents(index), shard.read_bytes()
    os.utime(shard, (1, 1))
    assert contents(index) == before
    assert contents(write_corpus(tmp_path / "there", [4000])) == before
    assert len(data) > 2 * BLOCKS * BLOCK_BYTES
    for number in range(BLOCKS):
        place = number * len(data) // BLOCKS
        shard.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert contents(index) != before
    shard.write_bytes(data + bytes(512))
    assert contents(index) != before


def check(data: Loader, cursor: Cursor) -> None:
    data.check(json.loads(json.dumps(cursor)))


def test_contents_that_cannot_be_compared(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A corpus that has lost its manifest is compared by names and rows, with a warning, in both directions."""
    corpus = make(folder, tmp_path)
    options = {"context": 16, "vocab_size": 256}
    recorded = loader(corpus.train_index, **options).identity
    Path(corpus.directory, MANIFEST).unlink()
    plain = loader(corpus.train_index, **options)
    check(plain, recorded)
    assert f"{corpus.train_index} (known by manifest, now by blocks)" in caplog.text
    with pytest.raises(UserError, match="cursor belongs to other shards than the index file lists now"):
        check(plain, recorded | {"shards": 1})
    check(plain, plain.identity | {"shards": 1})  # contents tell, not names


def test_shards_that_nobody_has_read_are_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Missing shards are known by their names only, before and now: neither equal nor different contents follow."""
    for name in ("first", "second"):
        before, now = (
            IndexContents("it.index", *contents_of(Shards([str(tmp_path / shard)], np.array([8]))))
            for shard in ("first", name)
        )
        assert before.known_by == "nothing"
        assert not check_contents([before], [now], "these are other shards")
        assert "it.index (known by nothing, now by nothing)" in caplog.text
        caplog.clear()


def test_damage_that_is_tolerated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With skip_bad a shard may be missing, or differ by its blocks: damage is counted where it is read."""
    index = write_corpus(tmp_path, [4, 4])
    cursor = loader(index, skip_bad=True).identity
    shard = tmp_path / "shard-0.tar"
    shard.write_bytes(shard.read_bytes()[:700])
    with pytest.raises(UserError, match="other contents"):
        check(loader(index), cursor)
    check(loader(index, skip_bad=True), cursor)
    assert "data.max_skipped_rows allows for damage" in caplog.text
    shard.unlink()
    check(loader(index, skip_bad=True), cursor)


def test_every_index_file_is_compared(tmp_path: Path) -> None:
    """Of several index files the one that has changed is named; another number of them is refused."""
    indices = [str(write_corpus(tmp_path / name, [6], first=first)) for name, first in (("a", 0), ("b", 50))]
    for several in (indices, dict.fromkeys(indices, 1)):
        write_corpus(tmp_path / "b", [6], first=50)
        cursor = loader(several).identity
        check(loader(several), cursor)
        write_corpus(tmp_path / "b", [6], first=51)
        with pytest.raises(UserError, match=r"other shards: .*/b/it.index has as many rows as before, but other cont"):
            check(loader(several), cursor)
    with pytest.raises(UserError, match=r"to .*/a/it.index, .*/b/it.index, not to .*/a/it.index; a run only cont"):
        check(loader(indices[0]), cursor)


def test_bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The checksums of a list tell of an object that was replaced, and that a copy elsewhere is the same."""
    bucket.use(monkeypatch, server)
    place = f"gs://{bucket.BUCKET}/contents"
    for first, directory in ((0, "a"), (1, "b")):
        write_corpus(tmp_path / directory, [3, 2], first=first)
    for directory in ("here", "there"):
        bucket.upload(tmp_path / "a", f"{place}/{directory}")
    before = contents(f"{place}/here/it.index")
    assert before.known_by == "crc32c" and contents(f"{place}/there/it.index") == before
    bucket.upload(tmp_path / "b", f"{place}/here")
    after = contents(f"{place}/here/it.index")
    assert after.known_by == "crc32c" and after.digest != before.digest


def test_stores_that_state_no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions tell of an object that was replaced; those of another place are not compared, as nothing unlisted is."""

    def contents_at(place: str, version: str | None) -> Contents:
        url = f"{place}/shard.tar"
        monkeypatch.setattr(contents_module, "recorded_checksums", lambda directory: lambda name: None)
        stats = {} if version is None else {url: ObjectStat(9, version, None)}
        monkeypatch.setattr(storage, "list_stats", lambda directory, is_deep: stats)
        return contents_of(Shards([url], np.array([3])))

    before, replaced, copy = (contents_at(*one) for one in (("az://c/a", "1"), ("az://c/a", "2"), ("az://c/b", "3")))
    assert before == contents_at("az://c/a", "1") and before.known_by == replaced.known_by == "versions in az://c/a"
    assert before.digest != replaced.digest and before.known_by != copy.known_by
    nothing = [IndexContents("i", *contents_at("az://c/a", None))] * 2
    assert nothing[0].known_by == "nothing" and not check_contents(nothing[:1], nothing[1:], "")


def test_cost_does_not_grow_with_a_shard(tmp_path: Path) -> None:
    """A shard of 4 TiB without a manifest is known as quickly as a small one: to read it all would take hours."""
    shard = tmp_path / "large.tar"
    with shard.open("wb") as file:
        file.truncate(4 * 2**40)  # of holes
    before = contents_of(Shards([str(shard)], np.array([9])))
    with shard.open("r+b") as file:
        file.seek(2**40)
        file.write(b"x")
    assert contents_of(Shards([str(shard)], np.array([9]))).digest != before.digest
