"""Files in a bucket: a real storage server over HTTP, and everything that can go wrong on the way to it."""

import fcntl
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers import azure, bucket, hosts, kills, s3
from zero.base.errors import Unavailable, UserError
from zero.files import storage
from zero.files.storage import fsspec_store, gcs
from zero.files.storage.fsspec_store import deadline_of

DATA = bytes(range(256)) * 400


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory of its own, here or in the bucket."""
    if request.param == "local":
        return str(tmp_path)
    if request.param == "gs":
        bucket.use(monkeypatch, request.getfixturevalue("server"))
    elif request.param == "s3":
        s3.use(monkeypatch, request.getfixturevalue("s3_server"))
    else:
        azure.use(monkeypatch)
    return f"{request.param}://{bucket.BUCKET}{tmp_path}"


@pytest.mark.parametrize("place", ["local", "gs", "s3", "az"], indirect=True)
def test_a_bucket_is_like_a_directory(place: str):
    assert storage.list_files(place) == []
    url = storage.join(place, "a/b c.tar")
    assert not storage.exists(url)
    with pytest.raises(FileNotFoundError, match="b c"):
        storage.read_bytes(url)
    storage.write(url, b"before")
    assert storage.read_bytes(url) == b"before"
    storage.write(url, DATA)
    assert storage.exists(url)
    assert storage.read_bytes(url) == DATA
    with storage.open_reader(url) as stream:
        assert stream.read(3) == DATA[:3]
        stream.seek(90_000, os.SEEK_CUR)
        assert stream.read(5) == DATA[90_003:90_008]
    storage.write(storage.join(place, "copy"), DATA)
    storage.write(storage.join(place, "empty"), b"")
    assert storage.read_bytes(storage.join(place, "empty")) == b""
    assert storage.read_bytes(storage.join(place, "copy")) == DATA
    assert storage.list_files(place) == [storage.join(place, name) for name in ("a/b c.tar", "copy", "empty")]
    if storage.is_remote(place):  # shards at the top of a bucket do not list all of it
        assert sorted(storage.list_stats(place, is_deep=False)) == [storage.join(place, n) for n in ("copy", "empty")]
        assert storage.list_stats(storage.join(place, "none"), is_deep=False) == {}
    assert storage.list_files(storage.join(place, "a")) == [url] and storage.parent(url) == storage.join(place, "a")
    for _ in range(2):
        storage.remove(url)
    assert not storage.exists(url)


@pytest.mark.parametrize("place", ["gs", "s3", "az"], indirect=True)
def test_a_bucket_itself_is_a_folder(place: str):
    """Files lie at its top as in any folder; it is not a file itself."""
    root = f"{place.partition('://')[0]}://{bucket.BUCKET}"
    url = storage.join(root, "top-level.tar")
    storage.write(url, DATA)
    assert storage.parent(url) == root and storage.is_remote(root)
    assert storage.read_bytes(url) == DATA
    for spelling in (root, f"{root}/"):
        assert url in storage.list_files(spelling) and not storage.exists(spelling)
        with pytest.raises(UserError, match="this is a bucket"):
            storage.write(spelling, DATA)
    storage.remove(url)
    assert url not in storage.list_files(root)


def test_write_is_synced_before_renaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A write is on the disk before it has its name."""
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(descriptor: int) -> None:
        events.append("fsync")
        fsync(descriptor)

    def watched_replace(path: Path, target: Path) -> Path:
        events.append("replace")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    storage.write(tmp_path / "a", DATA)
    assert events == ["fsync", "replace"] and (tmp_path / "a").read_bytes() == DATA


def test_failed_write_keeps_contents(tmp_path: Path):
    """A write that fails keeps the former contents."""
    storage.write(tmp_path / "a", b"before")
    with pytest.raises(TypeError):
        storage.write(tmp_path / "a", 7)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert storage.read_bytes(tmp_path / "a") == b"before"


