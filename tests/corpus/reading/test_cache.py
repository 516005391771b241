"""The cache: read in place of the bucket, within its limit, and never trusted without a checksum."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import bucket
from tests.helpers.shards import CONTEXT, VOCAB, loader, tokens_of
from zero.base.errors import UserError
from zero.corpus.format.index_files import read_index
from zero.corpus.reading.cache import ShardCache
from zero.files import storage

LOCK = ".zero-cache.lock"


def files(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir() if path.name != LOCK}


def test_cache_replaces_the_bucket(server: str, bucket_corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cached file is read in place of the bucket."""
    bucket.use(monkeypatch, server)
    cache = ShardCache(tmp_path, 10**9)
    quiet = tokens_of(loader(bucket_corpus[0], max_epochs=3))
    assert tokens_of(loader(bucket_corpus[1], max_epochs=3, cache=cache)) == quiet
    assert sorted(files(tmp_path).values()) == sorted(
        os.path.getsize(shard.path) for shard in read_index(bucket_corpus[0])
    )
    proxy = bucket.Proxy(server, budget=10**6, faults=bucket.BODY_FAULTS)  # no read would ever come through
    with bucket.disturbed(proxy) as address:
        bucket.use(monkeypatch, address)
        data = loader(bucket_corpus[0], max_epochs=3)
        paths = data.corpora[0].shards.paths
        paths[:] = [bucket_corpus[1].replace("index/it.index", f"shards/{Path(path).name}") for path in paths]
        object.__setattr__(data.corpora[0], "cache", cache)
        assert tokens_of(data) == quiet
    assert not proxy.injected


