"""Preparing text: without loss, split by document, the same bytes again, and never half done."""

import gzip
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import bucket
from tests.corpora import COMMAND, REPOSITORY, both, digest, documents_of, make, run, tokens_of
from tests.records import example, record
from zero.runtime import storage
from zero.runtime.corpus.corpus import prepare, verify
from zero.runtime.corpus.sources import documents
from zero.runtime.data.loader import Loader
from zero.runtime.data.shards import read_index
from zero.runtime.errors import UserError
from zero.runtime.tokenizers import ByteTokenizer, FileTokenizer, load_tokenizer, train_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    for i in range(40):
        path = root / f"part{i % 3}" / f"{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {i}: " + "é" * (7 * i))
    return root


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Five mebibytes: several units, of files and of lines, plain and packed."""
    root, words = tmp_path / "mixed", random.Random(0)
    root.mkdir()

    def text(i: int, size: int) -> str:
        return f"document {i}, not <|endoftext|>: " + " ".join(
            words.choices(["shard", "gather", "scatter", "zéro", "\n"], k=size)
        )

    for i in range(30):
        (root / f"{i:02}.txt").write_text(text(i, 9000), encoding="utf-8")
    lines = b"".join(json.dumps({"text": text(i, 900)}).encode() + b"\n" for i in range(300))
    (root / "x.jsonl").write_bytes(lines)
    (root / "y.jsonl.gz").write_bytes(gzip.compress(lines[: len(lines) // 2 - 9].rpartition(b"\n")[0], mtime=0))
    (root / "latin.txt").write_bytes(b"\xe9")
    return root


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of the tokenizers library."""
    path = tmp_path_factory.mktemp("bpe") / "bpe.json"
    path.write_bytes(train_tokenizer(["document shard gather scatter zéro"] * 9, 290))
    return path


# ---- what is written -------------------------------------------------------------------------------------------------


def test_nothing_is_lost_and_documents_stay_whole(folder: Path, tmp_path: Path):
    corpus = make(folder, tmp_path, validation_fraction=0.2)
    train, validation = documents_of(corpus.train_index, 16), documents_of(corpus.validation_index, 16)
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
    before = set(documents_of(make(folder, tmp_path, "a", validation_fraction=0.2).validation_index, 16))
    (folder / "more.txt").write_text("one more")
    after = set(documents_of(make(folder, tmp_path, "b", validation_fraction=0.2).validation_index, 16))
    assert before <= after <= before | {"one more"}


def test_the_same_input_gives_the_same_bytes_for_any_number_of_workers(mixed: Path, tmp_path: Path, bpe: Path):
    digests = set()
    options: dict[str, Any] = {"row_tokens": 256, "rows_per_member": 16, "rows_per_shard": 128}
    for workers in (1, 2, 3):
        place = tmp_path / str(workers)
        corpus = make(mixed, place, tokenizer=load_tokenizer(str(bpe)), workers=workers, **options)
        digests.add(digest(place))
    assert len(digests) == 1
    assert corpus.train.shards > 3 and corpus.skipped == 1
    assert corpus.train.documents + corpus.validation.documents == 30 + 300 + 150


def test_a_member_holds_many_rows_in_the_smallest_type(folder: Path, tmp_path: Path):
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
    corpus = make(code, tmp_path, "code")
    assert corpus.skipped == 1
    assert both(corpus) == ["print(1)", "print(2)"]


def test_a_single_text_is_cut_at_a_line(tmp_path: Path):
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "book.txt").write_text(text)
    corpus = make(tmp_path / "book.txt", tmp_path, validation_fraction=0.1)
    (train,), (validation,) = documents_of(corpus.train_index, 16), documents_of(corpus.validation_index, 16)
    assert train + validation == text and train.endswith("\n")
    assert 0.05 < len(validation) / len(text) < 0.15


def test_one_document_a_row(tmp_path: Path):
    texts = ["a" * n for n in (1, 14, 15, 16, 17, 40)] + ["b", "c"]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = make(tmp_path / "lines.jsonl", tmp_path, one_document_a_row=True, rows_per_member=2, rows_per_shard=4)
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


