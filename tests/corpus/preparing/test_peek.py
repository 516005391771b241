"""--peek: rows as text, spread over a corpus, with their ids, where documents begin and what was cut."""

import json
from pathlib import Path

import pytest

from tests.helpers.brought import save_tokenizer
from tests.helpers.corpora import call, make
from zero.corpus.preparing.prepare import Corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Documents of seven or eight tokens in rows of 16, four of them in a shard."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(60)))
    return make(tmp_path / "a.jsonl", tmp_path, rows_per_shard=4)


def test_rows_are_spread(corpus: Corpus) -> None:
    """The first row, one from the middle, and what is in their shards."""
    done = call(corpus.train_index, "--peek", "2")
    first, text, second, _, summary = done.stdout.splitlines()
    assert first == (
        "row 0: 16 of 16 tokens, ids 0 to 120 of 256; documents begin at 0, 7, 14; the last document is cut"
    )
    assert text.strip().startswith("'text ")
    assert second.startswith(f"row {corpus.train.rows // 2}: 16 of 16 tokens, ids 0 to 120 of 256; documents begin at ")
    assert summary.startswith(f"2 of {corpus.train.shards} shards: 8 rows, ids 0 to 120 of 256; ")
    assert summary.endswith(" rows end within a document; 0 of 128 tokens are padding")


def test_what_was_cut(corpus: Corpus) -> None:
    """All rows: a row after one that ends within a document begins with the rest of that."""
    done = call(corpus.train_index, "--peek", "1000").stdout.splitlines()
    rows, summary = done[:-2:2], done[-2]
    assert done[-1] == f"{corpus.train_index} has {len(rows)} rows" and len(rows) == corpus.train.rows
    cut = ["the last document is cut" in row for row in rows]
    rest = ["the first one is the rest of a document" in row for row in rows]
    known = [number for number in range(1, len(rows)) if number % 4]  # not the first one of a shard
    assert [cut[number - 1] for number in known] == [rest[number] for number in known]
    assert 5 < sum(cut) < len(rows) and not cut[-1]
    padding = corpus.train.rows * 16 - corpus.train.tokens
    assert f"; {sum(cut)} rows end within a document; {padding} of {corpus.train.rows * 16} tokens" in summary


@pytest.mark.parametrize(("home", "end"), [("llama2", "</s>"), ("qwen2", "<|im_end|>")])
def test_ends_of_turns_begin_no_document(home: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a row of conversations of two turns, with the special tokens spelled."""
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "folder", home)
    turns = [{"role": role, "content": "a shard"} for role in ("user", "assistant") * 2]
    Path("a.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    options = ("--completions", "--tokenizer", "folder/tokenizer.json", "--row-tokens", "128")
    assert call("a.jsonl", *options, "--validation-fraction", "0").returncode == 0
    row, text, *_ = call("data/index/a_train.index", "--peek", "1").stdout.splitlines()
    begun = row.partition("documents begin at ")[2].partition(";")[0]
    starts = sorted({0, *map(int, begun.split(", "))})
    assert text.count(end) == (2 if home == "llama2" else 4) * len(starts) and len(starts) > 1
    tokens = int(row.partition(": ")[2].partition(" of")[0])
    assert {stop - start for start, stop in zip(starts, [*starts[1:], tokens], strict=True)} == {tokens // len(starts)}


def test_mistakes_are_one_line(corpus: Corpus, tmp_path: Path) -> None:
    place = Path(corpus.directory, "manifest.json")
    for arguments, message in (
        ((tmp_path / "none.index", "--peek", "1"), "error: index file "),
        ((corpus.train_index, "--peek", "0"), "error: --peek 0: expected at least one row"),
        ((corpus.train_index, "--peek", "1", "--tokenizer", place), "is not a file of the tokenizers library"),
    ):
        done = call(*arguments)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "other.tar").write_bytes(b"no tar")
    (tmp_path / "other.index").write_text("other.tar # 3 rows\n")
    done = call(tmp_path / "other.index", "--peek", "1", "--tokenizer", "bytes")
    assert done.returncode == 2 and "other.tar is truncated or damaged" in done.stderr
