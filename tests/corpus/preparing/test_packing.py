"""Best-fit packing: what fits into a row is never cut, nothing is lost, and each shard is packed by itself."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.corpora import both, call, make, tokens_of
from tests.helpers.loaders import open_loader
from zero.base.errors import UserError
from zero.corpus.preparing import documents
from zero.corpus.preparing.packing import best_fit

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def naive(sizes: list[int], row_tokens: int) -> list[list[int]]:
    """Best-fit decreasing as the paper words it, by trying every row for every piece."""
    pieces = [size for whole in sizes for size in [row_tokens] * (whole // row_tokens) + [whole % row_tokens] if size]
    rows: list[list[int]] = []
    for piece in sorted(pieces, reverse=True):
        fitting = [row for row in rows if sum(row) + piece <= row_tokens]
        if not fitting:
            fitting = [[]]
            rows += fitting
        max(fitting, key=sum).append(piece)
    return rows


@given(SIZES, st.integers(2, 20))
def test_best_fit(sizes: list[int], row_tokens: int) -> None:
    """The rows of the naive algorithm, each token once, and cuts only of documents longer than a row."""
    starts = np.zeros(sum(sizes), np.uint8)
    starts[np.cumsum([0, *sizes[:-1]])] = 1
    packed = best_fit(starts, row_tokens)
    assert sorted(packed.lengths.tolist()) == sorted(map(sum, naive(sizes, row_tokens)))
    assert packed.truncations == sum(-(-size // row_tokens) - 1 for size in sizes)
    tokens = np.arange(sum(sizes))
    rows = packed.rows(tokens, -1)
    assert sorted(rows[rows >= 0].tolist()) == tokens.tolist()
    assert ((rows >= 0) == (np.arange(row_tokens) < packed.lengths[:, None])).all()
    # Between neighbors in a row, either the tokens follow each other or a piece begins.
    firsts = np.cumsum([0, *sizes[:-1]]).tolist()
    begins = {begin + i for begin, size in zip(firsts, sizes, strict=True) for i in range(0, size, row_tokens)}
    for row, length in zip(rows, packed.lengths, strict=True):
        assert row[0] in begins
        assert all(right == left + 1 or right in begins for left, right in itertools.pairwise(row[:length]))


def lines(path: Path, sizes: list[int]) -> Path:
    """Documents of these sizes in bytes, their end of text included; each letter names its document."""
    texts = (chr(ord("A") + i % 50) * (size - 1) for i, size in enumerate(sizes))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_rows_of_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No document that fits into a row is cut, in several shards from many units; cuts are counted for each split."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 100)
    sizes = [3 + 7 * i % 23 for i in range(120)]
    source = lines(tmp_path / "a.jsonl", sizes)
    corpus = make(source, tmp_path, pack="best-fit")
    joined = make(source, tmp_path, "joined")
    assert corpus.train.shards > 3 and corpus.train.documents + corpus.validation.documents == 120
    found = []
    for index in (corpus.train_index, corpus.validation_index):
        for row in tokens_of(index, 16):
            kept = row[row >= 0]
            assert (row[len(kept) :] == -1).all()
            found += bytes(kept.astype(np.uint8)).replace(b"\0", b"\0 ").split()
    assert sorted(map(len, found)) == sorted(
        piece for size in sizes for piece in (min(size, 16), size - 16) if piece > 0
    )
    cuts = sum(size > 16 for size in sizes)
    assert corpus.train.truncations + corpus.validation.truncations == cuts
    assert joined.train.tokens == corpus.train.tokens
    inside = 0  # rows but the last whose last token is no end of text
    for index in (joined.train_index, joined.validation_index):
        inside += int((tokens_of(index, 16)[:-1, -1] != 0).sum())
    assert joined.train.truncations + joined.validation.truncations == inside > cuts
    manifest = json.loads(Path(corpus.directory, "manifest.json").read_text())
    assert sum(shard["truncations"] for shard in manifest["train"]["shards"]) == manifest["train"]["truncations"]


def test_masks_are_packed_alike(tmp_path: Path) -> None:
    """The tokens that are learned are the same ones, joined or packed."""
    entries = [{"prompt": f"{i:03}{'p' * (i % 5)}", "completion": "c" * (i % 9)} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for pack in (None, "joined"):
        corpus = make(tmp_path / "a.jsonl", tmp_path, str(pack), completions=True, pack=pack)
        options: dict[str, Any] = {"shuffle": False, "max_epochs": 1, "only_completions": True}
        loader = open_loader(corpus.train_index, global_rows=1, context=16, vocab_size=256, **options)
        tokens = np.concatenate([batch.tokens for batch in loader.batches()])
        learned = tokens[(tokens >= 0)]
        assert set(learned.tolist()) == {0, ord("c")}
        assert (learned == ord("c")).sum() == (tokens == ord("c")).sum()
        assert (learned == 0).sum() == corpus.train.documents
        assert (corpus.train.truncations == 0) == (pack is None)  # the default cuts none that fits


def test_the_option(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [5, 30, 9] * 9)
    options = ["--row-tokens", "16", "--directory", str(tmp_path), "--index-directory", str(tmp_path)]
    done = call(source, *options, "--pack", "best-fit")
    assert done.returncode == 0 and ", documents cut " in done.stdout, done.stderr
    assert "was prepared with pack=best-fit, not pack=None" in call(source, *options).stderr
    assert "choose one of them" in call(source, *options, "--pack", "best-fit", "--one-document-per-row").stderr
    (tmp_path / "book.txt").write_text("one text\n" * 99)
    with pytest.raises(UserError, match="is one long text, but pack expects documents"):
        make(tmp_path / "book.txt", tmp_path, pack="best-fit")
    assert both(make(lines(tmp_path / "b.jsonl", [16] * 20), tmp_path, "b", pack="best-fit")) == sorted(
        chr(ord("A") + i) * 15 for i in range(20)
    )
