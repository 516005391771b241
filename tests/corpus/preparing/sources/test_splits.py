"""A test set never joins training: splits that names of files say are left alone, or made, and said."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.corpora import both, call, documents_of, make, tokens_of
from zero.corpus.preparing.sources.source import Source

TEXTS = {split: [f"{split} {number}" for number in range(30)] for split in ("train", "validation", "test")}


def write_lines(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_arrow(path: Path, texts: list[str]) -> None:
    """As `datasets.DatasetDict.save_to_disk` does."""
    import pyarrow

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"text": texts})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (path.parent / "state.json").write_text("{}")
    (path.parent.parent / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


@pytest.mark.parametrize(
    ("layout", "splits"),
    [
        ("{}/data-00000-of-00001.arrow", ("train", "test")),
        ("{}/a.jsonl", ("train", "test")),
        ("data/{}-00000-of-00001.jsonl", ("train", "validation", "test")),
        ("ptb.{}.jsonl", ("train", "validation")),
    ],
)
def test_held_out_files_are_left_alone(layout: str, splits: tuple[str, ...], tmp_path: Path):
    source = tmp_path / "source"
    for split in splits:
        path = source / layout.format(split)
        (write_arrow if path.suffix == ".arrow" else write_lines)(path, TEXTS[split])
    said: list[str] = []
    corpus = make(source, tmp_path, announce=said.append)
    assert both(corpus) == sorted(TEXTS["train"])
    (line,) = said
    assert line.startswith(f"{source} has files of train (1 files)") and "are skipped; --splits official" in line
    everything = make(source, tmp_path, "all", splits="all", announce=said.append)
    assert both(everything) == sorted(text for split in splits for text in TEXTS[split]) and len(said) == 1
    official = make(source, tmp_path, "official", splits="official")
    assert (official.test_index is not None) == ("test" in splits)
    if official.test_index is not None:
        assert documents_of(official.test_index, 16) == TEXTS["test"]
    if "validation" in splits:
        assert documents_of(official.validation_index, 16) == TEXTS["validation"]
    else:
        assert both(official) == sorted(TEXTS["train"]) and official.validation.documents < 10


def test_files_without_a_split_are_read(tmp_path: Path):
    """Code about tests is code; what is named alone is read; a README beside data is read as before."""
    code = tmp_path / "code"
    for name in ("train.py", "test_train.py", "src/test/a.py", "evaluation/dev.md"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(f"# {name}")
    said: list[str] = []
    assert len(both(make(code, tmp_path, announce=said.append))) == 4 and not said
    write_lines(tmp_path / "data" / "test.jsonl", TEXTS["test"])
    assert both(make(tmp_path / "data", tmp_path, "test", announce=said.append)) == sorted(TEXTS["test"])
    assert both(make(tmp_path / "data" / "test.jsonl", tmp_path, "file", announce=said.append)) == sorted(TEXTS["test"])
    assert not said
    (tmp_path / "data" / "README.md").write_text("about the data")
    write_lines(tmp_path / "data" / "more.jsonl", TEXTS["train"])
    mixed = make(tmp_path / "data", tmp_path, "mixed", announce=said.append)
    assert both(mixed) == sorted([*TEXTS["train"], "about the data"]) and "no split (2 files)" in said[0]


def test_arrays_with_a_test_set(tmp_path: Path):
    """train.bin and test.bin: the last part of the former is for validation."""
    (tmp_path / "source").mkdir()
    arrays = {"train": 1 + np.arange(4000) % 251, "test": 1 + np.arange(96) % 9}
    for name, tokens in arrays.items():
        tokens.astype("<u2").tofile(tmp_path / "source" / f"{name}.bin")
    corpus = make(tmp_path / "source", tmp_path, splits="official", validation_fraction=0.1)
    assert corpus.test_index is not None
    found = [tokens_of(index, 16).ravel() for index in (corpus.train_index, corpus.validation_index, corpus.test_index)]
    for rows, expected in zip(found, (arrays["train"][:3600], arrays["train"][3600:], arrays["test"]), strict=True):
        assert rows[: len(expected)].tolist() == expected.tolist() and len(rows) - len(expected) <= 16


def test_files_that_are_left_out_are_named(tmp_path: Path) -> None:
    """By their suffix, before anything is written; those of hidden and skipped folders are not counted."""
    for name in ("a.txt", "b.pdf", "c.zip", "d/e.exe", ".git/f.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    (remark,) = Source(str(tmp_path), "text", 0.2).remarks
    head, _, names = remark.partition(": ")
    assert head == "left out 3 files that are not text, judging by the suffix" and "; to read one anyway" in names
    assert {*names.partition(";")[0].split(", ")} == {"b.pdf", "c.zip", "d/e.exe"}


def test_remarks(tmp_path: Path):
    """Markup that is trained as it is, and a validation split that is larger than the training split."""
    folder = tmp_path / "site"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.html").write_text(f"<p>page {number}</p>")
    options = ["--row-tokens", "16", "--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path)]
    done = call(folder, *options)
    assert "9 files are read with their markup (.html): trafilatura extracts the text of such files" in done.stdout
    write_lines(tmp_path / "two.jsonl", ["a", "b" * 900])
    write_lines(tmp_path / "owt.jsonl", ["a" * 900, "b"])
    texts = [call(tmp_path / name, *options).stdout for name in ("two.jsonl", "owt.jsonl")]
    assert any("validation has more tokens than training: " in text for text in texts)
