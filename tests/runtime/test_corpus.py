"""Preparing text: without loss, split by document, the same bytes again, and never half done."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zero.runtime import UserError
from zero.runtime.corpus import Corpus, prepare
from zero.runtime.shards import Loader, read_index
from zero.runtime.text import ByteTokenizer

REPOSITORY = Path(__file__).parents[2]


def make(source: str | Path, tmp_path: Path, name: str = "c", **options: Any) -> Corpus:
    defaults: dict[str, Any] = {"tokenizer": ByteTokenizer(), "row_tokens": 16, "rows_per_member": 4}
    options = defaults | {"rows_per_shard": 8} | options
    return prepare(source, name, directory=tmp_path / "corpus", index_directory=tmp_path / "index", **options)


def documents(index: Path, row_tokens: int) -> list[str]:
    """The documents of a split, read back through the loader."""
    loader = Loader(index, global_rows=1, context=row_tokens, vocab_size=256, shuffle=False, max_epochs=1)
    tokens = np.concatenate([batch.tokens for batch in loader.batches()]).ravel()
    *texts, rest = bytes(tokens[tokens >= 0].astype(np.uint8)).split(b"\0")
    assert rest == b""  # each document is ended, the last one too
    return [text.decode() for text in texts]


def digest(directory: Path) -> str:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return hashlib.sha256(b"".join(str(f.relative_to(directory)).encode() + f.read_bytes() for f in files)).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    for i in range(40):
        path = root / f"part{i % 3}" / f"{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {i}: " + "é" * (7 * i))
    return root


def test_nothing_is_lost_and_documents_stay_whole(folder: Path, tmp_path: Path):
    corpus = make(folder, tmp_path, validation_fraction=0.2)
    train, validation = documents(corpus.train_index, 16), documents(corpus.validation_index, 16)
    written = {path.read_text() for path in folder.rglob("*.txt")}
    assert set(train) | set(validation) == written and len(train) + len(validation) == 40
    assert 0 < len(validation) < 20
    assert (corpus.train.documents, corpus.validation.documents) == (len(train), len(validation))
    assert corpus.train.tokens == sum(len(text.encode()) + 1 for text in train)
    shards = read_index(corpus.train_index)
    assert corpus.train.shards == len(shards) > 3
    assert [shard.rows for shard in shards[:-1]] == [8] * (len(shards) - 1)
    assert sum(shard.rows for shard in shards) == corpus.train.rows == -(-corpus.train.tokens // 16)


def test_the_split_does_not_depend_on_what_else_is_there(folder: Path, tmp_path: Path):
    before = set(documents(make(folder, tmp_path, "a", validation_fraction=0.2).validation_index, 16))
    (folder / "more.txt").write_text("one more")
    after = set(documents(make(folder, tmp_path, "b", validation_fraction=0.2).validation_index, 16))
    assert before <= after <= before | {"one more"}


def test_the_same_input_gives_the_same_bytes(folder: Path, tmp_path: Path):
    for place in ("one", "two"):
        make(folder, tmp_path / place)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


def test_a_member_holds_many_rows_in_the_smallest_type(folder: Path, tmp_path: Path):
    corpus = make(folder, tmp_path)
    with tarfile.open(corpus.directory / "train-00000.tar") as archive:
        member = archive.extractfile("000000000.input_id.npy")
        assert member
        array = np.load(io.BytesIO(member.read()), allow_pickle=False)
        assert archive.getnames() == ["000000000.input_id.npy", "000000004.input_id.npy"]
    assert array.shape == (4, 16) and array.dtype == np.uint8


def test_sources(tmp_path: Path):
    lines = [json.dumps({"text": f"line {i} " + "x" * i}) for i in range(50)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n\n")
    corpus = make(tmp_path / "lines.jsonl", tmp_path)
    found = documents(corpus.train_index, 16) + documents(corpus.validation_index, 16)
    assert sorted(found) == sorted(json.loads(line)["text"] for line in lines)
    assert corpus.train_index.name == "c_train.index"

    code = tmp_path / "code"
    (code / ".git").mkdir(parents=True)
    (code / "a.py").write_text("print(1)")
    (code / "b.py").write_text("print(2)")
    (code / "empty.py").write_text("")
    (code / "latin.py").write_bytes(b"# \xe9")
    (code / "image.png").write_bytes(b"\x89PNG")
    (code / ".git" / "c.py").write_text("print(3)")
    corpus = make(code, tmp_path, "code")
    assert corpus.skipped == 1
    found = documents(corpus.train_index, 16) + documents(corpus.validation_index, 16)
    assert sorted(found) == ["print(1)", "print(2)"]


def test_a_single_text_is_cut_at_a_line(tmp_path: Path):
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "book.txt").write_text(text)
    corpus = make(tmp_path / "book.txt", tmp_path, validation_fraction=0.1)
    (train,), (validation,) = documents(corpus.train_index, 16), documents(corpus.validation_index, 16)
    assert train + validation == text and train.endswith("\n")
    assert 0.05 < len(validation) / len(text) < 0.15


def test_the_standard_library_is_ready_in_seconds(tmp_path: Path):
    begin = time.monotonic()
    corpus = make("stdlib", tmp_path, row_tokens=256, rows_per_member=256, rows_per_shard=8192)
    assert time.monotonic() - begin < 20
    assert corpus.train.tokens > 4_000_000
    assert 0.01 < corpus.validation.tokens / corpus.train.tokens < 0.2
    loader = Loader(corpus.train_index, global_rows=16, context=256, vocab_size=256)
    assert next(loader.batches()).tokens.shape == (16, 256)


def test_what_stands_is_kept_and_other_arguments_are_refused(folder: Path, tmp_path: Path):
    corpus = make(folder, tmp_path)
    shard = corpus.directory / "train-00000.tar"
    os.utime(shard, (1, 1))
    assert make(folder, tmp_path) == corpus and shard.stat().st_mtime == 1
    with pytest.raises(UserError, match=r"prepared with row_tokens=16, not row_tokens=32.*--overwrite"):
        make(folder, tmp_path, row_tokens=32)
    assert documents(make(folder, tmp_path, row_tokens=32, overwrite=True).train_index, 32)
    corpus.train_index.unlink()
    assert documents(make(folder, tmp_path, row_tokens=32).train_index, 32)
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["c"]  # nothing is left aside


@pytest.mark.parametrize("already", [False, True])
def test_a_killed_prepare_leaves_no_index_to_missing_shards(folder: Path, tmp_path: Path, already: bool):
    """Killed at each renaming and unlinking in turn, by the process itself."""
    corpus = make(folder, tmp_path)
    command = """