def test_what_a_killed_write_has_left_is_removed(tmp_path: Path):
    """Of the names that are asked for; neither files of users nor the contents of the file are touched."""
    program = f"from zero.files import storage; storage.write({str(tmp_path / 'a')!r}, b'after')"
    storage.write(tmp_path / "a", b"before")
    (tmp_path / ".a.settings").touch()
    (tmp_path / ".a.00000000").mkdir()
    killed = kills.at(kills.Rule("os.rename", "/a$", "kill before"))
    done = subprocess.run([sys.executable, "-c", f"exec({killed!r})\n{program}"], timeout=60)
    assert done.returncode == -signal.SIGKILL
    (left,) = (path for path in tmp_path.iterdir() if path.is_file() and path.name not in ("a", ".a.settings"))
    storage.remove_unfinished(tmp_path, "b")
    assert left.exists()
    storage.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.00000000", ".a.settings", "a"]
    assert storage.read_bytes(tmp_path / "a") == b"before"


def test_what_a_killed_process_has_left_of_a_directory_is_removed(tmp_path: Path):
    """By the next one for the same path; not what a living process fills, a directory of another path, or a file."""
    (tmp_path / ".b.00000000").mkdir()
    (tmp_path / ".a[1].00000001").touch()
    (tmp_path / ".a[1].old").mkdir()
    others = sorted(path.name for path in tmp_path.iterdir())
    path = tmp_path / "a[1]"
    filling = f"""
from pathlib import Path
from zero.files import storage
with storage.unfinished_directory(Path({str(path)!r})) as unfinished:
    (unfinished / "inner").mkdir()
    (unfinished / "inner" / "file").touch()
    print(flush=True)
    input()
"""
    command = [sys.executable, "-c", filling]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        (living,) = {path.name for path in tmp_path.iterdir()} - {*others}
        with storage.unfinished_directory(path) as unfinished:
            assert {living, unfinished.name, *others} == {*os.listdir(tmp_path)}
            unfinished.rename(path)
        assert sorted(os.listdir(tmp_path)) == sorted([living, "a[1]", *others])
        other.kill()
    with pytest.raises(KeyError), storage.unfinished_directory(path):
        assert living not in os.listdir(tmp_path)
        raise KeyError
    assert sorted(os.listdir(tmp_path)) == sorted(["a[1]", *others])


def test_a_directory_that_is_removed_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As another process does that finds it unlocked."""
    flock = fcntl.flock
    removed: list[str] = []

    def watched(descriptor: int, operation: int) -> None:
        if not removed:
            removed.extend(os.listdir(tmp_path))
            (tmp_path / removed[0]).rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", watched)
    with storage.unfinished_directory(tmp_path / "a") as unfinished:
        assert [unfinished.name] == os.listdir(tmp_path) != removed


@pytest.mark.parametrize("moment", ["open", "locked"])
def test_what_a_living_process_writes_stays(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another process that removes what is left finds it locked, or takes it before: then it is written again."""
    removals: list[list[str]] = []
    flock, fsync = fcntl.flock, os.fsync

    def remove() -> None:
        if not removals:
            before = os.listdir(tmp_path)
            removals.append(before)
            storage.remove_unfinished(tmp_path)
            assert (os.listdir(tmp_path) == before) == (moment == "locked")

    def watched_flock(file: int, operation: int) -> None:
        if moment == "open":
            remove()
        flock(file, operation)

    def watched_fsync(descriptor: int) -> None:
        if moment == "locked":
            remove()
        fsync(descriptor)

    monkeypatch.setattr(fcntl, "flock", watched_flock)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    storage.write(tmp_path / "a", DATA)
    assert len(removals[0]) == 1
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == DATA


@pytest.mark.parametrize("url", ["ftp://bucket/a", "gs://", "s3://", "gs:///a", "https://host/a"])
def test_other_addresses_are_refused(url: str):
    with pytest.raises(UserError, match=r"expected a local path or gs://bucket/name"):
        storage.read_bytes(url)


@pytest.mark.parametrize("path", ["pipe:cat a.tar", "pipe: gsutil cat gs://bucket/a.tar"])
def test_commands_are_refused(path: str):
    """Those that webdataset would run."""
    with pytest.raises(UserError, match=rf"{path}: commands are never run; download the data"):
        storage.read_bytes(path)


