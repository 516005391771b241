"""Filters: what each leaves out, counted under its name, in one part or many."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import both, call, make
from zero.base.errors import UserError
from zero.corpus.preparing.documents import Document
from zero.corpus.preparing.filters.repetition import repeated_characters, top_ngram_characters
from zero.corpus.preparing.filters.table import FILTERS, open_filters

QUESTION = "What is the name of the river that flows through the old town of Bern, the capital?"
PLAIN = [f"a text of its own about the {number}th hill, with enough words to stay here" for number in range(20)]
LEFT_OUT = {
    "where": {"text": "ein Text, der lang genug ist, um zu bleiben", "language": "de"},
    "without-urls": {"text": "a text of a page that nobody should learn from", "url": "https://www.bad.org/page"},
    "words": {"text": "too short"},
    "symbols": {"text": "# # # # a b c d e f g h i j k l"},
    "repetition": {"text": "buy it now\n" * 9 + "for less than ever"},
    "decontaminate": {"text": f"Q: {QUESTION} A: the Aare"},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Twenty documents to keep, one that each filter leaves out, and one of them twice."""
    root = tmp_path / "source"
    root.mkdir()
    kept = [{"text": text} for text in PLAIN]
    entries = [*kept, *LEFT_OUT.values(), LEFT_OUT["words"]]
    lines = [json.dumps({"language": "en", "url": "http://good.org"} | entry) + "\n" for entry in entries]
    (root / "a.jsonl").write_text("".join(lines[:10]))
    (root / "b.jsonl").write_text("".join(lines[10:]))
    (tmp_path / "urls.txt").write_text("# a list\nhttps://bad.org\n")
    (tmp_path / "questions.txt").write_text(QUESTION.upper() + "\nand a short line\n")
    return root


def values(tmp_path: Path) -> dict[str, str]:
    return {
        "where": "language=en",
        "without-urls": str(tmp_path / "urls.txt"),
        "words": "3,50",
        "symbols": "0.8",
        "repetition": "gopher",
        "decontaminate": str(tmp_path / "questions.txt"),
    }


@pytest.mark.parametrize("part_bytes", [1 << 30, 1500])
def test_each_filter_leaves_out_its_document(source: Path, tmp_path: Path, part_bytes: int):
    filters = values(tmp_path)
    assert set(filters) == set(FILTERS) == set(LEFT_OUT)
    how: dict[str, Any] = {"workers": 1, "part_bytes": part_bytes, "validation_fraction": 0.3}
    corpus = make(source, tmp_path, filters=tuple(filters.items()), **how)
    assert corpus.filtered == dict.fromkeys(FILTERS, 1) | {"words": 2}
    assert both(corpus) == sorted(PLAIN)
    for name, value in filters.items():
        alone = make(source, tmp_path, f"only-{name}", filters=((name, value),), **how)
        assert list(alone.filtered) == [name]
        assert LEFT_OUT[name]["text"] not in both(alone) and set(PLAIN) < set(both(alone))


def test_filters_of_another_call(source: Path, tmp_path: Path):
    """Another value, or another list in the file that it names, is another corpus."""
    filters = values(tmp_path)
    make(source, tmp_path, filters=tuple(filters.items()), workers=1)
    with pytest.raises(UserError, match=r"was prepared with filters=.*words.*3,50.*, not filters=.*2,50"):
        make(source, tmp_path, filters=tuple((filters | {"words": "2,50"}).items()), workers=1)
    (tmp_path / "urls.txt").write_text("bad.org\nworse.org\n")
    with pytest.raises(UserError, match=r"was prepared with filters=.*sha256:.*, not filters="):
        make(source, tmp_path, filters=tuple(filters.items()), workers=1)


def test_the_command_counts(source: Path, tmp_path: Path):
    places = ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "index"), "--workers", "1"]
    done = call(source, "--words", "3,50", "--where", "language=en", *places)
    assert done.returncode == 0, done.stderr
    assert "left out 1 document by --where" in done.stdout
    assert "left out 2 documents by --words" in done.stdout
    assert call(source, "--peek", "1").returncode != 0


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("words", "9,2", "--words 9,2: expected two numbers"),
        ("symbols", "2", "--symbols 2: expected a share"),
        ("repetition", "mine", "--repetition mine: expected gopher"),
        ("where", "language", "--where language: expected KEY=VALUE"),
        ("decontaminate", "nowhere.txt", "--decontaminate nowhere.txt: nowhere.txt: no such file"),
        ("where", "licence=free", r'a\.jsonl, line 1: expected a value under "licence", which a filter reads'),
    ],
)
def test_what_is_wrong_is_named(source: Path, tmp_path: Path, name: str, value: str, message: str):
    with pytest.raises(UserError, match=message):
        make(source, tmp_path, filters=((name, value),), workers=1)


def test_one_text_and_tokens_have_no_documents(tmp_path: Path):
    (tmp_path / "book.txt").write_text("one\n" * 99)
    with pytest.raises(UserError, match="is one long text, but words expects documents"):
        make(tmp_path / "book.txt", tmp_path, filters=(("words", "3,50"),))


def test_list_is_not_sent_to_each_process(tmp_path: Path):
    words = [f"word{number}" for number in range(20_000)]
    (tmp_path / "sets.txt").write_text(" ".join(words))
    filters = open_filters({"decontaminate": str(tmp_path / "sets.txt")})
    packed = pickle.dumps(filters)
    assert len(packed) < 1000
    document = Document(" ".join(words[500:520]))
    assert pickle.loads(packed)(document) == filters(document) != document


def test_shares_of_repetition():
    """Each word is in one n-gram at most, and the share of the top n-gram is of all its occurrences."""
    words = ["ab", "c", "ab", "c", "d"]
    assert top_ngram_characters(words, 2) == 2 * 3
    assert repeated_characters(words, 2) == 3  # the second "ab c"
    assert repeated_characters(["a"] * 5, 2) == 4  # all but the first
    assert top_ngram_characters(["a"], 2) == repeated_characters(["a"], 2) == 0


def test_published_thresholds():
    """A document just below a threshold of table A1 stays, and one above it goes."""
    judge = open_filters({"repetition": "gopher"})
    distinct = [f"a{number} b{number} c{number} d{number}" for number in range(100)]
    for repeats, leaves_out in ((12, False), (45, True)):  # lines that come again, of all: 0.10 and 0.30
        lines = distinct + [f"short{number % 5}" for number in range(repeats + 5)]
        document = judge(Document("\n".join(lines)))
        assert (document.left_out_by == "repetition") is leaves_out, repeats
