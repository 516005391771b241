"""S3, Azure and the hub through fsspec: broken connections, wrong bytes, replaced objects, missing libraries."""

import sys
from pathlib import Path

import pytest
from fsspec.registry import _registry

from tests.helpers import azure, bucket, hosts, hub, s3
from zero.base.errors import Unavailable, UserError
from zero.corpus.reading.cache import ShardCache
from zero.files import storage
from zero.files.storage import AccessDenied, NoSuchBucket, fsspec_store
from zero.files.storage.stores import S3

DATA = bytes(range(256)) * 400
URL = f"s3://{s3.BUCKET}/stores/data"


@pytest.fixture
def stored(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a server with `DATA` at `URL`, which is read in three ranges."""
    s3.use(monkeypatch, s3_server)
    monkeypatch.setattr(fsspec_store, "RANGE", 40_000)
    storage.write(URL, DATA)
    return s3_server


@pytest.mark.parametrize(
    "fault",  # uploads below meet every refusal
    [
        *(pytest.param(status, marks=pytest.mark.slow) for status in bucket.REFUSALS[:-1]),
        *bucket.REFUSALS[-1:],
        *bucket.BODY_FAULTS,
    ],
)
def test_every_fault_is_overcome(stored: str, monkeypatch: pytest.MonkeyPatch, fault: str):
    """A read continues at the range in which the connection broke; only wrong bytes are all read again."""
    proxy = bucket.Proxy(stored, budget=3, faults=(fault,))
    with bucket.disturbed(proxy) as address:
        s3.use(monkeypatch, address)
        known = storage.stat(URL) if fault in bucket.BODY_FAULTS else None
        assert storage.read_object(URL, known) == DATA
    assert proxy.injected == {fault: 3}
    ranges = ["bytes=0-39999", "bytes=40000-79999", "bytes=80000-102399"]
    if fault == "wrong bytes":
        assert proxy.ranges == ranges * 2
    else:
        assert proxy.ranges[-3:] == ranges and set(proxy.ranges[:-3]) <= {ranges[0]}


def test_uploads_survive_faults(stored: str, monkeypatch: pytest.MonkeyPatch):
    proxy = bucket.Proxy(stored, budget=6, faults=bucket.REFUSALS)
    place = f"s3://{s3.BUCKET}/up"
    with bucket.disturbed(proxy) as address:
        s3.use(monkeypatch, address)
        for number in range(3):
            storage.write(f"{place}/{number}", DATA)
        assert [storage.read_bytes(url) for url in storage.list_files(place)] == [DATA] * 3
    assert proxy.injected.total() == 6


def test_replaced_object_is_an_error(stored: str, monkeypatch: pytest.MonkeyPatch):
    """An object that is replaced between two ranges is an error, whether the store states a checksum or not."""
    stated, read = storage.stat(URL), fsspec_store.FsspecStore._range

    def replace(store: fsspec_store.FsspecStore, url: str, start: int, size: int) -> bytes:
        if start:
            storage.write(URL, DATA[::-1])
        return read(store, url, start, size)

    for known in (stated, stated._replace(checksum=None)):
        storage.write(URL, DATA)
        assert storage.read_object(URL, known) == DATA
        with monkeypatch.context() as patch:
            patch.setattr(fsspec_store.FsspecStore, "_range", replace)
            with pytest.raises(
                Unavailable, match=r"^s3://bucket/stores/data: was replaced while it was being read: version"
            ):
                storage.read_object(URL, known)


class Clock:
    """A clock that only pauses advance, by a second each, however slow the machine is."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1


def test_wrong_bytes_and_silence_are_told(
    stored: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fsspec_store, "time", Clock())
    for fault, message in {
        "wrong bytes": r"md5 is .*, expected .*, 5 times in a row",
        "503": r"no answer within 2 s: ",
        "403": r"access denied; a private bucket needs the credentials",
        "400": r"request failed: ",
    }.items():
        with bucket.disturbed(bucket.Proxy(stored, budget=99, faults=(fault,))) as address:
            s3.use(monkeypatch, address, deadline=2)
            with pytest.raises(UserError, match=rf"^s3://bucket/stores/data: {message}") as caught:
                storage.read_bytes(URL)
            assert isinstance(caught.value, AccessDenied if fault == "403" else Unavailable)
    s3.use(monkeypatch, f"http://127.0.0.1:{hosts.free_port()}", deadline=2)
    monkeypatch.setattr(fsspec_store, "TOLD_AFTER", 0)
    with pytest.raises(Unavailable, match=r"no answer within 2 s: Could not connect"):
        storage.read_bytes(URL)
    assert f"waiting for {URL}: " in caplog.text and "retrying for up to 2 s" in caplog.text


def test_uploaded_in_parts(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The ETag of an object that was uploaded in parts is no checksum; a cached copy has one of its own."""
    s3.use(monkeypatch, s3_server)
    files = fsspec_store.file_system(S3(), f"s3://{s3.BUCKET}", 0, 0)
    part = 5 << 20  # the smallest that S3 takes
    data = bytes(2 * part)
    files.pipe_file(URL, data, chunksize=part)
    assert storage.stat(URL) == (len(data), storage.stat(URL).version, None)
    assert storage.read_bytes(URL) == data
    cache = ShardCache(tmp_path, 10**8)
    assert cache.open_reader(URL).read() == data
    (path,) = tmp_path.glob("*.zero-cache")
    assert path.stat().st_size == len(data) + 32
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    assert cache.open_reader(URL).read() == data and path.read_bytes()[:1] == b"\0"


def test_missing_bucket(stored: str):
    with pytest.raises(NoSuchBucket, match=r"^s3://absent/a: no such bucket"):
        storage.list_files("s3://absent/a")
    with pytest.raises(FileNotFoundError, match=r"^s3://absent/a: no such object"):
        storage.read_bytes("s3://absent/a")


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    fsspec_store.file_system.cache_clear()
    for url, module, message in (
        ("s3://a/b", "s3fs", r"s3fs is missing; pip install .*\[s3\]"),
        ("az://a/b", "adlfs", r"adlfs is missing; pip install .*\[azure\]"),
        ("abfs://a@b/c", "adlfs", r"adlfs is missing; pip install .*\[azure\]"),
        ("hf://a/b/c", "huggingface_hub", r"huggingface_hub is missing; pip install .*\[hub\]"),
    ):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=message):
            patch.setitem(sys.modules, module, None)
            patch.delitem(_registry, url.partition(":")[0], raising=False)
            storage.read_bytes(url)


def test_replaced_in_azure(monkeypatch: pytest.MonkeyPatch):
    azure.use(monkeypatch)
    storage.write("az://bucket/a", b"first")
    known = storage.stat("az://bucket/a")
    storage.write("az://bucket/a", b"other")
    with pytest.raises(Unavailable, match="was replaced while it was being read"):
        storage.read_object("az://bucket/a", known)


def test_damaged_upload_is_noticed(monkeypatch: pytest.MonkeyPatch):
    azure.use(monkeypatch)
    pipe_file = azure.InMemory.pipe_file
    for sent, stored in ((b"shard", b"shar"), (b"shard", b"sharp")):

        def damaging(files: azure.InMemory, path: str, data: bytes, stored: bytes = stored) -> None:
            pipe_file(files, path, stored)

        monkeypatch.setattr(azure.InMemory, "pipe_file", damaging)
        with pytest.raises(Unavailable, match=r"^az://bucket/up: .* was stored instead of the 5 bytes"):
            storage.write("az://bucket/up", sent)


def test_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Files of a repository are read at a revision, and compared with the hash by which git names them."""
    for revision, data in {"main": DATA, "v1": DATA[:300]}.items():
        path = tmp_path / "someone/corpus" / revision / "shards" / "0.tar"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    with hub.serve(tmp_path) as served:
        hub.point_to(served, tmp_path / "cache", monkeypatch)
        fsspec_store.file_system.cache_clear()
        assert storage.read_bytes("hf://someone/corpus/shards/0.tar") == DATA
        assert storage.read_bytes("hf://someone/corpus@v1/shards/0.tar") == DATA[:300]
        assert storage.list_files("hf://someone/corpus@v1/shards") == ["hf://someone/corpus@v1/shards/0.tar"]
        assert not storage.exists("hf://someone/corpus/shards/1.tar")
        with pytest.raises(UserError, match=r"^hf://corpus: the name is invalid: Repository id must be"):
            storage.list_files("hf://corpus")
        with pytest.raises(UserError, match="zero reads the hub but does not write to it"):
            storage.write("hf://someone/corpus/shards/1.tar", DATA)


def test_a_bucket_that_bills_its_readers(stored: str, monkeypatch: pytest.MonkeyPatch):
    proxy = bucket.Proxy(stored, budget=0)
    proxy.bills_readers = True
    with bucket.disturbed(proxy) as address:
        s3.use(monkeypatch, address)
        with pytest.raises(AccessDenied, match=r"AWS_REQUEST_PAYER=requester if it bills its readers"):
            storage.read_bytes(URL)
        monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
        fsspec_store.file_system.cache_clear()
        assert storage.read_bytes(URL) == DATA and URL in storage.list_files(storage.parent(URL))


def test_an_answer_that_an_object_was_replaced(stored: str, monkeypatch: pytest.MonkeyPatch):
    with bucket.disturbed(bucket.Proxy(stored, budget=9, faults=("412",))) as address:
        s3.use(monkeypatch, address)
        with pytest.raises(Unavailable, match=r"stores/data: was replaced while it was being read$"):
            storage.stat(URL)
