"""Hugging Face datasets: real ones on this disk, and a hub that is not there."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.helpers.corpora import both, documents_of, make, run
from tests.helpers.loaders import open_loader
from tests.helpers.sources import parquet_bytes
from zero.base.errors import UserError
from zero.corpus.preparing.documents import TextReader
from zero.corpus.preparing.sources.hub import HubDataset
from zero.corpus.preparing.sources.source import Source


@pytest.fixture(scope="module", autouse=True)
def without_pytorch() -> None:
    """Imports the datasets library without PyTorch, which it would bring into a worker that needs none."""
    with patch.dict(os.environ, USE_TORCH="0"):
        import datasets  # noqa: F401


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    place = tmp_path / "dataset"
    place.mkdir()
    for split, count in (("train", 50), ("test", 3)):
        table = {"text": [f"{split} {i}" for i in range(count)], "number": list(range(count))}
        (place / f"{split}-00000-of-00001.parquet").write_bytes(parquet_bytes(table))
    return place


def texts_of(name: str, key: str = "text") -> list[str]:
    return [str(document.content) for document in HubDataset(name, TextReader(key)).documents()]


def test_splits_and_columns(dataset: Path):
    assert texts_of(str(dataset), "text") == [f"train {i}" for i in range(50)]
    assert texts_of(f"{dataset}:default:test", "text") == [f"test {i}" for i in range(3)]
    assert texts_of(f"{dataset}::test", "text") == [f"test {i}" for i in range(3)]


def test_a_corpus_of_a_dataset(dataset: Path, tmp_path: Path):
    corpus = make(f"hf:{dataset}", tmp_path)
    assert both(corpus) == sorted(f"train {i}" for i in range(50))
    assert make(f"hf:{dataset}", tmp_path) == corpus
    assert Source(f"hf:{dataset}", "text", 0.1).size is None


def test_completions_of_a_dataset(tmp_path: Path):
    (tmp_path / "pairs").mkdir()
    table = {"prompt": [f"{i}?" for i in range(20)], "completion": [f" yes {i}" for i in range(20)]}
    (tmp_path / "pairs" / "train-00000-of-00001.parquet").write_bytes(parquet_bytes(table))
    corpus = make(f"hf:{tmp_path / 'pairs'}", tmp_path, completions=True)
    assert both(corpus) == sorted(f"{i}? yes {i}" for i in range(20))
    loader = open_loader(corpus.train_index, global_rows=1, context=16, vocab_size=256, only_completions=True)
    assert (next(loader.batches()).tokens < 0).any()


def test_what_is_wrong_is_named(dataset: Path):
    for name, message in [
        (f"{dataset}::none", "Bad split: none"),
        (f"{dataset}:none", "'none' not found"),
        (f"{dataset}:a:b:c", "expected hf:name, hf:name:config or hf:name:config:split"),
        (f"{dataset}/nowhere", "nowhere"),
    ]:
        with pytest.raises(UserError, match=f"^hf:.*{message}") as caught:
            HubDataset(name, TextReader("text"))
        assert caught.value.status == 2
    first = next(HubDataset(str(dataset), TextReader("number")).documents())
    assert 'row 0: expected a string under "number"; it is a number' in first.problem
    (dataset / "train-00000-of-00001.parquet").write_bytes(b"PAR1 and then nothing of it PAR1")
    with pytest.raises(UserError, match=r"^hf:.*"):
        texts_of(str(dataset), "text")


def test_status_of_a_broken_stream(dataset: Path):
    """The exit status tells whether a stream may be continued later."""
    source = HubDataset(str(dataset), TextReader("text"))
    for error, status in ((ConnectionError("reset"), 1), (FileNotFoundError("gone"), 2), (ValueError("no JSON"), 2)):
        source._parts = [("", None, failing(error))]
        with pytest.raises(UserError, match=f"^hf:.*: {error}") as caught:
            list(source.documents())
        assert caught.value.status == status


def failing(error: Exception) -> Iterator[dict[str, str]]:
    yield {"text": "the first"}
    raise error


def test_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run("hf:some/dataset", "--directory", tmp_path, "--index-directory", tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "error: hf:some/dataset: Couldn't reach 'some/dataset' on the Hub (OfflineModeIsEnabled)\n"


def test_without_the_library():
    use = "from zero.corpus.preparing.sources.hub import HubDataset; HubDataset('x', 'y')"
    hidden = f"import sys; sys.modules['datasets'] = None; {use}"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert re.search(
        r"hf:x: the datasets library is missing; pip install -c .*constraints.txt -e '.*\[hub\]'", done.stderr
    )


def test_official_splits_of_a_dataset(dataset: Path, tmp_path: Path):
    """--splits official reads all splits of a dataset, each as its own; without validation a part of train is one."""
    cut = make(f"hf:{dataset}", tmp_path, "cut", splits="official", validation_fraction=0.2)
    assert cut.test_index is not None and cut.train.documents + cut.validation.documents == 50
    assert 1 < cut.validation.documents < 25 and both(cut) == sorted(f"train {i}" for i in range(50))
    assert documents_of(cut.test_index, 16) == [f"test {i}" for i in range(3)]
    said: list[str] = []
    make(f"hf:{dataset}", tmp_path, "train", announce=said.append)
    left_alone = f"hf:{dataset}: only its split train is read, not test; --splits official reads all"
    assert said == [left_alone, "keys not read: number"]
    table = {"text": [f"validation {i}" for i in range(4)], "number": list(range(4))}
    (dataset / "validation-00000-of-00001.parquet").write_bytes(parquet_bytes(table))
    corpus = make(f"hf:{dataset}", tmp_path, splits="official")
    assert corpus.test_index is not None
    counts = {"train": 50, "validation": 4, "test": 3}
    for split, index in zip(counts, (corpus.train_index, corpus.validation_index, corpus.test_index), strict=True):
        assert documents_of(index, 16) == [f"{split} {i}" for i in range(counts[split])]
    with pytest.raises(UserError, match="names a split, but --splits official reads all of them"):
        make(f"hf:{dataset}::train", tmp_path, splits="official")


def test_files_of_a_dataset_are_parts(tmp_path: Path):
    """Each file is prepared by itself, with its rows; their order is that of the dataset."""
    place = tmp_path / "dataset"
    place.mkdir()
    for file in range(3):
        table = {"text": [f"file {file} row {row}" for row in range(40)]}
        (place / f"train-{file:05d}-of-00003.parquet").write_bytes(parquet_bytes(table))
    size = (place / "train-00000-of-00003.parquet").stat().st_size
    one = make(f"hf:{place}", tmp_path / "one", workers=1)
    in_parts = make(f"hf:{place}", tmp_path / "parts", workers=1, part_bytes=size + 1)
    assert documents_of(in_parts.train_index, 16) == documents_of(one.train_index, 16)
    assert both(in_parts) == both(one) and len(both(one)) == 120
    assert len(list(Path(in_parts.directory).glob("part-*.json"))) == 3
    assert make(f"hf:{place}", tmp_path / "parts", workers=1, part_bytes=size + 1) == in_parts
    opened = Source(f"hf:{place}", "other", 0.1, part_bytes=size + 1)
    first = next(next(opened.part(2).units()).documents())
    assert 'file 2 row 0: expected a string under "other"; found text' in first.problem