def test_cache_limit(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache holds no more than its limit."""
    bucket.use(monkeypatch, server)
    urls = [f"gs://{bucket.BUCKET}/cached/{number}" for number in range(5)]
    for number, url in enumerate(urls):
        storage.write(url, bytes([number]) * 1000)
    cache = ShardCache(tmp_path, 3500)

    def read(number: int) -> None:
        with cache.open_reader(urls[number]) as stream:
            assert sum(files(tmp_path).values()) <= 3500
            assert stream.read() == bytes([number]) * 1000

    def cached() -> set[int]:
        return {(tmp_path / name).read_bytes()[0] for name in files(tmp_path)}

    for number in (0, 1, 2, 0):
        read(number)
    assert cached() == {0, 1, 2}
    read(3)
    assert cached() == {0, 2, 3}  # 1 was used longest ago
    storage.write(urls[0], b"new" * 300)  # what was overwritten is another object
    with cache.open_reader(urls[0]) as stream:
        assert stream.read() == b"new" * 300
    storage.write(f"gs://{bucket.BUCKET}/cached/large", bytes(4000))
    with cache.open_reader(f"gs://{bucket.BUCKET}/cached/large") as stream:
        assert stream.read() == bytes(4000)
    assert sum(files(tmp_path).values()) <= 3500 and 4000 not in files(tmp_path).values()


def test_cache_leaves_a_tenth_of_the_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is cached already counts as free."""
    monkeypatch.setattr("shutil.disk_usage", lambda directory: SimpleNamespace(free=900))
    (tmp_path / f"{'0' * 64}.zero-cache").write_bytes(bytes(100))
    (tmp_path / "of another program").write_bytes(bytes(100))
    assert ShardCache(tmp_path).limit == 900


def test_cache_deletes_own_files_only(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache deletes only files that it has named itself.

    A directory with files of others: none is changed, none counts towards the limit.
    """
    bucket.use(monkeypatch, server)
    for number in range(3):
        storage.write(f"gs://{bucket.BUCKET}/beside/{number}", bytes([number]) * 1000)
    hexadecimal = "0123456789abcdef" * 4  # as content-addressed stores name their files
    names = (hexadecimal, ".lock", ".part-notes", "thesis.tex", "..zero-cache.lock", f"{hexadecimal}.zero-cache.bak")
    for name in names:
        (tmp_path / name).write_bytes(b"mine" * 1000)
    (tmp_path / "folder").mkdir()
    before = {name: (tmp_path / name).read_bytes() for name in names}
    cache = ShardCache(tmp_path, 1500)
    for number in (0, 1, 2):
        cache.open_reader(f"gs://{bucket.BUCKET}/beside/{number}")
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
    own = files(tmp_path).keys() - {*names, "folder"}
    assert [(tmp_path / name).read_bytes() for name in own] == [bytes([2]) * 1000]


def test_damaged_downloads_are_not_cached(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache keeps nothing that came damaged."""
    bucket.use(monkeypatch, server)
    url = f"gs://{bucket.BUCKET}/damaged"
    storage.write(url, b"right" * 100)
    cache = ShardCache(tmp_path, 10**6)
    with bucket.disturbed(bucket.Proxy(server, budget=1, faults=("wrong bytes",))) as address:
        bucket.use(monkeypatch, address)
        assert cache.open_reader(url).read() == b"right" * 100
    assert [path.read_bytes() for path in tmp_path.iterdir() if path.name != LOCK] == [b"right" * 100]


def test_cached_files_are_verified(server: str, tmp_path: Path, monkeypatch, caplog):
    """A cached file is verified at every read.

    What a disk has damaged, or cut, is fetched again; nobody sees its bytes.
    """
    bucket.use(monkeypatch, server)
    url, data = f"gs://{bucket.BUCKET}/verified", b"right" * 100
    storage.write(url, data)
    cache = ShardCache(tmp_path, 10**6)
    cache.open_reader(url)
    (name,) = files(tmp_path)
    path = tmp_path / name
    for damaged in (b"wrong" * 100, data[:-1], b"", data[:-5] + b"wrong"):
        path.write_bytes(damaged)
        assert cache.open_reader(url).read() == data
        assert f"{path}: crc32c is" in caplog.text and path.read_bytes() == data
        caplog.clear()

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:  # a disk that cannot read the file any more
        patch.setattr(Path, "read_bytes", fail)
        assert cache.open_reader(url).read() == data
    assert f"{path}: Input/output error" in caplog.text


def test_a_damaged_cache_changes_no_batch(server: str, bucket_corpus, tmp_path: Path, monkeypatch):
    bucket.use(monkeypatch, server)
    cache = ShardCache(tmp_path, 10**9)
    undamaged = tokens_of(loader(bucket_corpus[1], max_epochs=1, cache=cache))
    for name in files(tmp_path):
        data = bytearray((tmp_path / name).read_bytes())
        data[642] ^= 4  # a token of the first row
        (tmp_path / name).write_bytes(data)
    assert tokens_of(loader(bucket_corpus[1], max_epochs=1, cache=cache)) == undamaged


def test_full_disk_is_logged_once(server: str, tmp_path: Path, monkeypatch, caplog):
    """A full disk is logged once, and the bucket is read."""
    bucket.use(monkeypatch, server)
    url = f"gs://{bucket.BUCKET}/full"
    storage.write(url, b"right" * 100)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for function in ("write_bytes", "replace"):
        caplog.clear()
        with monkeypatch.context() as patch:
            cache = ShardCache(tmp_path, 10**6)
            patch.setattr(Path, function, full)
            for _ in range(2):
                assert cache.open_reader(url).read() == b"right" * 100
        assert caplog.text.count("No space left on device") == 1 and files(tmp_path) == {}
    with pytest.raises(UserError, match=r"data\.cache_directory=/proc/nowhere"):
        ShardCache(Path("/proc/nowhere"), 10**6)


WRITE_SLOWLY = """
import sys, time
from pathlib import Path
from zero.corpus.reading.cache import ShardCache
def wait(part, target):
    print("written", flush=True)
    time.sleep(60)
Path.replace = wait
ShardCache(Path(sys.argv[1]), 10**6).open_reader(sys.argv[2])
"""


def test_killed_process_leaves_no_half_file(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A half-written file of a killed process does not count."""
    bucket.use(monkeypatch, server)
    url = f"gs://{bucket.BUCKET}/killed"
    storage.write(url, b"whole" * 100)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_SLOWLY, str(tmp_path), url], stdout=subprocess.PIPE, env={**os.environ}
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        assert files(tmp_path) == {".zero-cache.part": 500}
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert ShardCache(tmp_path, 700).open_reader(url).read() == b"whole" * 100
    assert list(files(tmp_path).values()) == [500] and ".zero-cache.part" not in files(tmp_path)


def test_processes_share_a_cache(server: str, bucket_corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two at once, with room for a part of the corpus: both read everything, and the limit holds afterwards."""
    bucket.use(monkeypatch, server)
    limit = 25_000
    code = (
        "import sys, json; from pathlib import Path; from zero.corpus.reading.cache import ShardCache; "
        "from tests.helpers.loaders import open_loader; "
        f"data = open_loader(sys.argv[1], global_rows=4, context={CONTEXT}, vocab_size={VOCAB}, max_epochs=2, "
        f"cache=ShardCache(Path(sys.argv[2]), {limit}), seed=1); print(flush=True); "
        "print(json.dumps([batch.tokens.tolist() for batch in data.batches()]))"
    )
    command = [sys.executable, "-c", code, bucket_corpus[1], str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has started and reads now
        own = tokens_of(loader(bucket_corpus[1], max_epochs=2, seed=2, cache=ShardCache(tmp_path, limit)))
        other = json.loads(process.stdout.readline())
    for seed, found in ((1, other), (2, own)):
        assert found == tokens_of(loader(bucket_corpus[0], max_epochs=2, seed=seed))
    assert 0 < sum(files(tmp_path).values()) <= limit
    assert not [name for name in files(tmp_path) if name.endswith(".part")]
