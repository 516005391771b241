"""A shuffle of documents over parts: all of them, once, in another order, which workers do not decide."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import both, digest, documents_of, make, tokens_of
from zero.base.errors import UserError


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Four files, as of four sites; some texts come twice, and one file is not UTF-8."""
    root = tmp_path / "sites"
    root.mkdir()
    for site in range(4):
        texts = [f"site {site}, page {number % 50}: é\t" for number in range(60)]
        (root / f"{site}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (root / "latin.txt").write_bytes(b"\xe9")
    return root


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.wide)])  # as in test_prepare.py
def test_all_documents_once(sites: Path, tmp_path: Path, workers: int):
    how: dict[str, Any] = {
        "deduplicate": True,
        "validation_fraction": 0.2,
        "filters": (("words", "5,5"),),
        "skip_broken": 1,
    }
    plain = make(sites, tmp_path / "plain", workers=1, **how)
    assert plain.duplicates == 40
    digests = []
    parts = [(1, 1 << 30), (1, 2600), *([] if workers == 1 else [(workers, 2600)])]
    for several, part_bytes in parts:
        place = tmp_path / f"{several}-{part_bytes}"
        corpus = make(sites, place, workers=several, part_bytes=part_bytes, shuffle=True, **how)
        assert (corpus.duplicates, corpus.skipped, dict(corpus.filtered)) == (40, 1, {"words": 0})
        assert documents(corpus.train_index) != documents(plain.train_index)
        assert sorted(documents(corpus.train_index)) == sorted(documents(plain.train_index))  # and so of the split
        assert not list(place.rglob("passes"))
        digests.append(digest(place))
    assert len({*digests[1:]}) == 1
    assert make(sites, tmp_path / "1-2600", workers=1, part_bytes=2600, shuffle=True, **how).directory  # kept


def documents(index: str) -> list[bytes]:
    """The documents of a split of bytes, which may hold lone surrogates."""
    tokens = tokens_of(index, 16).ravel()
    return bytes(tokens[tokens >= 0].astype("u1").tolist()).split(b"\0")


def test_sites_are_mixed(tmp_path: Path):
    """Neighbors are of one site in the source, and about a quarter of them after the shuffle."""
    root = tmp_path / "sites"
    root.mkdir()
    for site in range(4):
        lines = [json.dumps({"text": f"{site} page {number}"}) + "\n" for number in range(100)]
        (root / f"{site}.jsonl").write_text("".join(lines))
    corpus = make(root, tmp_path, workers=1, part_bytes=2700, shuffle=True)
    texts = documents_of(corpus.train_index, 16)
    same = sum(one[0] == other[0] for one, other in itertools.pairwise(texts)) / len(texts)
    assert 0.15 < same < 0.35
    assert len(both(corpus)) == 400


def test_what_cannot_be_shuffled(sites: Path, tmp_path: Path):
    with pytest.raises(UserError, match="--shuffle expects documents of text, not prompts or chats"):
        make(sites, tmp_path, shuffle=True, completions=True)
    (tmp_path / "book.txt").write_text("one\n" * 99)
    with pytest.raises(UserError, match="is one long text, but shuffle expects documents"):
        make(tmp_path / "book.txt", tmp_path, shuffle=True)