import os, signal, sys
from pathlib import Path
from zero.runtime.corpus import prepare
from zero.runtime.text import ByteTokenizer
source, place, fatal = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
calls = 0
def watch(event, arguments):
    global calls
    if event == "os.rename" or event == "os.remove" and str(arguments[0]).endswith(".index"):
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
sys.addaudithook(watch)
prepare(source, "c", directory=place / "corpus", index_directory=place / "index", tokenizer=ByteTokenizer(),
        row_tokens=32, rows_per_member=4, rows_per_shard=8, overwrite=True)
"""
    for fatal in range(20):
        place = tmp_path / f"killed{fatal}"
        if already:
            make(folder, place)
        arguments = [sys.executable, "-c", command, str(folder), str(place), str(fatal)]
        process = subprocess.run(arguments, cwd=REPOSITORY, check=False)
        for index in (place / "index").glob("*.index"):
            read_index(index)  # raises where a shard is missing
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        again = make(folder, place, row_tokens=32, overwrite=True)
        assert again.train.tokens == corpus.train.tokens
    assert process.returncode == 0 and fatal >= 3


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
        with pytest.raises(UserError, match=r'bad\.jsonl, line 2: expected a JSON object with a string under "text"'):
            make(tmp_path / "bad.jsonl", tmp_path)
    with pytest.raises(UserError, match="validation_fraction"):
        make(tmp_path, tmp_path, validation_fraction=1.0)
    with pytest.raises(UserError, match="rows_per_shard 9"):
        make(tmp_path, tmp_path, rows_per_shard=9)
    assert not (tmp_path / "index").exists()


def test_the_command(folder: Path, tmp_path: Path):
    command = [sys.executable, "data/prepare.py", str(folder), "--name", "mine", "--row-tokens", "16"]
    command += ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "index")]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True)
    assert "mine_train.index: " in run.stdout and (tmp_path / "corpus/mine/train-00000.tar").is_file()
    bad = subprocess.run(
        [*command, "--row-tokens", "8"], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert bad.returncode == 1
    assert bad.stderr.startswith("error: corpus ") and bad.stderr.count("\n") == 1