def test_a_long_document_is_tokenized_in_parts_and_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zero.runtime.corpus.tokenizing._PIECE", 10)
    texts = ["x" * 35, "line\n" * 9, "é" * 20]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert both(make(tmp_path / "lines.jsonl", tmp_path)) == sorted(texts)


def test_a_tokenizer_of_its_own(mixed: Path, tmp_path: Path):
    """Trained, kept beside the shards, used by the second call as it stands, and able to say what it was fed."""
    options: dict[str, Any] = {"tokenizer": 400, "row_tokens": 64, "rows_per_member": 64, "rows_per_shard": 1024}
    corpus = make(mixed, tmp_path / "one", **options)
    make(mixed, tmp_path / "two", **options, workers=2)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
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


def test_the_standard_library_is_ready_in_seconds(tmp_path: Path):
    begin = time.monotonic()
    corpus = make("stdlib", tmp_path, row_tokens=256, rows_per_member=256, rows_per_shard=8192)
    assert time.monotonic() - begin < 20
    assert corpus.train.tokens > 4_000_000
    assert 0.01 < corpus.validation.tokens / corpus.train.tokens < 0.2
    loader = Loader(corpus.train_index, global_rows=16, context=256, vocab_size=256)
    assert next(loader.batches()).tokens.shape == (16, 256)


# ---- what stands already ---------------------------------------------------------------------------------------------


def test_what_stands_is_kept_and_other_arguments_are_refused(folder: Path, tmp_path: Path):
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
    with pytest.raises(UserError, match=r"prepared when .*text held other files"):
        make(folder, tmp_path)
    assert documents_of(make(folder, tmp_path, row_tokens=32, overwrite=True).train_index, 32)
    assert {path.name for path in Path(corpus.directory).iterdir() if path.suffix != ".tar"} == {"manifest.json"}
    shard.unlink()
    assert documents_of(make(folder, tmp_path, row_tokens=32).train_index, 32)


class Stopping(ByteTokenizer):
    """One that is interrupted, and counts what it was asked to do."""

    def __init__(self, at: int | None = None):
        self.calls, self._at = 0, at

    def encode(self, text: str) -> np.ndarray:
        if self.calls == self._at:
            raise KeyboardInterrupt
        self.calls += 1
        return super().encode(text)


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=8, max_size=40),
    unit=st.integers(1, 200),
    rows_per_member=st.integers(1, 3),
    members=st.integers(1, 3),
    one_document_a_row=st.booleans(),
    stops=st.lists(st.integers(0, 50), max_size=4),
)
def test_interrupted_anywhere_and_called_again(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    unit: int,
    rows_per_member: int,
    members: int,
    one_document_a_row: bool,
    stops: list[int],
):
    root = tmp_path_factory.mktemp("stops")
    lines = [json.dumps({"text": f"{i}" + "x" * size}) for i, size in enumerate(sizes)]
    (root / "lines.jsonl").write_text("\n".join(lines))
    options: dict[str, Any] = {
        "row_tokens": 8,
        "rows_per_member": rows_per_member,
        "rows_per_shard": rows_per_member * members,
        "one_document_a_row": one_document_a_row,
        "validation_fraction": 0.3,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_UNIT", unit)
        whole = make(root / "lines.jsonl", root / "whole", **options)
        for at in stops:
            try:
                make(root / "lines.jsonl", root / "parts", **options, tokenizer=Stopping(at))
            except KeyboardInterrupt:
                assert not (root / "parts" / "index").exists()
        parts = make(root / "lines.jsonl", root / "parts", **options)
    assert parts.train == whole.train and parts.validation == whole.validation
    assert digest(root / "parts") == digest(root / "whole")


def test_a_second_call_tokenizes_what_is_missing_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "_UNIT", 200)
    lines = [json.dumps({"text": f"{i:3} and more"}) for i in range(400)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "lines.jsonl", tmp_path, tokenizer=Stopping(350))
    finished = {path.name: path.stat().st_mtime_ns for path in Path(tmp_path, "corpus/c").glob("*.tar")}
    assert len(finished) > 20
    rest = Stopping()
    corpus = make(tmp_path / "lines.jsonl", tmp_path, tokenizer=rest)
    assert 50 <= rest.calls < 100  # of 400: the rest, the documents of a shard each, and of a unit
    assert {name: Path(corpus.directory, name).stat().st_mtime_ns for name in finished} == finished


