"""Texts whose lines are documents, in the folders of the one-billion-word corpus."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.loaders import open_loader
from zero.base.errors import UserError
from zero.corpus.preparing import documents
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import Corpus, prepare
from zero.corpus.text.tokenizers import ByteTokenizer

ROW = 16


@pytest.fixture
def billion_words(tmp_path: Path) -> Path:
    """A small copy: sentences in files without a suffix, in a folder for training and one that is held out."""
    root = tmp_path / "1-billion-word-language-modeling-benchmark-r13output"
    for folder, name, count in (
        ("training-monolingual.tokenized.shuffled", "news.en-0000{}-of-00100", 2),
        ("heldout-monolingual.tokenized.shuffled", "news.en.heldout-0000{}-of-00050", 1),
    ):
        (root / folder).mkdir(parents=True)
        for number in range(count):
            lines = [f"{folder[0]}{number} word {'x' * (3 * line)}" for line in range(5)]
            (root / folder / name.format(number)).write_text("\n".join(lines) + "\n\n")
    return root


def make(source: Path | str, place: Path, name: str = "billion", **options: Any) -> Corpus:
    paths: dict[str, Any] = {"directory": place / "corpus", "index_directory": place / "index"}
    return prepare(source, name, CorpusOptions(ByteTokenizer(), ROW, lines=True, **options), progress=False, **paths)


def rows_of(index: str) -> list[bytes]:
    """The text of each row of one document, without its ends of text."""
    options: dict[str, Any] = {"shuffle": False, "max_epochs": 1}
    loader = open_loader(index, global_rows=1, context=ROW, vocab_size=256, **options)
    rows = np.concatenate([batch.tokens for batch in loader.batches()])
    return [bytes(row[row > 0].astype(np.uint8)) for row in rows]


def test_a_sentence_per_row(billion_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is a row, in the split of its folder, cut to the row, as Lingvo's task reads it."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 40)  # several units per file
    options: dict[str, Any] = {"one_document_per_row": True, "cut_documents": True, "begin_rows": True}
    corpus = make(billion_words, tmp_path, splits="official", **options)
    assert (corpus.train.documents, corpus.validation.documents) == (10, 5)
    assert (corpus.train.rows, corpus.validation.rows) == (10, 5)
    sentences = [f"t{number} word {'x' * (3 * line)}"[: ROW - 2].encode() for number in range(2) for line in range(5)]
    assert sorted(rows_of(corpus.train_index)) == sorted(sentences)
    assert all(text.startswith(b"h0 word") for text in rows_of(corpus.validation_index))


def test_lines_of_one_compressed_file(tmp_path: Path) -> None:
    """Empty lines are no documents, and a carriage return is no part of one."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\r\n".join(["één", "", "two", *"abcdefgh"]).encode()))
    corpus = make(tmp_path / "a.txt.gz", tmp_path, one_document_per_row=True, validation_fraction=0.3)
    texts = rows_of(corpus.train_index) + rows_of(corpus.validation_index)
    assert sorted(texts) == sorted(text.encode() for text in ["één", "two", *"abcdefgh"])


def test_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\xe9\n")
    with pytest.raises(UserError, match=r"a\.txt, line 2 is not UTF-8"):
        make(tmp_path / "a.txt", tmp_path)
