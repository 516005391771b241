"""report.html of a corpus: its numbers are those of the documents, whoever prepared them, and a browser lays it out."""

import gzip
import json
import logging
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import browser
from tests.helpers.browser import LAYOUT, WIDTHS, Browser
from tests.helpers.corpora import both, digest, make
from tests.helpers.pages import facts, plain, table
from zero.corpus.preparing import corpus_page, documents, prepare
from zero.corpus.preparing.corpus_files import PartNames
from zero.corpus.preparing.corpus_statistics import CorpusStatistics, Example, HashSample, bin_of, load, read_removed
from zero.corpus.preparing.verify import verify
from zero.corpus.text.tokenizers import ByteTokenizer

HOW: dict[str, Any] = {"workers": 1, "validation_fraction": 0.2, "row_tokens": 32}
OPTIONS: dict[str, Any] = {"deduplicate": True, "minimum_tokens": 12, "filters": (("words", "2,9"),)}
PART_BYTES = 2000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Lines in two folders and in a file: 80 to keep, 6 that equal another one, 40 with one word, 12 short ones."""
    root = tmp_path / "crawl"
    kept = [f"page {number} of a site {'x' * (number % 30)}" for number in range(80)]
    texts = [*kept, *([kept[3]] * 4 + [kept[7]] * 2), *(f"word{number}" for number in range(40)), *["a b"] * 12]
    texts = [texts[number * 55 % len(texts)] for number in range(len(texts))]  # 55 and 138 have no common divisor
    for name, of_file in (("en/a.jsonl", texts[:50]), ("de/b.jsonl", texts[50:90]), ("c.jsonl", texts[90:])):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in of_file))
    return root


def statistics_of(place: Path, parts: int | None) -> CorpusStatistics:
    numbers: list[int | None] = [None] if parts is None else list(range(parts))
    return load(str(place), [PartNames(number).statistics for number in numbers])


def test_numbers_are_those_of_the_documents(source: Path, tmp_path: Path):
    """What the page counts is what was read and written; the parts of a source decide nothing of it."""
    one = make(source, tmp_path / "one", **HOW, **OPTIONS)
    parts = make(source, tmp_path / "parts", **HOW, **OPTIONS, part_bytes=PART_BYTES)
    texts = both(one, 32)
    assert len(texts) == 80
    lengths = Counter(bin_of(len(text) + 1) for text in texts)  # bytes, and the end of text
    of_one = statistics_of(Path(one.directory), None)
    of_parts = statistics_of(Path(parts.directory), 3)
    for collected in (of_one, of_parts):
        assert collected.lengths == lengths
        assert sum(size.documents for size in collected.sources.values()) == 80
        assert sum(size.tokens for size in collected.sources.values()) == one.train.tokens + one.validation.tokens
        assert set(collected.sources) == {"en/", "de/", "c.jsonl"}
        counts = {reason: left_out.documents for reason, left_out in collected.left_out.items()}
        # The first "a b" is too short, and the others equal it.
        assert counts == {"words": 40, "deduplicate": 6 + 11, "minimum-tokens": 1}
        assert collected.left_out["words"].bytes == sum(len(f"word{number}") for number in range(40))
        examples = collected.left_out["words"].sample.examples.values()
        assert len(examples) == 10 and {example.text for example in examples} <= {f"word{n}" for n in range(40)}
        twice = {example.text: example.times for example in collected.left_out["deduplicate"].sample.examples.values()}
        assert twice == {f"page 3 of a site {'x' * 3}": 4, f"page 7 of a site {'x' * 7}": 2, "a b": 11}
    assert (of_parts.sources, of_parts.left_out) == (of_one.sources, of_one.left_out)

    page = Path(parts.directory) / "report.html"
    shown = facts(page)
    tokens = one.train.tokens + one.validation.tokens
    assert shown["documents"][0] == "80" and shown["tokens"][0] == f"{tokens:,}"
    assert shown["tokens per byte"][0] == f"{tokens / (tokens - 80):.4f}"
    assert shown["--words"][0] == "40" and shown["--deduplicate"][0] == "17" and shown["parts"][0] == "3"
    rows = table(page, "sources")
    assert {row[0] for row in rows} == {"en/", "de/", "c.jsonl"} and sum(int(row[1]) for row in rows) == 80
    assert sum(int(row[1]) for row in table(page, "lengths")) == 80
    text = plain(page.read_text(encoding="utf-8"))
    assert text.count("2 times") == 1 and "b.jsonl, line " in text and "―― end of text ――" in text


@pytest.mark.parametrize("part_bytes", [1 << 30, PART_BYTES])
def test_list_of_what_was_removed(source: Path, tmp_path: Path, part_bytes: int):
    """Each document that is not in the corpus, once, by its line, with the option that left it out."""
    corpus = make(source, tmp_path, **HOW, **OPTIONS, part_bytes=part_bytes)
    place = Path(corpus.directory)
    lines = [entry for path in sorted(place.glob("*removed.jsonl.gz")) for entry in read_removed(str(path))]
    assert Counter(entry["left_out_by"] for entry in lines) == {
        "--words": 40,
        "--deduplicate": 17,
        "--minimum-tokens": 1,
    }
    kept = Counter(both(corpus, 32))
    for entry in lines:
        path, _, number = entry["document"].partition(", line ")
        text = json.loads(Path(path).read_text().splitlines()[int(number) - 1])["text"]
        assert text not in kept or entry["left_out_by"] == "--deduplicate"
    assert len({entry["document"] for entry in lines}) == len(lines) == 138 - 80
    again = make(source, tmp_path, **HOW, part_bytes=part_bytes, overwrite=True)  # nothing is left out now
    assert not list(Path(again.directory).glob("*removed*")) and verify(again.directory) == []


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"deduplicate": True, "normalize": "nfc"}])
def test_file_that_is_not_utf8_is_listed(tmp_path: Path, options: dict[str, Any]):
    """The list and the page name it, with its text as far as it can be shown; no filter judges it."""
    root = tmp_path / "texts"
    root.mkdir()
    for number in range(20):
        (root / f"{number:02}.txt").write_text(f"two words {number}")
    latin = root / "latin.txt"
    latin.write_bytes("h\xe9 is one word".encode("latin-1"))
    corpus = make(root, tmp_path, **HOW, filters=(("words", "3,3"),), skip_broken=1, **options)
    place = Path(corpus.directory)
    assert corpus.skipped == 1 and dict(corpus.filtered) == {"words": 0}
    assert list(read_removed(str(place / "removed.jsonl.gz"))) == [
        {"document": str(latin), "left_out_by": "--skip-broken"}
    ]
    assert facts(place / "report.html")["--skip-broken"] == ("1", "documents, 16 bytes")
    assert "h\ufffd is one word" in plain((place / "report.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("part_bytes", [1 << 30, PART_BYTES])
def test_page_that_is_missing_is_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part_bytes: int
):
    """A call that ends between the index files and the page leaves a whole corpus; the next one writes the page."""
    whole = make(source, tmp_path / "whole", **HOW, **OPTIONS, part_bytes=part_bytes)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare, "write_report", _interrupted)
        make(source, tmp_path / "stopped", **HOW, **OPTIONS, part_bytes=part_bytes)
    stopped = Path(whole.directory.replace("whole", "stopped"))
    assert verify(str(stopped)) == [] and not (stopped / "report.html").exists()
    times = {path: path.stat().st_mtime_ns for path in stopped.iterdir()}
    make(source, tmp_path / "stopped", **HOW, **OPTIONS, part_bytes=part_bytes)
    assert digest(tmp_path / "stopped") == digest(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in times} == times
    # A copy without the statistics is kept, and the log says why it has no page.
    for path in stopped.glob("*statistics*"):
        path.unlink()
    (stopped / "report.html").unlink()
    with caplog.at_level(logging.WARNING):
        make(source, tmp_path / "stopped", **HOW, **OPTIONS, part_bytes=part_bytes)
    assert "has no report.html, because " in caplog.text


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_lowest_are_those_of_all_orders():
    """Whatever the order, and however they are grouped before they are added."""
    chosen = np.random.default_rng(0)
    keys = chosen.integers(0, 40, 200).tolist()
    expected = {key: keys.count(key) for key in sorted(set(keys))[:5]}
    for _ in range(20):
        chosen.shuffle(keys)
        groups = [HashSample(5), HashSample(5), HashSample(5)]
        for place, key in enumerate(keys):
            groups[place % 3].add(key, Example("", ""))
        together = HashSample(5)
        for group in groups:
            for key, example in group.examples.items():
                together.add(key, example)
        assert {key: example.times for key, example in sorted(together.examples.items())} == expected


def test_rows_are_spread(tmp_path: Path):
    """A hundred rows, of all parts, chosen by a hash: as many of each quarter as chance gives."""
    lines = [json.dumps({"text": f"{number:05} " + "x" * 25}) for number in range(2000)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    options = HOW | {"validation_fraction": 0.01, "rows_per_shard": 1024}  # more rows in a shard than are chosen
    corpus = make(tmp_path / "lines.jsonl", tmp_path, **options, part_bytes=30_000)
    rows = statistics_of(Path(corpus.directory), 3).rows.examples
    assert len(rows) == 100
    quarters = Counter(int(row.text.split(" x")[0][-5:]) // 500 for row in rows.values() if " x" in row.text)
    assert sum(quarters.values()) == 100 and all(
        abs(quarters[quarter] - 25) < 4 * math.sqrt(25) for quarter in range(4)
    )


def hostile(tmp_path: Path) -> Path:
    """Texts that would end a script, leave a box or hold no character, in rows that are all markup."""
    root = tmp_path / "hostile" / ("folder" * 20)
    root.mkdir(parents=True)
    texts = ["</script><b>&amp;", "\x00\x07\ud800 \u202e right to left", "w" * 3000, "<&>'\"" * 4000, "é" * 9000]
    texts += [f"{number} " + "<" * 8000 for number in range(300)]
    (root / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 2))
    options: dict[str, Any] = {
        "row_tokens": 8192,
        "deduplicate": True,
        "filters": (("words", "1,1"),),
        "skip_broken": 2,
    }
    corpus = make(tmp_path / "hostile", tmp_path, "hostile", workers=1, **options)
    return Path(corpus.directory) / "report.html"


def test_page_is_bounded(tmp_path: Path):
    page = hostile(tmp_path)
    assert 100_000 < page.stat().st_size < 1.5e6
    text = page.read_text(encoding="utf-8")
    assert "<b>" not in text and "&lt;/script&gt;&lt;b&gt;" in text and "\ud800" not in text and "\x07" not in text


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@pytest.mark.wide
@browser.needed
def test_layout(source: Path, tmp_path: Path, opened: Browser):
    """Nothing leaves the page, overlaps or is hard to read, at any width, in light and dark; nothing is asked for."""
    corpus = make(source, tmp_path, **HOW, **OPTIONS, part_bytes=PART_BYTES)
    for page in (Path(corpus.directory) / "report.html", hostile(tmp_path)):
        for width in WIDTHS:
            for dark in (False, True):
                opened.open(page, width, dark=dark)
                opened.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true }); 0")
                assert opened.evaluate(LAYOUT) == [], (page, width, dark)
                sizes = "[document.querySelector('.plot'), document.querySelector('.plot canvas')]"
                plot, canvas = opened.evaluate(f"{sizes}.map(e => e.getBoundingClientRect().width)")
                assert abs(plot - canvas) <= 1
    assert (opened.complaints, opened.asked) == ([], [])


@browser.needed
def test_histogram_in_a_browser(source: Path, tmp_path: Path, opened: Browser):
    """It is drawn, and the arrow keys read its bars, which are those of the table."""
    corpus = make(source, tmp_path, **HOW, **OPTIONS)
    page = Path(corpus.directory) / "report.html"
    opened.open(page)
    ink = "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(value => value > 0))"
    assert opened.evaluate(f"{ink}(document.querySelector('.plot canvas'))")
    opened.evaluate("document.querySelector('.plot').focus(); 0")
    opened.press("Home")
    said = []
    for _ in range(len(table(page, "lengths"))):
        said.append(opened.evaluate("document.getElementById('said').textContent"))
        opened.press("ArrowRight")
    assert [line.split(": ")[1] for line in said if not line.endswith(": 0 documents")] == [
        f"{row[1]} documents" for row in table(page, "lengths")
    ]


def test_tokens_have_no_bytes(tmp_path: Path):
    """Of a source of token ids the page has no sizes of text, and its examples are decoded."""
    np.save(tmp_path / "ids.npy", np.frombuffer(b"some text\0" * 60, np.uint8))
    corpus = make(tmp_path / "ids.npy", tmp_path, workers=1)
    page = Path(corpus.directory) / "report.html"
    assert "tokens per byte" not in facts(page)
    assert table(page, "sources") == [["ids.npy", "2", "600", "100.0%", "–", "–"]]
    assert "some text" in page.read_text()
    collected = CorpusStatistics()
    collected.leave_out("deduplicate", "a, document 3", np.frombuffer(b"an example", np.uint8), ByteTokenizer())
    (example,) = collected.left_out["deduplicate"].sample.examples.values()
    assert example == Example("a, document 3", "an example")


def test_pieces_of_a_text_have_no_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One long text is read in pieces, whose lengths are not those of documents."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 200)
    (tmp_path / "book.txt").write_text("a line of a book\n" * 99)
    corpus = make(tmp_path / "book.txt", tmp_path, workers=1, validation_fraction=0.1)
    collected = statistics_of(Path(corpus.directory), None)
    assert collected.lengths == {bin_of(corpus.validation.tokens): 1}  # which is one piece
    assert collected.sources["book.txt"].documents == 2
    assert collected.sources["book.txt"].tokens == corpus.train.tokens + corpus.validation.tokens


def test_facts_that_are_damaged_are_named(source: Path, tmp_path: Path):
    corpus = make(source, tmp_path, **HOW)
    path = Path(corpus.directory) / "statistics.json.gz"
    path.write_bytes(gzip.compress(b'{"sources": []}'))
    with pytest.raises(prepare.UserError, match=r"statistics\.json\.gz does not hold statistics of a part"):
        corpus_page.write_report(corpus.directory, json.loads((path.parent / "manifest.json").read_text()))