def test_a_source_that_changed_under_half_a_corpus(tmp_path: Path):
    lines = [json.dumps({"text": f"{i:3} and more"}) + "\n" for i in range(400)]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(documents, "_UNIT", 200)
        make(path, tmp_path, tokenizer=Stopping(350))
    path.write_text("".join(reversed(lines)))  # of the same size
    with pytest.raises(UserError, match="half done, and its source has changed since"):
        make(path, tmp_path)
    assert len(both(make(path, tmp_path, overwrite=True))) == 400


@pytest.mark.parametrize("already", [False, True])
def test_a_killed_prepare_leaves_no_index_to_missing_shards(folder: Path, tmp_path: Path, already: bool):
    """Killed by itself at the n-th renaming or removing of a file, for several n."""
    options: dict[str, Any] = {"row_tokens": 32, "overwrite": True}
    make(folder, tmp_path / "whole", **options)
    command = """
import os, signal, sys
from pathlib import Path
from zero.runtime.corpus.corpus import prepare
from zero.runtime.tokenizers import ByteTokenizer
source, place, fatal = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
calls = 0
def watch(event, arguments):
    global calls
    if event in ("os.rename", "os.remove"):
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
sys.addaudithook(watch)
prepare(source, "c", directory=place / "corpus", index_directory=place / "index", tokenizer=ByteTokenizer(),
        row_tokens=32, rows_per_member=4, rows_per_shard=8, overwrite=True)
"""
    survived = 0
    for fatal in (0, 1, 3, 20, 59, 1000):
        place = tmp_path / f"killed{fatal}"
        if already:
            make(folder, place)
        arguments = [sys.executable, "-c", command, str(folder), str(place), str(fatal)]
        process = subprocess.run(arguments, cwd=REPOSITORY, check=False)
        survived += process.returncode == 0
        assert process.returncode in (0, -signal.SIGKILL)
        for index in (place / "index").glob("*.index"):
            read_index(index)  # raises where a shard is missing
        finished = {path: path.stat().st_mtime_ns for path in standing(place / "corpus/c")}
        make(folder, place, **options)
        assert digest(place) == digest(tmp_path / "whole")  # and nothing is left aside
        assert fatal < 20 or already or len(finished) > 3
        if not already:
            assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert 1 <= survived <= 3


def standing(place: Path) -> list[Path]:
    """The shards that a corpus, whole or not, has in its manifest."""
    if not (place / "manifest.json").exists():
        return []
    manifest = json.loads((place / "manifest.json").read_text())
    return [place / shard["name"] for split in ("train", "validation") for shard in manifest[split]["shards"]]


