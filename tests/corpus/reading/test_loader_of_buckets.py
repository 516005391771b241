"""Shards in a bucket: the same batches as from disk, whatever the network does, on any number of hosts."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import bucket, s3
from tests.helpers.shards import loader, tokens_of, write_corpus
from zero.base.errors import UserError
from zero.corpus.format.index_files import read_index
from zero.corpus.format.shards import count_rows
from zero.files import storage
from zero.files.storage import files

USE = {"gs": bucket.use, "s3": s3.use}


@pytest.mark.parametrize("name", ["it", "absolute", "uncounted"])
def test_a_bucket_gives_the_same_batches(server: str, bucket_corpus, monkeypatch: pytest.MonkeyPatch, name: str):
    bucket.use(monkeypatch, server)
    here, there = bucket_corpus
    there = there.replace("it.index", f"{name}.index")
    assert tokens_of(loader(there, max_epochs=2)) == tokens_of(loader(here, max_epochs=2))
    cursor = next(loader(here).batches()).cursor  # a corpus that moved to a bucket is the same corpus
    assert next(loader(there).batches(cursor)).cursor["batches"] == 2


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
    with pytest.raises(UserError, match=r"it\.index: shard ftp://other/a\.tar: expected a local path or gs://"):
        read_index(f"{place}/it.index")
    storage.write(f"{place}/it.index", b"b.tar # 6 rows\n")
    storage.write(f"{place}/b.tar", shard)
    data = loader(f"{place}/it.index", max_epochs=1)
    storage.remove(f"{place}/b.tar")
    with pytest.raises(UserError, match=r"^shard gs://bucket/bad/b\.tar is missing$"):
        list(data.batches())


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
