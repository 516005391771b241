"""Interrupted, killed, or out of disk: the next call makes the missing parts, and no index lists a missing shard."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import bucket, s3
from tests.helpers.corpora import COMMAND, REPOSITORY, both, call, digest, make
from zero.base.errors import Unavailable, UserError
from zero.corpus.format.index_files import read_index
from zero.corpus.preparing import documents
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import prepare
from zero.corpus.preparing.verify import verify
from zero.corpus.text.tokenizers import ByteTokenizer, FileTokenizer, load_tokenizer
from zero.files import storage


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
    rows_of=st.sampled_from([{}, {"one_document_per_row": True}, {"pack": "best-fit"}]),
    part_bytes=st.sampled_from([150, 600, 1 << 30]),
    stops=st.lists(st.integers(0, 50), max_size=4),
)
def test_interrupted_anywhere_and_called_again(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    unit: int,
    rows_per_member: int,
    members: int,
    rows_of: dict[str, Any],
    part_bytes: int,
    stops: list[int],
):
    root = tmp_path_factory.mktemp("stops")
    lines = [json.dumps({"text": f"{i}" + "x" * size}) for i, size in enumerate(sizes)]
    (root / "lines.jsonl").write_text("\n".join(lines))
    options: dict[str, Any] = {
        "row_tokens": 8,
        "rows_per_member": rows_per_member,
        "rows_per_shard": rows_per_member * members,
        "validation_fraction": 0.3,
        "part_bytes": part_bytes,
        "workers": 1,
        **rows_of,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "UNIT_BYTES", unit)
        try:
            whole = make(root / "lines.jsonl", root / "whole", **options)
        except UserError as error:  # a corpus of many parts chooses no document of its own for validation
            assert "too little text to set documents aside" in str(error)
            return
        for at in stops:
            try:
                make(root / "lines.jsonl", root / "parts", **options, tokenizer=Stopping(at))
            except KeyboardInterrupt:
                assert not (root / "parts" / "index").exists()
        parts = make(root / "lines.jsonl", root / "parts", **options)
    assert parts.train == whole.train and parts.validation == whole.validation
    assert digest(root / "parts") == digest(root / "whole")


def made_parts(place: Path) -> dict[Path, int]:
    """The files of finished parts, and the times at which they were written."""
    files = []
    for manifest in place.glob("part-*.json"):
        files += [manifest, *recorded_shards(manifest)]
    return {path: path.stat().st_mtime_ns for path in files}


def test_second_call_completes(tmp_path: Path):
    """A second call tokenizes only the parts that are missing."""
    lines = [json.dumps({"text": f"{i:3} and more"}) for i in range(400)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    options: dict[str, Any] = {"workers": 1, "part_bytes": 1000}
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "lines.jsonl", tmp_path, tokenizer=Stopping(350), **options)
    place = tmp_path / "corpus" / "c"
    finished = made_parts(place)
    assert len(finished) > 20 and not (place / "manifest.json").exists()
    rest = Stopping()
    make(tmp_path / "lines.jsonl", tmp_path, tokenizer=rest, **options)
    assert 50 <= rest.calls < 100  # of 400: the rest, and the documents of a part
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


def test_changed_source_under_half_corpus(tmp_path: Path):
    """A source that changed under half a corpus is noticed; parts of other files are kept."""
    root = tmp_path / "texts"
    root.mkdir()
    for name in "abcd":
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{i:3}"}) + "\n" for i in range(100)))
    options: dict[str, Any] = {"workers": 1, "part_bytes": 2000}
    with pytest.raises(KeyboardInterrupt):
        make(root, tmp_path, tokenizer=Stopping(350), **options)
    finished = made_parts(tmp_path / "corpus" / "c")
    path = root / "b.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))  # of the same size
    message = r"part 1 \(.*texts: b.jsonl\): corpus .*part-00001.json was prepared when .*texts had other contents"
    with pytest.raises(UserError, match=message):
        make(root, tmp_path, **options)
    assert len(both(make(root, tmp_path, overwrite=True, **options))) == 400
    kept = [path for path, time in finished.items() if path.stat().st_mtime_ns == time]
    assert {path.name[:10] for path in kept} == {"part-00000", "part-00002"}


KILLED = """
import json, os, signal, sys
from pathlib import Path
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import prepare
from zero.corpus.text.tokenizers import ByteTokenizer

