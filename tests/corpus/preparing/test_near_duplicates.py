"""Near duplicates: planted ones are found, others stay, and parts decide nothing."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

import zero.corpus.preparing.near_duplicates as near_duplicates
from tests.helpers.corpora import call, digest, documents_of, make
from zero.base.errors import UserError

WORDS = [f"word{number}" for number in range(5000)]


def write(root: Path, texts: list[str], files: int = 4) -> Path:
    root.mkdir()
    size = -(-len(texts) // files)
    for file in range(files):
        of_file = texts[file * size : (file + 1) * size]
        (root / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in of_file))
    return root


def edited(text: str, words: int, chosen: random.Random) -> str:
    """The text with a run of so many of its words replaced: w words change at most w + 4 of its 5-grams."""
    parts = text.split()
    start = chosen.randrange(len(parts) - words)
    parts[start : start + words] = chosen.choices(WORDS, k=words)
    return " ".join(parts)


@pytest.mark.parametrize("part_bytes", [1 << 30, 60_000])
def test_recall_and_precision(tmp_path: Path, part_bytes: int):
    """Of 60 documents of 200 words with a planted copy each: copies near 0.93 are found, those near 0.5 stay."""
    chosen = random.Random(0)
    originals = [" ".join(chosen.choices(WORDS, k=200)) for _ in range(60)]
    near = [edited(text, 3, chosen) for text in originals]  # 7 of 196 n-grams: 189 / 203
    far = [edited(text, 60, chosen) for text in originals]  # 64 of 196: 132 / 260
    source = write(tmp_path / "source", [*originals, *near, *far])
    how: dict[str, Any] = {"workers": 1, "part_bytes": part_bytes, "row_tokens": 4096}
    corpus = make(source, tmp_path, near_duplicates=0.8, **how)
    kept = set(documents_of(corpus.train_index, 4096) + documents_of(corpus.validation_index, 4096))
    assert set(originals) <= kept  # the first of each group
    recall = sum(text not in kept for text in near) / len(near)
    wrong = sum(text not in kept for text in far) / len(far)
    assert recall > 0.95 and wrong < 0.05, (recall, wrong)
    assert corpus.near == 180 - len(kept)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.wide)])  # as in test_prepare.py
def test_exact_duplicates_are_counted_once(tmp_path: Path, workers: int):
    chosen = random.Random(1)
    originals = [" ".join(chosen.choices(WORDS, k=100)) for _ in range(20)]
    copies = [edited(text, 1, chosen) for text in originals[:5]]
    source = write(tmp_path / "source", [*originals, *originals[:8], *copies])
    digests = []
    parts = [(1, 1 << 30), (1, 6000), *([] if workers == 1 else [(workers, 6000)])]
    for several, part_bytes in parts:
        place = tmp_path / f"{several}-{part_bytes}"
        how: dict[str, Any] = {"workers": several, "part_bytes": part_bytes, "row_tokens": 1024}
        corpus = make(source, place, deduplicate=True, near_duplicates=0.8, **how)
        assert (corpus.duplicates, corpus.near) == (8, 5)
        assert not list(place.rglob("passes"))
        digests.append(digest(place))
    assert len({*digests[1:]}) == 1


def test_what_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write(tmp_path / "source", ["one text", "another one"])
    places = ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "index")]
    done = call(source, "--near-duplicates", "2", *places)
    assert done.returncode == 2 and "--near-duplicates 2.0: expected a share" in done.stderr
    with pytest.raises(UserError, match="expects documents of text, not prompts or chats"):
        make(source, tmp_path, near_duplicates=0.8, completions=True)
    near_duplicates._bands.cache_clear()
    monkeypatch.setitem(sys.modules, "datasketch", None)  # as where it is not installed
    with pytest.raises(UserError, match="the datasketch library is missing"):
        make(source, tmp_path, near_duplicates=0.8, workers=1)
