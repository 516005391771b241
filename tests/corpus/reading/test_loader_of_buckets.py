"""Shards in a bucket: the same batches as from disk, whatever the network does, on any number of hosts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import bucket, hub, s3
from tests.helpers.shards import loader, tokens_of, write_corpus
from zero.base.errors import UserError
from zero.corpus.format import shards
from zero.corpus.format.index_files import read_index
from zero.corpus.format.one_host import OnOneHost
from zero.corpus.format.shards import count_rows
from zero.files import storage
from zero.files.storage import files, fsspec_store, gcs

USE = {"gs": bucket.use, "s3": s3.use}


@pytest.mark.parametrize("name", ["it", "absolute", "uncounted"])
def test_a_bucket_gives_the_same_batches(server: str, bucket_corpus, monkeypatch: pytest.MonkeyPatch, name: str):
    bucket.use(monkeypatch, server)
    here, there = bucket_corpus
    there = there.replace("it.index", f"{name}.index")
    assert tokens_of(loader(there, max_epochs=2)) == tokens_of(loader(here, max_epochs=2))
    cursor = next(loader(here).batches()).cursor  # a corpus that moved to a bucket is the same corpus
    assert next(loader(there).batches(cursor)).cursor["batches"] == 2


READ = """
import json, sys
from tests.helpers.shards import loader

for batch in loader(sys.argv[1], max_epochs=1).batches():
    print(json.dumps([batch.cursor, batch.tokens.tolist()]), flush=True)
    sys.stdin.readline()
