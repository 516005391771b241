"""Calls in processes of their own: answers, exceptions, deaths, and what is left of them."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from zero.base.errors import UserError
from zero.planning.process_per_call import ProcessPerCall


def note_process(file: str) -> None:
    with Path(file).open("a") as lines:
        lines.write(f"{os.getpid()}\n")


def answer_beside_a_thread(text: str) -> str:
    """A process with such a thread ends after a minute by itself."""
    threading.Thread(target=time.sleep, args=(60,)).start()
    return text


def refuse() -> None:
    raise UserError("no such slice")


def answer_at_length() -> bytes:
    """More than a pipe holds."""
    return bytes(64 << 20)


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[ProcessPerCall]:
    pool = ProcessPerCall(2, [], note_process, (str(tmp_path / "processes"),))
    yield pool
    pool.kill()
    pool.shutdown()


def test_each_call_has_a_process_that_ends_with_its_answer(calls: ProcessPerCall, tmp_path: Path) -> None:
    began = time.monotonic()
    assert [calls.submit(answer_beside_a_thread, text).result() for text in ("a", "b")] == ["a", "b"]
    assert time.monotonic() - began < 50
    processes = {int(line) for line in (tmp_path / "processes").read_text().split()}
    assert len(processes) == 2 and not any(psutil.pid_exists(process) for process in processes)


def test_exceptions_and_deaths(calls: ProcessPerCall) -> None:
    with pytest.raises(UserError, match="no such slice"):
        calls.submit(refuse).result()
    with pytest.raises(BrokenProcessPool):
        calls.submit(os.abort).result()


def test_a_death_within_an_answer(calls: ProcessPerCall, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed when a part of its answer has arrived."""
    recv = Connection.recv

    def recv_after_a_kill(connection: Connection) -> object:
        assert connection.poll(60)
        for process in calls._running:
            process.kill()
            process.join()
        return recv(connection)

    monkeypatch.setattr(Connection, "recv", recv_after_a_kill)
    with pytest.raises(BrokenProcessPool):
        calls.submit(answer_at_length).result()


def test_killed_calls_end_at_once(calls: ProcessPerCall) -> None:
    pending = [calls.submit(time.sleep, 60) for _ in range(3)]
    time.sleep(0.5)
    calls.kill()
    began = time.monotonic()
    calls.shutdown()
    assert time.monotonic() - began < 30
    assert all(call.cancelled() or isinstance(call.exception(), BrokenProcessPool) for call in pending)
