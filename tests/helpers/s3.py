"""A server of S3's protocol on loopback (moto).

- `serving()`: the server (the fixture `s3` of tests/conftest.py); `use`: points the library of S3 to it.
- The proxy of tests/helpers/bucket.py in front of it injects faults.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zero.files.storage import fsspec_store

BUCKET = "bucket"


@contextmanager
def serving() -> Iterator[str]:
    """Runs a storage server with one empty bucket, `BUCKET`; the address is for AWS_ENDPOINT_URL."""
    from moto.backends import get_backend
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        get_backend("s3")["123456789012"]["aws"].create_bucket(BUCKET, "us-east-1")
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


def use(monkeypatch: pytest.MonkeyPatch, address: str, deadline: float = 900) -> None:
    """Sends all requests to this address, with a short wait for each answer, and retries for `deadline` seconds."""
    for name, value in environment(address).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fsspec_store, "TIMEOUT", (10, 2))
    monkeypatch.setattr(fsspec_store, "PAUSES", (0.01, 0.1))
    monkeypatch.setattr(fsspec_store, "DEADLINE", deadline)
    fsspec_store.file_system.cache_clear()


def environment(address: str) -> dict[str, str]:
    """The variables with which a program finds the server, and nothing else."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }
