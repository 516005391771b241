"""What `mode=evaluate` looks up of its index files in buckets."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.growth import CountedBucket
from zero.corpus.text.tokenizers import load_tokenizer
from zero.files.storage.stores import STORES
from zero.hosts import agreement
from zero.inference.index_keys import check_tokenizer, contents_of_sets

pytestmark = pytest.mark.quick


def test_one_host_looks_up_for_all(monkeypatch: pytest.MonkeyPatch):
    """The other hosts read the index files, and list no folder."""
    shards = [f"gs://bucket/corpus/{number}/0.tar" for number in range(5)]
    lines = "".join(f"{shard} # 2 rows\n" for shard in shards)
    bucket = CountedBucket(dict.fromkeys(shards, b"") | {"gs://bucket/a.index": lines.encode()})
    monkeypatch.setitem(STORES, "gs", bucket)
    answers: dict[str, Any] = {}

    def first(name: str, look: Callable[[], Any], /) -> Any:
        answers[name] = look()
        return answers[name]

    found = []
    requests = []
    for on_host_0 in (first, lambda name, look: answers[name]):
        monkeypatch.setattr(agreement, "on_host_0", on_host_0)
        bucket.requests.clear()
        found.append(contents_of_sets({"": "gs://bucket/a.index"}))
        check_tokenizer({"": "gs://bucket/a.index"}, load_tokenizer("bytes"))
        requests.append(dict(bucket.requests))
    assert found[0] == found[1] and found[0][""][0] == 10
    assert requests[0]["list"] == 3 * len(shards)
    assert "list" not in requests[1]
