"""Rows as other trainers make them: documents cut to a row, rows that begin with the end of text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zero
from tests.helpers.loaders import open_loader
from zero.base.errors import UserError
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import Corpus, prepare
from zero.corpus.preparing.zero_prepare import training_overrides
from zero.corpus.text.tokenizers import ByteTokenizer
from zero.models.config import GPTConfig
from zero.training.sharded_gpt import ShardedGPT

T, END = 8, 0
SIZE = GPTConfig(embedding_dim=8, vocab_size=256, num_head=2, block_size=T, dropout=0.0, N=1)


def make(source: Path, place: Path, name: str, **options: Any) -> Corpus:
    paths: dict[str, Any] = {"directory": place / "corpus", "index_directory": place / "index"}
    return prepare(source, name, options_of(**options), progress=False, **paths)


def options_of(**options: Any) -> CorpusOptions:
    return CorpusOptions(ByteTokenizer(), T + 1, **options)


def inputs_and_targets(corpus: Corpus, index: str) -> tuple[np.ndarray, np.ndarray]:
    """What a step with data.last_target reads of all rows."""
    options: dict[str, Any] = {"shuffle": False, "max_epochs": 1}
    loader = open_loader(index, global_rows=1, context=T + 1, vocab_size=256, **options)
    rows = np.concatenate([batch.tokens for batch in loader.batches()])
    model = ShardedGPT(SIZE, zero.Axis("zero", (1, 1)), 0, last_target=True)
    inputs, targets, _ = model.inputs(rows)
    return np.asarray(inputs), np.asarray(targets)


def of_mu_transformer(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens as its tokenizer truncates and pads them, shifted by a first token; targets that its mask leaves."""
    rows = np.full((len(texts), T), END)
    for row, text in zip(rows, texts, strict=True):
        kept = text[: T - 1]
        row[: len(kept)] = list(kept)
    before = np.concatenate([np.full((len(rows), 1), END), rows[:, :-1]], axis=1)
    is_open = np.concatenate([np.ones((len(rows), 1), bool), rows[:, :-1] != END], axis=1)
    return before, np.where(np.cumprod(is_open, axis=1), rows, -1)


def test_documents_cut_to_a_row(tmp_path: Path) -> None:
    """Of each document the first row, 8 targets through its end of text, as in mu_transformer (launch.py, data.py)."""
    texts = [bytes([65 + number]) * size for number, size in enumerate([1, 3, 6, 7, 8, 9, 20, 40] * 3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text.decode()}) + "\n" for text in texts))
    corpus = make(tmp_path / "a.jsonl", tmp_path, "cut", one_document_per_row=True, cut_documents=True, begin_rows=True)
    assert corpus.cut == 4 * 3 and corpus.train.rows + corpus.validation.rows == len(texts)
    found = [inputs_and_targets(corpus, index) for index in (corpus.train_index, corpus.validation_index)]
    inputs, targets = (np.concatenate(parts) for parts in zip(*found, strict=True))
    by_text = np.argsort(inputs[:, 1])
    expected_inputs, expected_targets = of_mu_transformer(texts)
    np.testing.assert_array_equal(targets[by_text], expected_targets)
    is_read = expected_targets >= 0  # what follows a document may be anything
    np.testing.assert_array_equal(inputs[by_text][is_read], expected_inputs[is_read])
    assert (targets >= 0).sum() == corpus.train.tokens + corpus.validation.tokens


def test_rows_that_begin_with_the_end_of_text(tmp_path: Path) -> None:
    """Rows of one text have 8 of its tokens each, all of them targets, as in Transformer-VQ (pipeline.py)."""
    text = bytes(range(33, 33 + 75))
    (tmp_path / "book.txt").write_bytes(text)
    corpus = make(tmp_path / "book.txt", tmp_path, "book", begin_rows=True)
    inputs, targets = inputs_and_targets(corpus, corpus.train_index)
    tokens = [*text[: corpus.train.tokens - 1], END]
    for number, (before, row) in enumerate(zip(inputs, targets, strict=True)):
        piece = tokens[number * T : (number + 1) * T]
        assert row[row >= 0].tolist() == piece
        assert before.tolist()[: len(piece)] == [END, *piece[:-1]]
    assert f"model.override.block_size={T}" in training_overrides(corpus, options_of(begin_rows=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cut_documents": True}, "--cut-documents requires --one-document-per-row"),
        (
            {"cut_documents": True, "one_document_per_row": True, "examples": "preferences"},
            "--cut-documents and --pref",
        ),
        ({"begin_rows": True, "examples": "preferences"}, "--begin-rows and --preferences cannot be combined"),
    ],
)
def test_refused(options: dict[str, bool], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    with pytest.raises(UserError, match=message):
        make(tmp_path / "a.jsonl", tmp_path, "refused", **options)
