"""Of two writers of one place, one is refused or waits, and is told who writes."""

import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

from zero.base.errors import Unavailable
from zero.files.sole_writer import sole_writer

pytestmark = pytest.mark.quick


def test_second_writer_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with sole_writer(lock, "corpus"):
        named = f"corpus: process {os.getpid()} on {socket.gethostname()} is writing here"
        with pytest.raises(Unavailable, match=named):
            with sole_writer(lock, "corpus"):
                raise AssertionError("both are in")
    assert not lock.exists()
    lock.write_text("process 1 on a machine that was lost")
    with sole_writer(lock, "corpus"):
        assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}"


def test_another_lock_stays(tmp_path: Path) -> None:
    """If somebody removes the lock file, the next writer makes its own, which the first one leaves alone."""
    lock = tmp_path / ".lock"
    with sole_writer(lock, "corpus"):
        lock.unlink()
        other = lock.open("w")
        fcntl.flock(other, fcntl.LOCK_EX)
    with other, pytest.raises(Unavailable):
        with sole_writer(lock, "corpus"):
            raise AssertionError("both are in")


def test_second_writer_waits(tmp_path: Path) -> None:
    """It begins after the first one, although that has removed the lock file that it waited for."""
    lock = tmp_path / ".lock"
    order = []
    is_waiting = threading.Event()

    def announce(line: str) -> None:
        order.append(line)
        is_waiting.set()

    def second() -> None:
        with sole_writer(lock, "corpus", announce):
            assert lock.exists()
            order.append("second")

    thread = threading.Thread(target=second)
    with sole_writer(lock, "corpus"):
        thread.start()
        assert is_waiting.wait(60)
        order.append("first")
    thread.join(60)
    assert order[1:] == ["first", "second"] and order[0].startswith("corpus: waiting for process ")
    assert not lock.exists()