os.fsync = lambda _: None  # as in conftest.py

def run(source, place, fatal, part_bytes, options):
    calls = 0
    def count(event, arguments):
        nonlocal calls
        if event in ("os.rename", "os.remove"):
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
    sys.addaudithook(count)
    chosen = CorpusOptions(ByteTokenizer(), rows_per_member=4, rows_per_shard=8, **options)
    how = {"overwrite": True, "part_bytes": part_bytes, "workers": 1}
    prepare(source, "c", chosen, directory=Path(place, "corpus"), index_directory=Path(place, "index"), **how)
    print("events", calls, flush=True)

for line in sys.stdin:  # a process for each, without importing everything again
    if (child := os.fork()) == 0:
        run(*json.loads(line))
        os._exit(0)
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def printed_by(orders: list[str], word: str) -> list[int]:
    """What `KILLED`, one process that runs one order after the other, prints behind this word.

    `status` is the exit status of each order; `events` the renamings and removals of each that was not killed.
    """
    done = subprocess.run(
        [sys.executable, "-B", "-c", KILLED],  # a compiled module would be a renaming too
        input="\n".join(orders),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith(word)]


def test_killed_prepare_leaves_no_index(folder: Path, tmp_path: Path):
    """A killed prepare leaves no index of missing shards.

    Killed by itself at the n-th renaming or removing of a file, for several n, with and without another corpus.
    """
    cases = [(0, False), (3, False), (32, False), (1000, False), (1, True), (20, True), (59, True), (1000, True)]
    runs: list[tuple[int, bool, dict[str, Any]]] = [(*case, {"row_tokens": 32}) for case in cases]
    runs += [(32, False, {"row_tokens": 32, "pack": "best-fit"})]
    part_bytes = 1500
    for options in (runs[0][2], runs[-1][2]):
        make(folder, tmp_path / f"whole{len(options)}", **options, part_bytes=part_bytes, workers=1)
    places = [tmp_path / f"killed{number}" for number in range(len(runs))]
    for number, (_, replaces, _) in enumerate(runs):
        if replaces:  # a corpus of one part, or of others
            make(folder, places[number], workers=1, part_bytes=(1 << 30) if number % 2 else part_bytes)
    orders = [
        json.dumps([str(folder), str(place), fatal, part_bytes, options])
        for place, (fatal, _, options) in zip(places, runs, strict=True)
    ]
    statuses = printed_by(orders, "status")
    assert set(statuses) == {0, -signal.SIGKILL} and 2 <= statuses.count(0) <= 3
    for place, (fatal, replaces, options) in zip(places, runs, strict=True):
        for index in (place / "index").glob("*.index"):
            read_index(index)  # raises if a shard is missing
        finished = made_parts(place / "corpus/c")
        make(folder, place, **options, overwrite=True, part_bytes=part_bytes, workers=1)
        assert digest(place) == digest(tmp_path / f"whole{len(options)}")  # and no temporary file is left
        assert fatal < 32 or replaces or len(finished) > 3
        if not replaces:
            assert {path: path.stat().st_mtime_ns for path in finished} == finished


TENTHS = range(11)  # of all renamings and removals; the first parts are written in the middle
NEVER = 1 << 30
ALL_PARTS: dict[str, Any] = {"deduplicate": True, "near_duplicates": 0.8, "shuffle": True, "row_tokens": 32}


