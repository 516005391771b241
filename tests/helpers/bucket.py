"""A storage server on loopback, and a proxy in front of it that injects faults.

- `serving()`: the server (the fixture `server` of tests/conftest.py); `use`: points the library of buckets to it.
- `upload(directory, url)`: copies a directory into `BUCKET`.
- `Proxy`, `disturbed`: fail requests (`REFUSALS`) and damage the bodies of reads (`BODY_FAULTS`); of two of these the
  stated length is wrong.
- `Strike`: kills a client, say, at one request.
"""

import gc
import http.client
import math
import os
import random
import re
import socket
import struct
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import pytest
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import create_server

from zero.files import storage
from zero.files.storage import fsspec_store, gcs

BUCKET = "bucket"
_download = objects.download  # of the emulator as it is
REFUSALS = ("429", "500", "503")  # of any request; other statuses may be given too
BODY_FAULTS = ("reset", "truncated", "short", "understated", "endless", "stall", "wrong bytes")  # of a read


@contextmanager
def serving(*, has_generations: bool = True) -> Iterator[str]:
    """Runs a storage server with one empty bucket, `BUCKET`; the address is for STORAGE_EMULATOR_HOST.

    Reads carry the generation as with Google's servers, because orbax needs it; without `has_generations` they do not,
    as with the emulator as it is.
    """
    before = objects.download  # of another server of this process, if there is one

    def with_generation(request: Any, response: Any, stored: Any, *args: Any) -> None:
        _download(request, response, stored, *args)
        names = request.params["bucket_name"], request.params["object_id"]
        if response.status in (200, 206):
            response["x-goog-generation"] = stored.get_file_obj(*names)["generation"]

    objects.download = with_generation if has_generations else _download
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    try:
        with server:
            yield "http://{}:{}".format(*server._api._httpd.server_address)
    finally:
        objects.download = before