"""


def test_a_corpus_on_the_hub_is_read_again_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of hf:// give the batches of the disk; what follows a killed process follows its last batch."""
    pytest.importorskip("huggingface_hub")
    here = write_corpus(tmp_path / "someone" / "corpus" / "main", [12, 9, 15])
    expected = tokens_of(loader(here, max_epochs=1))
    there = "hf://someone/corpus/it.index"
    with hub.serve(tmp_path) as served:
        hub.point_to(served, tmp_path / "cache", monkeypatch)
        fsspec_store.file_system.cache_clear()
        places = {"HF_ENDPOINT": served.url, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path / "cache")}
        root = Path(__file__).parents[3]
        with subprocess.Popen(
            [sys.executable, "-c", READ, there],
            cwd=root,
            env=os.environ | places,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as reader:
            assert reader.stdin is not None and reader.stdout is not None
            for number in range(4):
                cursor, tokens = json.loads(reader.stdout.readline())
                assert tokens == expected[number]
                reader.stdin.write("\n" if number < 3 else "")
                reader.stdin.flush()
            reader.kill()
        assert tokens_of(loader(there, max_epochs=1), cursor) == expected[4:]
        assert any(path.endswith("shard-2.tar") for path in served.requests)


def test_faults_are_named_as_on_disk(server: str, bucket_corpus, monkeypatch: pytest.MonkeyPatch):
    bucket.use(monkeypatch, server)
    place = f"gs://{bucket.BUCKET}/bad"
    with pytest.raises(UserError, match=r"^index file gs://bucket/bad/none\.index: no such file"):
        loader(f"{place}/none.index")
    storage.write(f"{place}/it.index", b"a.tar # 3 rows\n")
    with pytest.raises(
        UserError, match=r"^index file gs://bucket/bad/it\.index: shard gs://bucket/bad/a\.tar is missing"
    ):
        loader(f"{place}/it.index")
    shard = storage.read_bytes(storage.parent(storage.parent(bucket_corpus[1])) + "/shards/shard-3.tar")
    storage.write(f"{place}/a.tar", shard[:1200])
    with pytest.raises(
        UserError,
        match=r"^shard gs://bucket/bad/a\.tar is truncated or damaged: unexpected end of file; copy it again$",
    ):
        list(loader(f"{place}/it.index", max_epochs=1, global_rows=3).batches())
    with pytest.raises(UserError, match="truncated or damaged"):
        count_rows(f"{place}/a.tar")
    storage.write(f"{place}/it.index", b"ftp://other/a.tar # 3 rows\n")
    with pytest.raises(UserError, match=r"it\.index: ftp://other/a\.tar: expected a local path or gs://"):
        read_index(f"{place}/it.index")
    storage.write(f"{place}/it.index", b"b.tar # 6 rows\n")
    storage.write(f"{place}/b.tar", shard)
    data = loader(f"{place}/it.index", max_epochs=1)
    storage.remove(f"{place}/b.tar")
    with pytest.raises(UserError, match=r"^shard gs://bucket/bad/b\.tar is missing$"):
        list(data.batches())


def test_one_host_looks_up_for_all(server: str, bucket_corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The others list nothing, and know the same; one whose index file lists other shards looks for itself."""
    bucket.use(monkeypatch, server)
    requests: list[str] = []

    def count(name: str) -> None:
        asked = getattr(gcs, name)

        def counted(*arguments: Any) -> Any:
            requests.append(name)
            return asked(*arguments)

        monkeypatch.setattr(gcs, name, counted)

    count("list_stats")
    count("stat")
    answers: dict[str, Any] = {}

    def first(name: str, look: Callable[[], Any], /) -> Any:
        answers[name] = json.loads(json.dumps(look()))
        return answers[name]

    def other(name: str, look: Callable[[], Any], /) -> Any:
        return answers[name]

    def asked_by(on_one_host: OnOneHost, index: str) -> tuple[Any, list[str]]:
        requests.clear()
        return loader(index, on_one_host=on_one_host, crop="all").identity, requests.copy()

    index = bucket_corpus[1]
    of_first, asked = asked_by(first, index)
    assert asked.count("list_stats") == 2  # which shards there are, and their checksums
    of_other, asked = asked_by(other, index)
    assert of_other == of_first and asked == ["stat"]  # of the index file
    uncounted = index.replace("it.index", "uncounted.index")
    of_first, _ = asked_by(first, uncounted)
    with monkeypatch.context() as others:  # which would read every shard whole
        others.setattr(shards, "count_rows", lambda path: pytest.fail(f"{path} is counted again"))
        assert asked_by(other, uncounted) == (of_first, ["stat"])
    of_first, _ = asked_by(first, index)
    lines = storage.read_bytes(index).decode().replace("..", storage.parent(storage.parent(index))).split("\n")
    (tmp_path / "it.index").write_text("\n".join(lines[:-2]))
    answers = {name.replace(index, str(tmp_path / "it.index")): answer for name, answer in answers.items()}
    of_another, asked = asked_by(other, str(tmp_path / "it.index"))
    assert of_another["contents"] != of_first["contents"] and asked.count("list_stats") == 2


def test_failing_network_is_not_skipped(server: str, bucket_corpus, monkeypatch: pytest.MonkeyPatch):
    """A shard that the network fails to deliver is never skipped.

    What another host might have read may not be missing here.
    """
    bucket.use(monkeypatch, server)
    data = loader(bucket_corpus[1], max_epochs=1, skip_bad=True)
    with bucket.disturbed(bucket.Proxy(server, budget=10**6, faults=("503",))) as address:
        bucket.use(monkeypatch, address, deadline=0.3)
        with pytest.raises(UserError, match=r"^gs://bucket/corpora/mine/shards/shard-.\.tar: no answer within"):
            list(data.batches())


@pytest.mark.parametrize(("shards", "faults"), [(15, 32), pytest.param(90, 200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_many_faults_change_nothing(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    shards: int,
    faults: int,
):
    """Every sample once and in the order without faults, although more than every second request fails."""
    index = write_corpus(tmp_path / f"storm{shards}", [24] * shards)
    url = f"{scheme}://{bucket.BUCKET}/storm{shards}"
    server, use = request.getfixturevalue({"gs": "server", "s3": "s3_server"}[scheme]), USE[scheme]
    use(monkeypatch, server)
    bucket.upload(index.parent, url)
    monkeypatch.setattr(files, "CHECKSUM_ATTEMPTS", 20)  # at worst every eighth read
    undisturbed = tokens_of(loader(index, max_epochs=1, global_rows=8))
    proxy = bucket.Proxy(server, budget=faults, rate=0.6)
    with bucket.disturbed(proxy) as address:
        use(monkeypatch, address)
        disturbed = tokens_of(loader(f"{url}/it.index", max_epochs=1, global_rows=8))
    assert proxy.injected.total() == faults and set(proxy.injected) == {*bucket.REFUSALS, *bucket.BODY_FAULTS}
    assert disturbed == undisturbed
    assert sorted(row[0] for rows in disturbed for row in rows) == list(range(24 * shards))


@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(
    legs=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 12)), min_size=2, max_size=4),
    is_mixture=st.booleans(),
    shuffle_shards=st.sampled_from([1, 3, 16]),
)
def test_number_of_hosts_may_change(server, bucket_corpus, legs, is_mixture, shuffle_shards):
    """The number of hosts may change at every resume.

    A run that does so has the batches of one that was never interrupted.
    """
    here, there = bucket_corpus
    index: Any = {str(here): 0.75, there.replace("it.", "absolute."): 0.25} if is_mixture else there
    options: dict[str, Any] = {"global_rows": 8, "shuffle_shards": shuffle_shards}
    with pytest.MonkeyPatch.context() as monkeypatch:
        bucket.use(monkeypatch, server)
        uninterrupted = list(islice(loader(index, **options).batches(), sum(count for _, count in legs)))
        cursor = None
        for hosts, count in legs:
            loaders = [loader(index, **options, host=host, hosts=hosts) for host in range(hosts)]
            for parts in islice(zip(*(one.batches(cursor) for one in loaders), strict=True), count):
                expected = uninterrupted.pop(0)
                np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), expected.tokens)
                assert all(part.cursor == expected.cursor for part in parts)
            cursor = parts[0].cursor
