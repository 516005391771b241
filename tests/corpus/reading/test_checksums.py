"""Shards are compared, when they are read, with the checksums of their manifest."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import make
from tests.helpers.shards import loader, tokens_of
from zero.base.errors import UserError
from zero.corpus.format.index_files import read_index
from zero.corpus.format.manifest import MANIFEST
from zero.corpus.reading import checksums

OPTIONS: dict[str, Any] = {"context": 16, "vocab_size": 256, "max_epochs": 1}


def prepare(place: Path, part_bytes: int) -> str:
    """The index of a corpus whose manifest lists its shards, or the manifests of its parts."""
    (place / "text").mkdir()
    for number in range(40):
        (place / "text" / f"{number:02}.txt").write_text(f"document {number:02} " * 8)
    return make(place / "text", place, part_bytes=part_bytes).train_index


@pytest.fixture(params=[1 << 30, 1000], ids=["one part", "parts"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return prepare(tmp_path, request.param)


def replace(index: str) -> Path:
    """Replaces a shard by one of the same size, with other tokens that could be rows of it."""
    shard = Path(read_index(index)[-1].path)
    shard.write_bytes(shard.read_bytes().replace(b"document", b"dOcument"))
    return shard


def test_replaced_shard(index: str, caplog: pytest.LogCaptureFixture) -> None:
    """An equally long shard under the same manifest is refused by name; where damage is allowed it is named."""
    before = tokens_of(loader(index, **OPTIONS))
    shard = replace(index)
    with pytest.raises(UserError, match=rf"^shard {shard} does not match its checksum in {shard.parent}/manifest.json"):
        tokens_of(loader(index, **OPTIONS))
    assert not caplog.text
    after = tokens_of(loader(index, **OPTIONS, skip_bad=True))
    assert after != before and len(after) == len(before)
    assert caplog.text.count(f"shard {shard} does not match its checksum") == 1
    (shard.parent / MANIFEST).unlink()
    assert tokens_of(loader(index, **OPTIONS)) == after


def test_replaced_manifest_of_a_part(tmp_path: Path) -> None:
    """The manifest of a part is the one that the manifest of the corpus lists."""
    index = prepare(tmp_path, 1000)
    folder = Path(read_index(index)[0].path).parent
    part = folder / json.loads((folder / MANIFEST).read_text())["parts"][0]["name"]
    part.write_text(part.read_text() + "\n")
    with pytest.raises(UserError, match=rf"^{part} does not match its checksum in {folder}/manifest.json"):
        tokens_of(loader(index, **OPTIONS))


def test_each_shard_is_compared_once(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later epochs take no time for it."""
    recorded: list[str] = []
    shard_checksums = checksums.shard_checksums

    def counted(folder: str) -> Any:
        of_folder = shard_checksums(folder)

        def checksum(name: str) -> str | None:
            recorded.append(name)
            return of_folder(name)

        return checksum

    monkeypatch.setattr(checksums, "shard_checksums", counted)
    tokens_of(loader(index, **OPTIONS | {"max_epochs": 3, "shuffle_shards": 1}))
    assert sorted(recorded) == sorted(Path(shard.path).name for shard in read_index(index))
