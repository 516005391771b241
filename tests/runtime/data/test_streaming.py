"""Shards in a bucket: the same batches as from disk, whatever happens on the way, on any number of hosts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import bucket
from tests.runtime.data.test_loader import CONTEXT, VOCAB, loader, write_corpus
from zero.runtime import storage
from zero.runtime.data.cache import Cache
from zero.runtime.data.loader import Loader
from zero.runtime.data.shards import count_rows, read_index
from zero.runtime.errors import UserError

COUNTS = [12, 9, 15, 6, 12, 12]


@pytest.fixture(scope="module")
def corpus(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The index files of one corpus, on disk and in the bucket."""
    place = tmp_path_factory.mktemp("corpus") / "mine"
    write_corpus(place / "shards", COUNTS)
    lines = (place / "shards" / "it.index").read_text().replace("shard-", "../shards/shard-")
    (place / "index").mkdir()
    (place / "index" / "it.index").write_text(lines)
    url = f"gs://{bucket.BUCKET}/corpora/mine"
    with pytest.MonkeyPatch.context() as monkeypatch:
        bucket.use(monkeypatch, server)
        bucket.upload(place, url)
        storage.write(f"{url}/index/absolute.index", lines.replace("..", url).encode())
        storage.write(f"{url}/index/uncounted.index", lines.replace(" rows", "").encode())
    yield place / "index" / "it.index", f"{url}/index/it.index"


def tokens(data: Loader, cursor: dict[str, int] | None = None) -> list[list[list[int]]]:
    return [batch.tokens.tolist() for batch in data.batches(cursor)]


@pytest.mark.parametrize("name", ["it", "absolute", "uncounted"])
def test_a_bucket_gives_the_same_batches(server: str, corpus, monkeypatch: pytest.MonkeyPatch, name: str):
    bucket.use(monkeypatch, server)
    here, there = corpus
    there = there.replace("it.index", f"{name}.index")
    assert tokens(loader(there, max_epochs=2)) == tokens(loader(here, max_epochs=2))
    cursor = next(loader(here).batches()).cursor  # a corpus that moved to a bucket is the same corpus
    assert next(loader(there).batches(cursor)).cursor["batches"] == 2


def test_faults_are_named_as_on_disk(server: str, corpus, monkeypatch: pytest.MonkeyPatch):
    bucket.use(monkeypatch, server)
    place = f"gs://{bucket.BUCKET}/bad"
    with pytest.raises(UserError, match=r"^index file gs://bucket/bad/none\.index: no such file"):
        loader(f"{place}/none.index")
    storage.write(f"{place}/it.index", b"a.tar # 3 rows\n")
    with pytest.raises(
        UserError, match=r"^index file gs://bucket/bad/it\.index: shard gs://bucket/bad/a\.tar is missing"
    ):
        loader(f"{place}/it.index")
    shard = storage.read_bytes(storage.parent(storage.parent(corpus[1])) + "/shards/shard-3.tar")
    storage.write(f"{place}/a.tar", shard[:1200])
    with pytest.raises(UserError, match=r"^shard gs://bucket/bad/a\.tar is truncated or damaged: it ends too early$"):
        list(loader(f"{place}/it.index", max_epochs=1, global_rows=3).batches())
    with pytest.raises(UserError, match="truncated or damaged"):
        count_rows(f"{place}/a.tar")
    storage.write(f"{place}/it.index", b"s3://other/a.tar # 3 rows\n")
    with pytest.raises(UserError, match=r"it\.index: shard s3://other/a\.tar: expected a local path or gs://"):
        read_index(f"{place}/it.index")
    storage.write(f"{place}/it.index", b"b.tar # 6 rows\n")
    storage.write(f"{place}/b.tar", shard)
    data = loader(f"{place}/it.index", max_epochs=1)
    storage.remove(f"{place}/b.tar")
    with pytest.raises(UserError, match=r"^shard gs://bucket/bad/b\.tar is missing$"):
        list(data.batches())


def test_a_network_that_fails_is_never_skipped(server: str, corpus, monkeypatch: pytest.MonkeyPatch):
    """What another host might have read may not be missing here."""
    bucket.use(monkeypatch, server)
    data = loader(corpus[1], max_epochs=1, skip_bad=True)
    with bucket.disturbed(bucket.Proxy(server, budget=10**6, faults=("503",))) as address:
        bucket.use(monkeypatch, address)
        with pytest.raises(UserError, match=r"^gs://bucket/corpora/mine/shards/shard-.\.tar: no answer within"):
            list(data.batches())