@pytest.mark.parametrize(
    "tenths", [pytest.param(TENTHS[::5], marks=pytest.mark.wide), pytest.param(TENTHS, marks=pytest.mark.slow)]
)
def test_killed_within_passes_over_all_parts(folder: Path, tmp_path: Path, tenths: range):
    """Killed with -9 after each of these shares of the renamings and removals of files; called again, equal."""
    part_bytes = 1500

    def order(place: Path, fatal: int) -> str:
        return json.dumps([str(folder), str(place), fatal, part_bytes, ALL_PARTS])

    [events] = printed_by([order(tmp_path / "whole", NEVER)], "events")
    instants = [tenth * (events - 1) // 10 for tenth in tenths]
    orders = [order(tmp_path / str(at), at) for at in instants]
    assert printed_by(orders, "status") == [-signal.SIGKILL] * len(instants)
    parts_left = []
    for at in instants:
        place = tmp_path / str(at)
        finished = made_parts(place / "corpus/c")
        make(folder, place, **ALL_PARTS, part_bytes=part_bytes, workers=1)
        assert digest(place) == digest(tmp_path / "whole")
        assert {path: path.stat().st_mtime_ns for path in finished} == finished
        parts_left.append(len(finished))
    assert parts_left[0] == 0 < parts_left[-1]  # in the passes, and in the parts or behind them


def recorded_shards(manifest: Path) -> list[Path]:
    """The shards in the manifest of a part, or of a corpus of one part."""
    recorded = json.loads(manifest.read_text())
    return [manifest.parent / shard["name"] for split in ("train", "validation") for shard in recorded[split]["shards"]]


@pytest.mark.wide  # killed amid its files it is continued above
def test_killed_with_its_workers(mixed: Path, tmp_path: Path, bpe: Path):
    """A prepare that is killed in the middle is completed by a second call.

    kill -9 from outside: the workers go too, and a second call finishes what is missing alone.
    """
    options = ["--name", "c", "--tokenizer", str(bpe), "--row-tokens", "256", "--rows-per-member", "8"]
    options += ["--rows-per-shard", "64", "--part-bytes", "700000", "--workers", "2"]

    def places(place: Path) -> list[str]:
        return ["--directory", str(place / "corpus"), "--index-directory", str(place / "index")]

    assert call(mixed, *options[:-1], "1", *places(tmp_path / "whole")).returncode == 0
    place = tmp_path / "killed"
    process = subprocess.Popen(
        [*COMMAND, str(mixed), *map(str, options), *places(place)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
    )
    wait(lambda: len(list((place / "corpus/c").glob("part-*.json"))) > 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert len(children) >= 2
    wait(lambda: not any(is_running(child) for child in children))
    finished = made_parts(place / "corpus/c")
    assert 5 < len(finished) < len(made_parts(tmp_path / "whole/corpus/c"))
    assert not (place / "index").exists()
    assert call(mixed, *options[:-1], "1", *places(place)).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert digest(place) == digest(tmp_path / "whole")


class Killed(ByteTokenizer):
    """One that the kernel kills, as where memory runs out."""

    def encode(self, text: str) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_killed_worker_is_temporary(folder: Path, tmp_path: Path):
    """A killed worker is an error that a repeat may mend."""
    with pytest.raises(Unavailable, match=r"a worker process was killed.*fewer --workers"):
        make(folder, tmp_path, tokenizer=Killed(), workers=2)


@pytest.mark.wide
def test_killed_worker_of_a_part_is_temporary(folder: Path, tmp_path: Path):
    """It was started again; test_part.py has the processes of parts."""
    message = r"part [01] \(.*: its process was killed by signal 9, 3 times.*fewer --workers"
    with pytest.raises(Unavailable, match=message):
        make(folder, tmp_path, tokenizer=Killed(), workers=2, part_bytes=6000)


def test_ctrl_c_is_one_line(mixed: Path, tmp_path: Path, bpe: Path):
    """At a time when the workers are about to start; it reaches them as well."""
    source = tmp_path / "source"  # of which there is enough for more than a moment
    source.mkdir()
    for copy in range(12):
        shutil.copy(mixed / "x.jsonl", source / f"{copy}.jsonl")
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
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # inherited; a script's background ignores it
    try:
        process = subprocess.Popen(
            [*COMMAND, str(source), *options],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait(lambda: len(children.read_text().split()) == 3)  # multiprocessing has a process of its own
    time.sleep(0.05)  # they import
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=900)
    assert process.returncode == 1 and said == "stopped; the same command continues\n"


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait(condition: Callable[[], bool], seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_bucket_gets_the_same_bytes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Interrupted and called again, shards and index in a bucket, or only the shards."""
    options: dict[str, Any] = {"row_tokens": 8, "rows_per_member": 2, "rows_per_shard": 4, "tokenizer": 300}
    chosen = CorpusOptions(**options)
    encode, calls = FileTokenizer.encode, itertools.count()

    def stopping(tokenizer: FileTokenizer, text: str) -> np.ndarray:
        if next(calls) == 25:
            raise KeyboardInterrupt
        return encode(tokenizer, text)

    monkeypatch.setattr(documents, "UNIT_BYTES", 200)
    local = make(folder, tmp_path, **options)
    with bucket.serving() as address:
        bucket.use(monkeypatch, address)
        place = f"gs://{bucket.BUCKET}/corpora"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(FileTokenizer, "encode", stopping)
            prepare(folder, "c", chosen, directory=place, index_directory=f"gs://{bucket.BUCKET}/index")
        half = storage.list_files(place)
        assert 3 < len(half) < local.train.shards
        corpus = prepare(folder, "c", chosen, directory=place, index_directory=f"gs://{bucket.BUCKET}/index")
        assert (corpus.train, corpus.validation) == (local.train, local.validation)
        for path in Path(local.directory).iterdir():
            assert storage.read_bytes(f"{place}/c/{path.name}") == path.read_bytes(), path.name
        first = storage.read_bytes(corpus.train_index).decode().split("\n")[1]
        assert first == "../corpora/c/train-00000.tar # 4 rows"
        tokenizer = load_tokenizer(f"{place}/c/tokenizer.json")
        assert verify(corpus.train_index, tokenizer) == []

        away = prepare(folder, "c", chosen, directory=place, index_directory=tmp_path / "away")
        first = Path(away.train_index).read_text().split("\n")[1]
        assert first == f"{place}/c/train-00000.tar # 4 rows"
        storage.remove(f"{place}/c/train-00001.tar")
        assert verify(away.train_index) == [f"{place}/c/train-00001.tar is missing"]


KILLED_UPLOAD = """
import itertools, os, signal
from zero.corpus.preparing.zero_prepare import main
from zero.files.storage.fsspec_store import FsspecStore
write, calls = FsspecStore.write, itertools.count()
def dying(store, url, data):
    if next(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    write(store, url, data)
FsspecStore.write = dying
main()
"""


@pytest.mark.wide  # test_a_bucket_gets_the_same_bytes is interrupted there
def test_killed_on_the_way_to_s3(folder: Path, tmp_path: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch):
    """From s3:// to s3://, killed between two shards and called again: the bytes of a preparation on disk."""
    options = ["--name", "c", "--row-tokens", "2", "--rows-per-shard", "256", "--tokenizer", "bytes", "--workers", "1"]
    near = ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "corpus" / "index")]
    root = f"s3://{s3.BUCKET}/killed"
    far = ["--directory", f"{root}/corpus", "--index-directory", f"{root}/corpus/index"]
    s3.use(monkeypatch, s3_server)
    bucket.upload(folder, f"{root}/source")
    command = [sys.executable, "-c", KILLED_UPLOAD, f"{root}/source", *far, *options]
    killed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    half = storage.list_files(f"{root}/corpus")
    assert len(half) > 2 and not [url for url in half if url.endswith(".index")]
    for source, places in ((f"{root}/source", far), (folder, near)):
        done = call(source, *places, *options)
        assert done.returncode == 0, done.stderr
    urls = storage.list_files(f"{root}/corpus")
    assert len(half) < len(urls) == len(storage.list_files(tmp_path / "corpus"))
    for url in urls:
        data = (tmp_path / url.removeprefix(f"{root}/")).read_bytes()
        if url.endswith(("manifest.json", "report.html")):
            data = data.replace(str(folder).encode(), f"{root}/source".encode())
        if url.endswith("manifest.json"):
            stated = json.loads(storage.read_bytes(url))["source_contents"]  # by the bucket; on disk it is of the bytes
            data = data.replace(json.loads(data)["source_contents"].encode(), stated.encode())
        assert storage.read_bytes(url) == data, url


def test_full_disk_is_one_line(mixed: Path, tmp_path: Path):
    """A full disk is reported in one line, and the next call continues."""
    limited = """
import resource
from zero.corpus.preparing.zero_prepare import main
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # of a file, in bytes: to the program, a full disk
main()
"""
    options = ["--name", "c", "--rows-per-shard", "512", "--workers", "1"]
    options += ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "index")]
    command = [sys.executable, "-c", limited, str(mixed), *options]
    full = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert full.returncode == 1
    assert full.stderr == f"error: {tmp_path}/corpus/c/train-00000.tar cannot be written: File too large\n"
    assert call(mixed, *options).returncode == 0
    assert not list(tmp_path.rglob(".*"))
