"""Reading objects of S3's protocol: zero's stores (s3fs) beside obstore, which is not among zero's packages.

A server and a proxy that injects faults run on loopback, in a process of their own. Reports CPU seconds of the reader,
and which faults reach it as wrong bytes. Run: pip install obstore; python -m benchmarks.stores --objects 40
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection

from tests.helpers import bucket, s3
from zero.files import storage
from zero.files.storage import fsspec_store

Reader = Callable[[str], bytes]


def content(number: int, size: int) -> bytes:
    return hashlib.shake_128(number.to_bytes(4)).digest(size)


def serve(connection: Connection, objects: int, size: int, faults: tuple[str, ...], rate: float) -> None:
    """Sends the addresses of the server and of the proxy in front of it, and stops at the first message."""
    with s3.serving() as address, bucket.disturbed(bucket.Proxy(address, 10**6, rate, faults)) as proxied:
        os.environ.update(s3.environment(address))
        for number in range(objects):
            storage.write(f"s3://{s3.BUCKET}/{number}", content(number, size))
        connection.send((address, proxied))
        connection.recv()


def with_zero(address: str) -> Reader:
    os.environ.update(s3.environment(address))
    fsspec_store.TIMEOUT = (1, 1)
    fsspec_store.PAUSES = (0.01, 0.1)
    fsspec_store.DEADLINE = 60
    fsspec_store.file_system.cache_clear()
    return lambda name: storage.read_bytes(f"s3://{s3.BUCKET}/{name}")


def with_obstore(address: str) -> Reader:
    import obstore  # type: ignore[import-not-found]
    from obstore.store import S3Store  # type: ignore[import-not-found]

    store = S3Store(
        s3.BUCKET,
        endpoint=address,
        access_key_id="test",
        secret_access_key="test",
        region="us-east-1",
        client_options={"allow_http": True, "timeout": timedelta(seconds=2)},
        retry_config={
            "max_retries": 1000,
            "retry_timeout": timedelta(seconds=60),
            "backoff": {"init_backoff": timedelta(seconds=0.01), "max_backoff": timedelta(seconds=0.1), "base": 2},
        },
    )
    # With a range, by which the proxy tells reads of objects from other requests.
    return lambda name: bytes(obstore.get(store, name, options={"range": {"offset": 0}}).bytes())


def measure(read: Reader, objects: int, size: int, threads: int) -> tuple[float, float, Counter[str]]:
    """Seconds and CPU seconds in which threads read all objects, and how many came right, wrong, or not at all."""

    def outcome(number: int) -> str:
        try:
            data = read(str(number))
        except Exception as error:  # noqa: BLE001  each library has errors of its own
            return type(error).__name__
        return "right" if data == content(number, size) else "wrong bytes"

    outcome(0)  # imports and connects
    began = time.monotonic()
    cpu = time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        outcomes = Counter(pool.map(outcome, range(objects)))
    return time.monotonic() - began, time.process_time() - cpu, outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=40)
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="without faults")
    given = parser.parse_args()
    size = given.megabytes << 20
    cases: dict[str, tuple[str, ...]] = {"no faults": ()}
    cases |= {fault: (fault,) for fault in (*bucket.REFUSALS, *bucket.BODY_FAULTS)}
    for name, faults in cases.items():
        here, there = multiprocessing.Pipe()
        server = multiprocessing.Process(
            target=serve, args=(there, given.objects, size, faults, 0.2 if faults else 0.0)
        )
        server.start()
        _, address = here.recv()
        for _ in range(1 if faults else given.rounds):
            for library, open_reader in (("zero", with_zero), ("obstore", with_obstore)):
                seconds, cpu, outcomes = measure(open_reader(address), given.objects, size, given.threads)
                counts = ", ".join(f"{count} {kind}" for kind, count in sorted(outcomes.items()))
                print(f"{name:>12} {library:>8}: {seconds:6.2f} s, {cpu:5.2f} CPU s; {counts}", flush=True)
        here.send("stop")
        server.join()


if __name__ == "__main__":
    main()