def test_a_storm_changes_nothing(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every sample once, in the order that a quiet day gives, although about every second request goes wrong."""
    index = write_corpus(tmp_path / "storm", [24] * 90)
    url = f"gs://{bucket.BUCKET}/storm"
    bucket.use(monkeypatch, server)
    bucket.upload(tmp_path / "storm", url)
    monkeypatch.setattr(storage, "CHUNK", 4096)
    monkeypatch.setattr(storage, "GARBLED_ATTEMPTS", 20)  # every eighth read at worst, and some ten reads a shard
    quiet = tokens(loader(index, max_epochs=1, global_rows=8))
    proxy = bucket.Proxy(server, budget=200, rate=0.4)
    with bucket.disturbed(proxy) as address:
        bucket.use(monkeypatch, address)
        stormy = tokens(loader(f"{url}/it.index", max_epochs=1, global_rows=8))
    assert proxy.injected.total() == 200 and set(proxy.injected) == {*bucket.REFUSALS, *bucket.BODY_FAULTS}
    assert stormy == quiet
    assert sorted(row[0] for rows in stormy for row in rows) == list(range(24 * 90))


# ---- the cache -------------------------------------------------------------------------------------------------------


def files(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir() if path.name != ".lock"}


def test_a_cache_is_read_in_place_of_the_bucket(server: str, corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bucket.use(monkeypatch, server)
    cache = Cache(tmp_path, 10**9)
    quiet = tokens(loader(corpus[0], max_epochs=3))
    assert tokens(loader(corpus[1], max_epochs=3, cache=cache)) == quiet
    assert sorted(files(tmp_path).values()) == sorted(os.path.getsize(shard.path) for shard in read_index(corpus[0]))
    proxy = bucket.Proxy(server, budget=10**6, faults=bucket.BODY_FAULTS)  # no read would ever come through
    with bucket.disturbed(proxy) as address:
        bucket.use(monkeypatch, address)
        data = loader(corpus[0], max_epochs=3)
        for one, _ in data.corpora[0].shards:
            object.__setattr__(one, "path", corpus[1].replace("index/it.index", f"shards/{Path(one.path).name}"))
        object.__setattr__(data.corpora[0], "cache", cache)
        assert tokens(data) == quiet
    assert not proxy.injected


def test_a_cache_holds_no_more_than_its_limit(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bucket.use(monkeypatch, server)
    urls = [f"gs://{bucket.BUCKET}/cached/{number}" for number in range(5)]
    for number, url in enumerate(urls):
        storage.write(url, bytes([number]) * 1000)
    cache = Cache(tmp_path, 3500)

    def read(number: int) -> None:
        with cache.reading(urls[number]) as stream:
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
    with cache.reading(urls[0]) as stream:
        assert stream.read() == b"new" * 300
    storage.write(f"gs://{bucket.BUCKET}/cached/large", bytes(4000))
    with cache.reading(f"gs://{bucket.BUCKET}/cached/large") as stream:
        assert stream.read() == bytes(4000)
    assert sum(files(tmp_path).values()) <= 3500 and 4000 not in files(tmp_path).values()


def test_a_cache_keeps_nothing_that_came_garbled(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bucket.use(monkeypatch, server)
    url = f"gs://{bucket.BUCKET}/garbled"
    storage.write(url, b"right" * 100)
    cache = Cache(tmp_path, 10**6)
    with bucket.disturbed(bucket.Proxy(server, budget=1, faults=("wrong bytes",))) as address:
        bucket.use(monkeypatch, address)
        with pytest.raises(storage.Garbled), cache.reading(url) as stream:
            stream.read()
        assert files(tmp_path) == {}
        assert storage.read(url, lambda stream: stream.read(), cache.reading) == b"right" * 100
    assert list(files(tmp_path).values()) == [500]


READ_SLOWLY = """
import sys, time
from pathlib import Path
from zero.runtime.data.cache import Cache
with Cache(Path(sys.argv[1]), 10**6).reading(sys.argv[2]) as stream:
    stream.read(10)
    print("reading", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_no_half_file_that_counts(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bucket.use(monkeypatch, server)
    url = f"gs://{bucket.BUCKET}/killed"
    storage.write(url, b"whole" * 100)
    process = subprocess.Popen(
        [sys.executable, "-c", READ_SLOWLY, str(tmp_path), url], stdout=subprocess.PIPE, env={**os.environ}
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"reading\n"
        (part,) = files(tmp_path)
        with Cache(tmp_path, 700).reading(url) as stream:  # 500 of these are the other's, who lives
            assert list(files(tmp_path)) == [part]
            assert stream.read() == b"whole" * 100
        assert list(files(tmp_path)) == [part]
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    with Cache(tmp_path, 700).reading(url) as stream:
        assert stream.read() == b"whole" * 100
    assert list(files(tmp_path).values()) == [500] and part not in files(tmp_path)


def test_processes_share_a_cache(server: str, corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two at once, with room for a part of the corpus: both read everything, and the limit holds afterwards."""
    bucket.use(monkeypatch, server)
    limit = 25_000
    code = (
        "import sys, json; from pathlib import Path; from zero.runtime.data.cache import Cache; "
        "from zero.runtime.data.loader import Loader; "
        f"data = Loader(sys.argv[1], global_rows=4, context={CONTEXT}, vocab_size={VOCAB}, max_epochs=5, "
        f"cache=Cache(Path(sys.argv[2]), {limit}), seed=int(sys.argv[3])); "
        "print(json.dumps([batch.tokens.tolist() for batch in data.batches()]))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, corpus[1], str(tmp_path), str(seed)], stdout=subprocess.PIPE, text=True
        )
        for seed in (1, 2)
    ]
    try:
        outputs = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for seed, output in zip((1, 2), outputs, strict=True):
        assert output == tokens(loader(corpus[0], max_epochs=5, seed=seed))
    assert 0 < sum(files(tmp_path).values()) <= limit
    assert not [name for name in files(tmp_path) if name.startswith(".part-")]


# ---- hosts -----------------------------------------------------------------------------------------------------------


class Hosts:
    """Processes that each build their loader, as hosts do; they take orders as lines of JSON."""

    CODE = """
import json, sys
from itertools import islice
from zero.runtime.data.loader import Loader
for line in sys.stdin:
    order = json.loads(line)
    batches = list(islice(Loader(**order["loader"]).batches(order["cursor"]), order["count"]))
    print(json.dumps([[batch.tokens.tolist(), batch.cursor] for batch in batches]), flush=True)
"""

    def __init__(self, count: int) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", self.CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(count)
        ]

    def batches(self, hosts: int, cursor: Any, count: int, **options: Any) -> tuple[np.ndarray, list[Any]]:
        """(count, B, T) global batches, put together from the parts of so many hosts, and the cursor after each."""
        workers = self.processes[:hosts]
        for host, process in enumerate(workers):
            order = {"loader": {**options, "host": host, "hosts": hosts}, "cursor": cursor, "count": count}
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for process in workers if process.stdout is not None]
        parts = [np.array([tokens for tokens, _ in answer]) for answer in answers]
        cursors = [[cursor for _, cursor in answer] for answer in answers]
        assert all(one == cursors[0] for one in cursors)
        return np.concatenate(parts, axis=1), cursors[0]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def hosts(server: str) -> Iterator[Hosts]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        bucket.use(monkeypatch, server)
        hosts = Hosts(4)
    yield hosts
    hosts.close()


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    legs=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 12)), min_size=2, max_size=4),
    is_mixture=st.booleans(),
    window=st.sampled_from([1, 3, 16]),
)
def test_hosts_go_on_from_each_others_cursors(corpus, hosts: Hosts, legs, is_mixture: bool, window: int):
    """A run that changes its number of hosts at every resume has the batches of one that never stopped."""
    index: Any = {str(corpus[0]): 0.75, corpus[1].replace("it.", "absolute."): 0.25} if is_mixture else corpus[1]
    options = {"index": index, "global_rows": 8, "context": CONTEXT, "vocab_size": VOCAB, "window": window}
    whole, _ = hosts.batches(1, None, sum(count for _, count in legs), **options)
    cursor, came = None, []
    for number, count in legs:
        batches, cursors = hosts.batches(number, cursor, count, **options)
        came.append(batches)
        cursor = cursors[-1]
    np.testing.assert_array_equal(np.concatenate(came), whole)