def use(monkeypatch: pytest.MonkeyPatch, address: str, deadline: float = 900) -> None:
    """Sends all requests to this address, with a short wait for each answer, and retries for `deadline` seconds."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
    gcs.client.cache_clear()
    monkeypatch.setattr(gcs, "TIMEOUT", (10, 2))
    monkeypatch.setattr(gcs, "_retry", lambda url: DEFAULT_RETRY.with_delay(0.01, 0.1, 2).with_timeout(deadline))


def upload(directory: Path, url: str) -> None:
    """Copies everything below a local directory to a URL."""
    for path in storage.list_files(directory):
        storage.write(storage.join(url, os.path.relpath(path, directory)), Path(path).read_bytes())


class Strike:
    """Does something, such as killing the client, before or after the nth request to change an object is forwarded.

    Args:
      pattern: of the name of the object.
      when: a request that is struck before is not forwarded.
    """

    def __init__(self, pattern: str, when: Literal["before", "after"], strike: Callable[[], None], nth: int) -> None:
        self._pattern, self._left, self._lock = pattern, nth, threading.Lock()
        self.when, self.strike = when, strike

    def is_met(self, method: str, path: str, body: bytes) -> bool:
        """Whether this is the request; a name is in the path, or in the first part of the body."""
        text = unquote(path) + body[:500].decode("latin-1")
        if method == "GET" or re.search(self._pattern, text) is None:
            return False
        with self._lock:
            self._left -= 1
            return self._left == 0


class Proxy:
    """Forwards requests to `target`, except that up to `budget` of them, a fraction `rate`, get a fault instead."""

    def __init__(self, target: str, budget: int, rate: float = 1.0, faults: tuple[str, ...] = REFUSALS + BODY_FAULTS):
        self.target = target.removeprefix("http://")
        self.budget, self.rate, self.faults = budget, rate, faults
        self.strike: Strike | None = None
        self.bills_readers = False  # answers only requests that name who pays
        self.latency = 0.0  # seconds before each read
        self.bandwidth = math.inf  # bytes per second of all reads together
        self.read_bytes = 0
        self._line_free = 0.0  # when the last read has passed the line
        self.injected: Counter[str] = Counter()
        self.ranges: list[str | None] = []  # of the reads, faults included
        self.requests: list[tuple[float, str, str]] = []  # when, on the monotonic clock; the method and the path
        self.lock, self.random, self.closed = threading.Lock(), random.Random(0), threading.Event()

    def delay(self, size: int) -> None:
        """Waits as long as so many bytes take, behind those of other reads."""
        time.sleep(self.latency)
        with self.lock:
            self.read_bytes += size
            self._line_free = max(self._line_free, time.monotonic()) + size / self.bandwidth
            end = self._line_free
        time.sleep(max(0.0, end - time.monotonic()))

    def draw(self, is_read: bool) -> str | None:
        """The fault of this request, if it gets one: the kind that was injected least often so far.

        Other requests may all come before the first read: they leave one fault for each kind that only reads can get.
        """
        faults = [fault for fault in self.faults if is_read or fault.isdigit()]
        with self.lock:
            of_reads = [fault for fault in self.faults if not fault.isdigit() and not self.injected[fault]]
            left = self.budget - self.injected.total()
            if not is_read:
                left -= len(of_reads)
            if not faults or left <= 0 or self.random.random() >= self.rate:
                return None
            fault = min(faults, key=self.injected.__getitem__)
            self.injected[fault] += 1
            return fault


@contextmanager
def disturbed(proxy: Proxy) -> Iterator[str]:
    """Runs the proxy; the address is for STORAGE_EMULATOR_HOST."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Expect") == "100-continue":  # S3's library waits for it
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            proxy.requests.append((time.monotonic(), self.command, self.path))
            # Google's library and fsspec.
            is_read = self.command == "GET" and ("alt=media" in self.path or "Range" in self.headers)
            fault = proxy.draw(is_read)
            if is_read:
                proxy.ranges.append(self.headers.get("Range"))
            if fault is not None and fault.isdigit():
                self.send_response(int(fault))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if proxy.bills_readers and not ("userProject=" in self.path or "x-amz-request-payer" in self.headers):
                message = b'{"error": {"message": "Bucket is a requester pays bucket but no user project provided."}}'
                self.send_response(400 if "/b/" in self.path else 403)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(message)))
                self.end_headers()
                self.wfile.write(message if self.command != "HEAD" else b"")
                return
            strike = proxy.strike
            is_struck = strike is not None and strike.is_met(self.command, self.path, body)
            if strike is not None and is_struck and strike.when == "before":
                strike.strike()
                self.close_connection = True
                return
            onward = http.client.HTTPConnection(proxy.target, timeout=900)
            # With its Host, which the server puts into the links it gives.
            onward.request(
                self.command,
                self.path,
                body or None,
                {name: value for name, value in self.headers.items() if name != "Expect"},
            )
            answer = onward.getresponse()
            data = answer.read()
            onward.close()
            if is_read:
                proxy.delay(len(data))
            if strike is not None and is_struck:
                strike.strike()
            if fault == "short":
                data = data[: -(-len(data) // 2)]
            elif fault == "wrong bytes":
                data = bytes([data[0] ^ 1]) + data[1:]
            if fault == "understated":  # a connection that is kept, with what nobody expects before the next answer
                self.protocol_version = "HTTP/1.1"
                self.close_connection = False
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("server", "date", "content-length"):
                    self.send_header(name, value)
            is_head = self.command == "HEAD"  # which states the length of a body that it does not send
            stated = {"understated": len(data) // 2, "endless": 1 << 50}.get(fault or "", len(data))
            self.send_header("Content-Length", answer.headers["Content-Length"] if is_head else str(stated))
            self.end_headers()
            if fault in ("reset", "truncated", "stall"):
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                self.close_connection = True
            if fault == "reset":  # closing with nothing to linger for sends RST in place of FIN
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            elif fault == "stall":
                proxy.closed.wait(900)
            elif fault != "truncated":
                self.wfile.write(data)
                self.close_connection |= fault == "endless"

        do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that has given up on an answer, as it should

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    with warnings.catch_warnings():
        # Google's library leaves the answer of a refusal, and so its socket, to the garbage collector.
        warnings.filterwarnings("ignore", "unclosed <socket", ResourceWarning)
        try:
            yield "http://{}:{}".format(*server.server_address)
        finally:
            proxy.closed.set()
            server.shutdown()
            server.server_close()
            thread.join()
            gcs.client.cache_clear()
            fsspec_store.file_system.cache_clear()
            gc.collect()
