"""The watchdog against a key-value store that fails, for a moment or for good (real hosts: tests/test_hosts.py)."""

import threading
import time
from typing import Any

import jax
import pytest

from zero.runtime.hosts import watchdog


class Store:
    """The store of two hosts, of which the other one sends a heartbeat whenever it is asked."""

    def __init__(self) -> None:
        self.is_failing = threading.Event()
        self.failures = 0
        self.beats = 0

    def key_value_set(self, key: str, value: str, overwrite: bool = False) -> None:
        if self.is_failing.is_set():
            self.failures += 1
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    def blocking_key_value_get(self, key: str, timeout: int) -> str:
        return "name"

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        self.beats += 1
        return [("zero/heartbeat/0", str(self.beats)), ("zero/heartbeat/1", "")]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The watchdog of host 1, at a hundred times its speed, and the status with which it would end the process."""
    ended: list[int] = []
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(watchdog, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(watchdog, "exit_immediately", ended.append)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    store = Store()
    watching = watchdog._Watchdog(store, stall_minutes=None)
    watching.start()
    yield store, ended
    watching._stopped.set()
    watching.join(30)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_brief_failures_end_nobody(watched: Any) -> None:
    """Requests that fail for a moment end no process."""
    store, ended = watched
    for _ in range(3):
        wait_until(lambda beats=store.beats: store.beats > beats)
        store.is_failing.set()
        wait_until(lambda failures=store.failures: store.failures > failures + 1)
        store.is_failing.clear()
    wait_until(lambda beats=store.beats: store.beats > beats + 2)
    assert not ended


def test_silent_store_ends_the_process(watched: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A store that stays silent ends the process, which names the host."""
    store, ended = watched
    store.is_failing.set()
    wait_until(lambda: ended)
    assert ended[0] == 1
    assert "host 0 of 2 (name) which coordinates, has not answered for 0.5 s (UNAVAILABLE" in caplog.text