def test_killed_with_its_workers_in_the_middle(mixed: Path, tmp_path: Path, bpe: Path):
    """kill -9 from outside: the workers go too, and a second call finishes what is missing alone."""
    options = ["--name", "c", "--tokenizer", str(bpe), "--row-tokens", "256", "--rows-per-member", "8"]
    options += ["--rows-per-shard", "64", "--workers", "2"]

    def places(place: Path) -> list[str]:
        return ["--directory", str(place / "corpus"), "--index-directory", str(place / "index")]

    assert run(mixed, *options, *places(tmp_path / "whole")).returncode == 0
    place = tmp_path / "killed"
    process = subprocess.Popen(
        [*COMMAND, str(mixed), *map(str, options), *places(place)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
    )
    wait(lambda: len(standing(place / "corpus/c")) > 5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert len(children) >= 2
    wait(lambda: not any(is_running(child) for child in children))
    finished = {path: path.stat().st_mtime_ns for path in standing(place / "corpus/c")}
    assert 5 < len(finished) < len(standing(tmp_path / "whole/corpus/c"))
    assert not (place / "index").exists()
    assert run(mixed, *options, *places(place)).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert digest(place) == digest(tmp_path / "whole")


def test_ctrl_c_is_one_line(mixed: Path, tmp_path: Path, bpe: Path):
    """At a time when the workers are about to start; it reaches them as well."""
    options = [
        "--tokenizer",
        str(bpe),
        "--workers",
        "2",
        "--directory",
        str(tmp_path),
        "--index-directory",
        str(tmp_path),
    ]
    process = subprocess.Popen(
        [*COMMAND, str(mixed), *options],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait(lambda: len(children.read_text().split()) == 3)  # multiprocessing has a process of its own
    time.sleep(0.5)  # they import
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and said == "stopped; the same call goes on\n"


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ---- buckets ---------------------------------------------------------------------------------------------------------


def test_a_bucket_gets_the_same_bytes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Interrupted and called again, shards and index in a bucket, or only the shards."""
    options: dict[str, Any] = {"row_tokens": 8, "rows_per_member": 2, "rows_per_shard": 4, "tokenizer": 300}
    encode, calls = FileTokenizer.encode, itertools.count()

    def stopping(tokenizer: FileTokenizer, text: str) -> np.ndarray:
        if next(calls) == 25:
            raise KeyboardInterrupt
        return encode(tokenizer, text)

    monkeypatch.setattr(documents, "_UNIT", 200)
    local = make(folder, tmp_path, **options)
    with bucket.serving() as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        storage._client.cache_clear()
        place = f"gs://{bucket.BUCKET}/corpora"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(FileTokenizer, "encode", stopping)
            prepare(folder, "c", directory=place, index_directory=f"gs://{bucket.BUCKET}/index", **options)
        half = storage.list_files(place)
        assert 3 < len(half) < local.train.shards
        corpus = prepare(folder, "c", directory=place, index_directory=f"gs://{bucket.BUCKET}/index", **options)
        assert (corpus.train, corpus.validation) == (local.train, local.validation)
        for path in Path(local.directory).iterdir():
            assert storage.read_bytes(f"{place}/c/{path.name}") == path.read_bytes(), path.name
        first = storage.read_bytes(corpus.train_index).decode().splitlines()[1]
        assert first == "../corpora/c/train-00000.tar # 4 rows"
        tokenizer = load_tokenizer(f"{place}/c/tokenizer.json")
        assert verify(corpus.train_index, tokenizer) == []

        away = prepare(folder, "c", directory=place, index_directory=tmp_path / "away", **options)
        first = Path(away.train_index).read_text().splitlines()[1]
        assert first == f"{place}/c/train-00000.tar # 4 rows"
        storage.remove(f"{place}/c/train-00001.tar")
        assert verify(away.train_index) == [f"{place}/c/train-00001.tar is missing"]


# ---- verifying -------------------------------------------------------------------------------------------------------


def test_verify_names_what_differs(folder: Path, tmp_path: Path, bpe: Path):
    corpus = make(folder, tmp_path, tokenizer=load_tokenizer(str(bpe)))
    place = Path(corpus.directory)
    for good in (corpus.directory, corpus.train_index, corpus.validation_index):
        assert verify(good, load_tokenizer(str(bpe))) == []
    done = run(corpus.train_index, "--verify")
    assert done.returncode == 0 and "is as its manifest says" in done.stdout

    assert [line.rpartition(" was prepared ")[2] for line in verify(corpus.directory, ByteTokenizer())] == [
        f"with tokenizer {load_tokenizer(str(bpe)).name}, not bytes"
    ]
    shards = sorted(place.glob("train-*.tar"))
    data = bytearray(shards[1].read_bytes())
    data[700] ^= 1
    shards[1].write_bytes(data)
    shards[2].unlink()
    shards[0].write_bytes(shards[0].read_bytes()[:-512])
    (place / "train-99999.tar").write_bytes(b"")
    (place / "tokenizer.json").write_text((place / "tokenizer.json").read_text() + " ")
    Path(corpus.train_index).write_text(Path(corpus.train_index).read_text().replace("00003.tar # 8", "00003.tar # 7"))
    done = run(corpus.train_index, "--verify")
    assert done.returncode == 1 and done.stderr == ""
    expected = [
        r"c_train.index does not list the shards of",
        r"train-99999.tar is not in the manifest",
        r"train-00000.tar has \d+ bytes; expected \d+",
        r"train-00001.tar does not match its checksum",
        r"train-00002.tar is missing",
        r"tokenizer.json is not the tokenizer of this corpus",
    ]
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.search(pattern, line)


def test_verify_of_what_is_no_corpus(folder: Path, tmp_path: Path):
    for name in ("nowhere", "nowhere_train.index"):
        with pytest.raises(UserError, match=rf"{name}.*: no such file; expected a corpus, or its index file"):
            verify(str(tmp_path / name))
    place = tmp_path / "corpus" / "c"
    place.mkdir(parents=True)
    for foreign in ("{", "[]", "{}", '{"train": {"shards": 3}, "validation": {"shards": 1}}'):
        (place / "manifest.json").write_text(foreign)
        for use in (lambda: verify(str(place)), lambda: make(folder, tmp_path, overwrite=True)):
            with pytest.raises(UserError, match=r"manifest\.json is no manifest that this version reads"):
                use()


# ---- mistakes --------------------------------------------------------------------------------------------------------


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


def test_a_full_disk_is_one_line_and_the_next_call_goes_on(mixed: Path, tmp_path: Path):
    limited = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # no file may grow beyond: to us, a disk that is full
sys.argv = ["data/prepare.py", *sys.argv[1:]]
runpy.run_path("data/prepare.py", run_name="__main__")
"""
    options = ["--name", "c", "--rows-per-shard", "512", "--workers", "1"]
    options += ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "index")]
    full = subprocess.run(
        [sys.executable, "-c", limited, str(mixed), *options],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert full.returncode == 1
    assert full.stderr == f"error: {tmp_path}/corpus/c/train-00000.tar cannot be written: File too large\n"
    assert run(mixed, *options).returncode == 0
    assert not list(tmp_path.rglob(".*"))


def test_a_file_that_cannot_be_read(folder: Path, tmp_path: Path):
    (folder / "memory.txt").symlink_to("/proc/self/mem")  # a regular file whose first byte gives an I/O error
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"memory\.txt cannot be read: Input/output error"):
            make(folder, tmp_path, workers=workers)


def test_the_command(folder: Path, tmp_path: Path):
    options = ["--name", "mine", "--row-tokens", "16"]
    options += ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "index")]
    done = run(folder, *options, check=True)
    assert "mine_train.index: " in done.stdout and (tmp_path / "corpus/mine/train-00000.tar").is_file()
    mistakes: list[tuple[int, list[str | Path]]] = [
        (1, [folder, *options, "--row-tokens", "8"]),
        (1, [folder, *options, "--workers", "0"]),
        (1, [folder, *options, "--name", "a/b"]),
        (1, [folder, *options, "--tokenizer", "nowhere.json"]),
        (1, [folder, *options, "--index-directory", "gs://bucket/index"]),
        (1, [folder, *options, "--directory", "/proc/nowhere"]),
        (1, [tmp_path / "nowhere", "--verify"]),
        (2, [folder, *options, "--row-tokens", "many"]),
        (2, [folder, *options, "--unknown"]),
        (2, [folder, *options, "--tokenizer", "bytes", "--train-tokenizer", "300"]),
        (2, []),
    ]
    for status, arguments in mistakes:
        bad = run(*arguments)
        assert bad.returncode == status and bad.stdout == ""
        assert bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1