@pytest.mark.parametrize(
    "fault",  # uploads below meet every refusal
    [
        *(pytest.param(status, marks=pytest.mark.slow) for status in bucket.REFUSALS[:-1]),
        *bucket.REFUSALS[-1:],
        *bucket.BODY_FAULTS,
    ],
)
def test_every_fault_is_overcome(server: str, monkeypatch: pytest.MonkeyPatch, fault: str):
    bucket.use(monkeypatch, server)
    storage.write(f"gs://{bucket.BUCKET}/faults", DATA)
    proxy = bucket.Proxy(server, budget=3, faults=(fault,))
    with bucket.disturbed(proxy) as address:
        bucket.use(monkeypatch, address)
        assert storage.read_bytes(f"gs://{bucket.BUCKET}/faults") == DATA
    assert proxy.injected == {fault: 3}


@pytest.mark.parametrize(
    "fault", [fault for fault in (*bucket.REFUSALS, *bucket.BODY_FAULTS) if fault != "wrong bytes"]
)
def test_every_fault_in_the_middle_is_overcome(server: str, monkeypatch: pytest.MonkeyPatch, fault: str):
    """Of a file that is read in ranges; wrong bytes of a range cannot be told from right ones."""
    bucket.use(monkeypatch, server)
    url = f"gs://{bucket.BUCKET}/ranges"
    storage.write(url, DATA)
    proxy = bucket.Proxy(server, budget=0, faults=(fault,))
    with bucket.disturbed(proxy) as address:
        bucket.use(monkeypatch, address)
        with io.BufferedReader(storage.RangeReader(url), len(DATA) // 3) as reader:
            first = reader.read(10)
            proxy.budget = 2
            assert first + reader.read() == DATA
    assert proxy.injected == {fault: 2}


def test_broken_read_continues(server: str, monkeypatch: pytest.MonkeyPatch):
    """A broken read continues at its byte."""
    bucket.use(monkeypatch, server)
    storage.write(f"gs://{bucket.BUCKET}/long", DATA)
    seen: list[str] = []
    proxy = bucket.Proxy(server, budget=1, faults=("truncated",))
    with bucket.disturbed(proxy) as address:
        bucket.use(monkeypatch, address)
        http = gcs.client(os.getpid())._http
        request = http.request

        def watch(method, url, **options):
            seen.append((options.get("headers") or {}).get("range", ""))
            return request(method, url, **options)

        monkeypatch.setattr(http, "request", watch)
        assert storage.read_bytes(f"gs://{bucket.BUCKET}/long") == DATA
    assert [line for line in seen if line] == [f"bytes={len(DATA) // 2}-"]


def test_bytes_that_stay_wrong_are_told(server: str, monkeypatch: pytest.MonkeyPatch):
    bucket.use(monkeypatch, server)
    storage.write(f"gs://{bucket.BUCKET}/wrong", DATA)
    with bucket.disturbed(bucket.Proxy(server, budget=99, faults=("wrong bytes",))) as address:
        bucket.use(monkeypatch, address)
        with pytest.raises(UserError, match=r"gs://bucket/wrong: crc32c is .*, expected .*, 5 times in a row"):
            storage.read_bytes(f"gs://{bucket.BUCKET}/wrong")


def test_wrong_bytes_are_noticed(server: str, monkeypatch: pytest.MonkeyPatch):
    """Wrong bytes after a broken connection are noticed.

    Google's library compares no checksum of a download that it has continued.
    """
    bucket.use(monkeypatch, server)
    storage.write(f"gs://{bucket.BUCKET}/wrong", DATA)
    proxy = bucket.Proxy(server, budget=2, faults=("truncated", "wrong bytes"))
    with bucket.disturbed(proxy) as address:
        bucket.use(monkeypatch, address)
        assert storage.read_bytes(f"gs://{bucket.BUCKET}/wrong") == DATA
    assert proxy.injected == {"truncated": 1, "wrong bytes": 1}


def test_silent_bucket_is_reported(server: str, monkeypatch: pytest.MonkeyPatch):
    """A bucket that does not answer is reported."""
    with bucket.disturbed(bucket.Proxy(server, budget=10**6, faults=("503",))) as address:
        bucket.use(monkeypatch, address, deadline=0.3)
        with pytest.raises(UserError, match=r"^gs://bucket/a: no answer within 300 s: 503") as caught:
            storage.read_bytes(f"gs://{bucket.BUCKET}/a")
    assert "\n" not in str(caught.value)
    bucket.use(monkeypatch, f"http://127.0.0.1:{hosts.free_port()}", deadline=0.3)
    with pytest.raises(UserError, match=r"^gs://bucket/a: no answer within 300 s: .*refused"):
        storage.read_bytes(f"gs://{bucket.BUCKET}/a")


def test_the_first_timeout_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """A store that accepts connections and never answers is named after one timeout, and once."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        gcs.client.cache_clear()
        monkeypatch.setattr(gcs, "TIMEOUT", (1, 0.3))
        monkeypatch.setattr(fsspec_store, "TOLD_AFTER", 0.2)
        with deadline_of(1.5), pytest.raises(Unavailable, match="no answer within 2 s"):
            storage.stat("gs://bucket/file")
        gcs.client.cache_clear()
    (line,) = caplog.messages
    assert line.startswith("waiting for gs://bucket/file: ") and line.endswith("; retrying for up to 2 s")


def test_uploads_survive_faults(server: str, monkeypatch: pytest.MonkeyPatch):
    proxy = bucket.Proxy(server, budget=6, faults=bucket.REFUSALS)
    with bucket.disturbed(proxy) as address:
        bucket.use(monkeypatch, address)
        for number in range(3):
            storage.write(f"gs://{bucket.BUCKET}/up/{number}", DATA)
        assert [storage.read_bytes(url) for url in storage.list_files(f"gs://{bucket.BUCKET}/up")] == [DATA] * 3
    assert proxy.injected.total() == 6


def test_threads_share_a_client(server: str, monkeypatch: pytest.MonkeyPatch):
    bucket.use(monkeypatch, server)
    storage.write(f"gs://{bucket.BUCKET}/shared", DATA)
    came: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: came.append(storage.read_bytes(f"gs://{bucket.BUCKET}/shared")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [DATA] * 8


def test_lazy_import_of_buckets():
    """The library of buckets is not imported before a bucket is named."""
    code = "import sys; from zero.files import storage; storage.exists('x')"
    code += "; print({'google.cloud', 'fsspec'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout == "set()\n"


def test_move_of_a_directory(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory in a bucket is moved whole, and nothing else with it."""
    bucket.use(monkeypatch, server)
    for name in ("10/a", "10/state/b", "100/a"):
        storage.write(f"gs://bucket/moved/{name}", name.encode())
    storage.move("gs://bucket/moved/10", "gs://bucket/moved/10.damaged")
    left = [url.removeprefix("gs://bucket/moved/") for url in storage.list_files("gs://bucket/moved")]
    assert left == ["10.damaged/a", "10.damaged/state/b", "100/a"]
    with storage.open_reader("gs://bucket/moved/10.damaged/state/b") as file:
        assert file.read() == b"10/state/b"


def test_a_bucket_that_bills_its_readers(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says how a project is named, and then everything is read."""
    bucket.use(monkeypatch, server)
    url = f"gs://{bucket.BUCKET}/billed/a"
    storage.write(url, DATA)
    proxy = bucket.Proxy(server, budget=0)
    proxy.bills_readers = True
    with bucket.disturbed(proxy) as address:
        bucket.use(monkeypatch, address)
        for read in (storage.read_bytes, storage.list_files, storage.stat):
            with pytest.raises(UserError, match=r"bills its readers; set GS_USER_PROJECT=PROJECT in the env") as caught:
                read(url)
            assert caught.value.status == 2 and "\n" not in str(caught.value)
        monkeypatch.setenv("GS_USER_PROJECT", "mine")
        assert storage.read_bytes(url) == DATA and storage.list_files(storage.parent(url)) == [url]


def test_an_object_that_was_replaced(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its statement and its bytes: the version that was stated is gone, which is not a missing object."""
    bucket.use(monkeypatch, server)
    url = f"gs://{bucket.BUCKET}/replaced"
    storage.write(url, DATA)
    known = storage.stat(url)
    storage.write(url, DATA[::-1])

    def gone(url: str, known: object) -> bytes:
        raise FileNotFoundError(url)

    monkeypatch.setattr(gcs, "read", gone)
    with pytest.raises(Unavailable, match=r"replaced: was replaced while it was being read: version \d+, not \d+"):
        storage.read_object(url, known)
    with bucket.disturbed(bucket.Proxy(server, budget=9, faults=("412",))) as address:
        bucket.use(monkeypatch, address)
        with pytest.raises(Unavailable, match=r"^gs://bucket/replaced: was replaced while it was being read$"):
            storage.stat(url)
