"""What is silenced around orbax is silenced there and nowhere else."""

import asyncio
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.checkpoints import save_small
from zero.checkpoints.manager import Checkpoints
from zero.checkpoints.quiet_orbax import draining_event_loops, quiet_loggers


def test_loggers_are_restored(caplog: pytest.LogCaptureFixture) -> None:
    """Loggers are restored when the last block is left."""
    caplog.set_level(logging.INFO)
    first, second = quiet_loggers(), quiet_loggers()
    for step, enter_or_leave in enumerate(
        (first.__enter__, second.__enter__, lambda: first.__exit__(None, None, None))
    ):
        enter_or_leave()
        for name in ("absl", "gcsfs", "fsspec"):
            logging.getLogger(name).info("within %d", step)
    assert not caplog.messages
    second.__exit__(None, None, None)
    logging.getLogger("absl").info("after")
    assert caplog.messages == ["after"]


def test_absl_is_silent_until_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints silence absl until they are closed."""
    caplog.set_level(logging.INFO, "absl")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save_small(checkpoints, 1)
        checkpoints.wait()
        assert not [record for record in caplog.records if record.name == "absl"]
    logging.getLogger("absl").error("after")
    assert caplog.messages[-1] == "after"


def test_import_changes_nothing_for_others() -> None:
    program = """
import asyncio, logging
import fsspec, orbax.checkpoint
loop, gs = asyncio.new_event_loop, fsspec.get_filesystem_class("gs")
names = ("absl", "gcsfs", "fsspec")
before = [(logging.getLogger(name).level, logging.getLogger(name).filters[:]) for name in names]
import zero.checkpoints.manager, zero.checkpoints.orbax_buckets
assert asyncio.new_event_loop is loop and fsspec.get_filesystem_class("gs") is gs
assert before == [(logging.getLogger(name).level, logging.getLogger(name).filters[:]) for name in names]
"""
    repository = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_event_loops_of_other_threads() -> None:
    """Event loops of other threads stay as they are."""
    plain = asyncio.new_event_loop
    made: list[asyncio.AbstractEventLoop] = []
    with draining_event_loops():
        made.append(asyncio.new_event_loop())
        other = threading.Thread(target=lambda: made.append(asyncio.new_event_loop()))
        other.start()
        other.join()
    made.append(asyncio.new_event_loop())
    for loop in made:
        loop.close()
    assert asyncio.new_event_loop is plain
    assert [type(loop) is type(made[-1]) for loop in made] == [False, True, True]
