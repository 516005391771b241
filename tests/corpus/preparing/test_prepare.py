"""Preparing text: without loss, split by document, and the same bytes again."""

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import both, digest, documents_of, make, tokens_of
from tests.helpers.loaders import open_loader
from tests.helpers.records import example, record
from zero.base.errors import UserError
from zero.corpus.format.index_files import read_index
from zero.corpus.text.tokenizers import load_tokenizer


def test_documents_stay_whole(folder: Path, tmp_path: Path):
    """Nothing is lost, and documents stay whole."""
    corpus = make(folder, tmp_path, validation_fraction=0.2)
    train, validation = documents_of(corpus.train_index, 16), documents_of(corpus.validation_index, 16)
    written = {path.read_text() for path in folder.rglob("*.txt")}
    assert set(train) | set(validation) == written and len(train) + len(validation) == 40
    assert 0 < len(validation) < 20
    assert (corpus.train.documents, corpus.validation.documents) == (len(train), len(validation))
    assert corpus.train.tokens == sum(len(text.encode()) + 1 for text in train)
    shards = read_index(corpus.train_index)
    assert corpus.train.shards == len(shards) > 3
    assert shards.rows[:-1].tolist() == [8] * (len(shards) - 1)
    assert shards.rows.sum() == corpus.train.rows == -(-corpus.train.tokens // 16)


def test_split_depends_on_the_document(folder: Path, tmp_path: Path):
    """The split of a document does not depend on the other documents."""
    before = set(documents_of(make(folder, tmp_path, "a", validation_fraction=0.2).validation_index, 16))
    (folder / "more.txt").write_text("one more")
    after = set(documents_of(make(folder, tmp_path, "b", validation_fraction=0.2).validation_index, 16))
    assert before <= after <= before | {"one more"}


def test_same_bytes_for_any_workers(mixed: Path, tmp_path: Path, bpe: Path):
    """The same input gives the same bytes for any number of workers."""
    digests = set()
    options: dict[str, Any] = {"row_tokens": 256, "rows_per_member": 16, "rows_per_shard": 128}
    for workers in (1, 3):
        place = tmp_path / str(workers)
        corpus = make(mixed, place, tokenizer=load_tokenizer(str(bpe)), workers=workers, **options)
        digests.add(digest(place))
    assert len(digests) == 1
    assert corpus.train.shards > 3
    assert corpus.train.documents + corpus.validation.documents == 30 + 300 + 150


def test_member_of_many_rows(folder: Path, tmp_path: Path):
    """A member holds many rows in the smallest dtype."""
    corpus = make(folder, tmp_path)
    with tarfile.open(Path(corpus.directory, "train-00000.tar")) as archive:
        member = archive.extractfile("000000000.input_id.npy")
        assert member
        array = np.load(io.BytesIO(member.read()), allow_pickle=False)
        assert archive.getnames() == ["000000000.input_id.npy", "000000004.input_id.npy"]
    assert array.shape == (4, 16) and array.dtype == np.uint8


def test_sources(tmp_path: Path):
    lines = [json.dumps({"text": f"line {i} " + "x" * i}) for i in range(50)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n\n")
    corpus = make(tmp_path / "lines.jsonl", tmp_path)
    assert both(corpus) == sorted(json.loads(line)["text"] for line in lines)
    assert Path(corpus.train_index).name == "c_train.index"

    code = tmp_path / "code"
    (code / ".git").mkdir(parents=True)
    (code / "a.py").write_text("print(1)")
    (code / "b.py").write_text("print(2)")
    (code / "empty.py").write_text("")
    (code / "latin.py").write_bytes(b"# \xe9")
    (code / "image.png").write_bytes(b"\x89PNG")
    (code / ".git" / "c.py").write_text("print(3)")
    corpus = make(code, tmp_path, "code", skip_broken=1)
    assert corpus.skipped == 1
    assert both(corpus) == ["print(1)", "print(2)"]


def test_single_text_is_cut(tmp_path: Path):
    """A single text is cut at a line."""
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "book.txt").write_text(text)
    corpus = make(tmp_path / "book.txt", tmp_path, validation_fraction=0.1)
    (train,), (validation,) = documents_of(corpus.train_index, 16), documents_of(corpus.validation_index, 16)
    assert train + validation == text and train.endswith("\n")
    assert 0.05 < len(validation) / len(text) < 0.15


def test_one_document_per_row(tmp_path: Path):
    texts = ["a" * n for n in (1, 14, 15, 16, 17, 40)] + ["b", "c"]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = make(tmp_path / "lines.jsonl", tmp_path, one_document_per_row=True, rows_per_member=2, rows_per_shard=4)
    assert both(corpus) == sorted(texts)
    rows = [tokens_of(index, 16) for index in (corpus.train_index, corpus.validation_index)]
    assert sum(map(len, rows)) == corpus.train.rows + corpus.validation.rows == 1 + 1 + 1 + 2 + 2 + 3 + 1 + 1
    for row in np.concatenate(rows):
        kept = row[row >= 0]
        assert 0 not in kept[:-1]  # no row holds an end of text and then another document
        assert (row[len(kept) :] == -1).all()  # padding is not scored


def test_records_of_ids(tmp_path: Path, bpe: Path):
    """Joined as they are, ended where they are not ended already, and refused where the tokenizer cannot mean them."""
    tokenizer = load_tokenizer(str(bpe))
    end, path = tokenizer.end_of_text, tmp_path / "ids.tfrecord"
    lists = [[5, 6, 7], [8, 9, end], [10], [260] * 30, [11, 12]]
    path.write_bytes(b"".join(record(example(ids=ids)) for ids in lists))
    corpus = make(path, tmp_path, tokenizer=tokenizer)
    rows = [tokens_of(index, 16).ravel() for index in (corpus.train_index, corpus.validation_index)]
    found = [list(row[row >= 0]) for row in rows]
    assert corpus.train.bytes is None and corpus.train.tokens + corpus.validation.tokens == sum(map(len, found)) == 43
    ended = [[*ids, end] if ids[-1] != end else ids for ids in lists]
    in_validation = [ids for ids in ended if ids == found[1]]
    assert len(in_validation) == 1
    assert found[0] == [token for ids in ended if ids not in in_validation for token in ids]
    path.write_bytes(record(example(ids=[1, 2])) + record(example(ids=[3, 290])))
    with pytest.raises(UserError, match=r"ids\.tfrecord, record 1 holds token 290, outside the vocabulary of 284"):
        make(path, tmp_path, "other", tokenizer=tokenizer)
    with pytest.raises(UserError, match="expects text, and the source holds tokens"):
        make(path, tmp_path, "another", tokenizer=300)


def test_long_document_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A long document is tokenized in parts and stays one document."""
    monkeypatch.setattr("zero.corpus.preparing.tokenize_documents._PIECE", 10)
    texts = ["x" * 35, "line\n" * 9, "é" * 20]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert both(make(tmp_path / "lines.jsonl", tmp_path)) == sorted(texts)


def test_a_tokenizer_of_its_own(mixed: Path, tmp_path: Path):
    """Trained, kept beside the shards, used unchanged by the second call, and able to say what it was fed."""
    options: dict[str, Any] = {"tokenizer": 400, "row_tokens": 64, "rows_per_member": 64, "rows_per_shard": 1024}
    corpus = make(mixed, tmp_path / "one", **options)
    path = Path(corpus.directory, "tokenizer.json")
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == 400 and tokenizer.end_of_text == 0
    assert corpus.train.bytes and corpus.train.tokens < corpus.train.bytes / 2
    tokens = tokens_of(corpus.validation_index, 64).ravel()
    texts = {path.read_text(encoding="utf-8") for path in mixed.glob("[0-9]*.txt")}
    first = tokenizer.decode(tokens[: list(tokens).index(0)])
    assert first in texts or json.dumps({"text": first}).encode() in (mixed / "x.jsonl").read_bytes()
    os.utime(path, (1, 1))
    assert make(mixed, tmp_path / "one", **options) == corpus and path.stat().st_mtime == 1
    with pytest.raises(UserError, match=r"prepared with train_tokenizer=400, not train_tokenizer=None"):
        make(mixed, tmp_path / "one", **(options | {"tokenizer": tokenizer}))
    with pytest.raises(UserError, match="a tokenizer of 256 tokens cannot be trained"):
        make(mixed, tmp_path, **(options | {"tokenizer": 256}))


def test_standard_library(tmp_path: Path):
    """The default corpus of this machine is prepared and read."""
    corpus = make("stdlib", tmp_path, row_tokens=256, rows_per_member=256, rows_per_shard=8192)
    assert corpus.train.tokens > 4_000_000
    assert 0.01 < corpus.validation.tokens / corpus.train.tokens < 0.2
    loader = open_loader(corpus.train_index, global_rows=16, context=256, vocab_size=256)
    assert next(loader.batches()).tokens.shape == (16, 256)


def test_source_edited_in_place(folder: Path, tmp_path: Path):
    """A source with other contents of the same size and times is noticed, and prepared again if asked."""
    before = both(make(folder, tmp_path))
    edited = folder / "part0" / "00.txt"
    text, times = edited.read_text(), edited.stat()
    edited.write_text(text.swapcase())
    os.utime(edited, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(
        UserError, match=r"corpus .*/c was prepared when .*text had other contents, in files of the same"
    ):
        make(folder, tmp_path)
    after = both(make(folder, tmp_path, overwrite=True))
    assert (text in before, text in after, text.swapcase() in after) == (True, False, True)
    shard = tmp_path / "corpus" / "c" / "train-00000.tar"
    os.utime(shard, (1, 1))
    make(folder, tmp_path, overwrite=True)  # of the same contents: nothing is written
    assert shard.stat().st_mtime == 1
    edited.write_text(text)
    assert both(make(folder, tmp_path, overwrite=True)) == before


def test_existing_corpus_is_kept(folder: Path, tmp_path: Path):
    """An existing corpus is kept, and other arguments are refused."""
    corpus = make(folder, tmp_path)
    shard, index = Path(corpus.directory, "train-00000.tar"), Path(corpus.train_index)
    os.utime(shard, (1, 1))
    assert make(folder, tmp_path) == corpus and shard.stat().st_mtime == 1
    listed = index.read_bytes()
    index.unlink()
    assert make(folder, tmp_path) == corpus and shard.stat().st_mtime == 1 and index.read_bytes() == listed
    with pytest.raises(UserError, match=r"prepared with row_tokens=16, not row_tokens=32.*--overwrite"):
        make(folder, tmp_path, row_tokens=32)
    (folder / "part0" / "00.txt").write_text("something longer")
    with pytest.raises(UserError, match=r"prepared when .*text had other files"):
        make(folder, tmp_path)
    assert documents_of(make(folder, tmp_path, row_tokens=32, overwrite=True).train_index, 32)
    others = {path.name for path in Path(corpus.directory).iterdir() if path.suffix != ".tar"}
    assert others == {"manifest.json", "written.json", "statistics.json.gz", "report.html"}
    shard.unlink()
    assert documents_of(make(folder, tmp_path, row_tokens=32).train_index, 32)


def test_bad_sources_are_named(tmp_path: Path):
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        make(tmp_path / "nowhere", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty holds no text files"):
        make(tmp_path / "empty", tmp_path)
    (tmp_path / "blank.txt").write_text("")
    with pytest.raises(UserError, match=r"blank\.txt holds no text"):
        make(tmp_path / "blank.txt", tmp_path)
    for line in ('{"text": 1}', '{"body": "x"}', "[]", "{", "7"):
        (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' + line)
        with pytest.raises(UserError, match=r'bad\.jsonl, line 2: expected a (string under "text"|JSON object)'):
            make(tmp_path / "bad.jsonl", tmp_path)
    with pytest.raises(UserError, match="validation_fraction"):
        make(tmp_path, tmp_path, validation_fraction=1.0)
    with pytest.raises(UserError, match="rows_per_shard 9"):
        make(tmp_path, tmp_path, rows_per_shard=9)
    assert not (tmp_path / "index").exists()


def test_a_file_that_cannot_be_read(folder: Path, tmp_path: Path):
    (folder / "memory.txt").symlink_to("/proc/self/mem")  # a regular file whose first byte gives an I/O error
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"memory\.txt cannot be read: Input/output error"):
            make(folder, tmp_path, workers=workers)
