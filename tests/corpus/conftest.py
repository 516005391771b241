"""Corpora and sources that the tests of this folder share.

webdataset, which many of them import, comes without torch: else each process would take 510 MiB and 6 s more.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import bucket
from tests.helpers.shards import write_corpus
from zero.corpus.text.tokenizers import train_tokenizer
from zero.files import storage


@pytest.fixture(scope="session", autouse=True)
def webdataset_without_torch() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        import webdataset  # noqa: F401 -- once in a process


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[int]], Path]:
    """Gives the index file of a corpus with that many rows per shard; each is made once."""
    made: dict[tuple[int, ...], Path] = {}
    root = tmp_path_factory.mktemp("corpora")

    def get(counts: list[int]) -> Path:
        key = tuple(counts)
        if key not in made:
            made[key] = write_corpus(root / "-".join(map(str, key)), counts)
        return made[key]

    return get


@pytest.fixture(scope="session")
def bucket_corpus(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The index files of one corpus, on disk and in the bucket."""
    place = tmp_path_factory.mktemp("corpus") / "mine"
    write_corpus(place / "shards", [12, 9, 15, 6, 12, 12])
    lines = (place / "shards" / "it.index").read_text().replace("shard-", "../shards/shard-")
    (place / "index").mkdir()
    (place / "index" / "it.index").write_text(lines)
    url = f"gs://{bucket.BUCKET}/corpora/mine"
    with pytest.MonkeyPatch.context() as monkeypatch:
        bucket.use(monkeypatch, server)
        bucket.upload(place, url)
        storage.write(f"{url}/index/absolute.index", lines.replace("..", url).encode())
        storage.write(f"{url}/index/uncounted.index", lines.replace(" rows", "").encode())
    yield place / "index" / "it.index", f"{url}/index/it.index"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    for i in range(40):
        path = root / f"part{i % 3}" / f"{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {i}: " + "é" * (7 * i))
    return root


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of the tokenizers library."""
    path = tmp_path_factory.mktemp("bpe") / "bpe.json"
    path.write_bytes(train_tokenizer(["document shard gather scatter zéro"] * 9, 290))
    return path
