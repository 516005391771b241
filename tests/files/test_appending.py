"""What is appended is written whole or not at all, also where the disk takes a part of it, or nothing."""

import contextlib
import logging
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zero.files.appending import HoldingLog, LogFile, append

Limit = Callable[[int], None]


@pytest.fixture
def limit() -> Iterator[Limit]:
    """Sets the most bytes of a file: like a disk that fills up, it takes a part of a write first."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield set_limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_part_is_taken_back(tmp_path: Path, limit: Limit) -> None:
    """A write of which the disk takes a part leaves the file as it was."""
    path = tmp_path / "log"
    append(path, b"first\n")
    limit(9)
    with pytest.raises(OSError, match=r"File too large: '.*log'"):
        append(path, b"second\n")
    assert path.read_bytes() == b"first\n"
    limit(13)
    append(path, b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"


def test_entries_are_held_until_there_is_room(tmp_path: Path, limit: Limit, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost where the disk has space again, and one warning tells of the time without."""
    caplog.set_level(logging.INFO)
    path = tmp_path / "log"
    with HoldingLog(path, "a line") as log:
        log.append(b"0\n")
        limit(3)
        for number in range(1, 5):
            log.append(b"%d\n" % number)
        assert path.read_bytes() == b"0\n"
        limit(100)
        log.append(b"5\n")
        assert path.read_bytes() == b"0\n1\n2\n3\n4\n5\n"
        limit(12)
        log.append(b"6\n")
    assert path.read_bytes() == b"0\n1\n2\n3\n4\n5\n"
    failed, again, refused, lost = caplog.messages
    assert failed.startswith(f"{path}: a line could not be written (File too large)") and "intact" in failed
    assert "has space again" in again and refused == failed
    assert lost == f"{path}: the last 1 entries are lost: File too large"


def test_entries_held_to_the_end_are_written(tmp_path: Path, limit: Limit) -> None:
    """What is held is also tried when the file is closed."""
    path = tmp_path / "log"
    with HoldingLog(path, "a line") as log:
        limit(0)
        log.append(b"1\n")
        limit(100)
    assert path.read_bytes() == b"1\n"


def test_log_that_cannot_be_written_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A log file on a full disk is one line on standard error, and no traceback per record."""
    handler = LogFile("/dev/full")
    for number in range(3):
        handler.handle(logging.makeLogRecord({"msg": f"record {number}"}))
    with contextlib.suppress(OSError):  # it tries again
        handler.close()
    assert capsys.readouterr().err == (
        f"/dev/full: the log could not be written ({os.strerror(28)}); its lines are only shown here\n"
    )
