"""What is silenced around orbax is silenced there and nowhere else."""

import asyncio
import gc
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tensorstore

from tests.helpers.checkpoints import META, make_state, placed, save_small
from tests.helpers.disks import fill
from zero.base.errors import UserError
from zero.checkpoints.manager import Checkpoints
from zero.checkpoints.quiet_orbax import drain_loops_of_orbax, quiet_loggers, run_to_the_end


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
    repository = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_errors_of_a_full_disk_are_one_line(
    small_disk: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A save that finds no room ends in one line; tensorstore and asyncio print no tracebacks of its other arrays."""
    layout, axis = placed(8, 3)
    state = make_state(layout, axis)
    for free in (16, 48, 80, 112):  # KiB
        place = small_disk / f"checkpoints-{free}"
        filler = fill(small_disk)
        os.truncate(filler, max(0, filler.stat().st_size - 1024 * free))
        # Outside, because another array may fail while the checkpoints are closed.
        with pytest.raises(UserError) as caught, Checkpoints(place, keep=1) as checkpoints:
            checkpoints.save(1, state, layout, META)
            checkpoints.wait()
        assert str(caught.value) == (
            f"{place}: the checkpoint could not be written: No space left on device. Earlier checkpoints are intact: "
            "--resume continues from the newest of them"
        )
        while place.exists():  # a thread of orbax may still write there
            shutil.rmtree(place, ignore_errors=True)
        filler.unlink()
    gc.collect()  # asyncio reports an error that nobody has awaited when its task is collected
    printed = capfd.readouterr().err + caplog.text
    assert "Traceback" not in printed and "Event loop is closed" not in printed


def test_event_loops_of_others_stay() -> None:
    """The event loops of other programs are asyncio's own."""
    plain = asyncio.new_event_loop
    drain_loops_of_orbax()
    assert asyncio.new_event_loop is plain


def test_first_error_is_raised_when_all_tasks_have_ended() -> None:
    ended = []

    async def fail(number: int) -> None:
        await asyncio.sleep(0.01 * number)
        ended.append(number)
        raise OSError(f"error {number}")

    async def fail_together() -> None:
        await asyncio.gather(*(fail(number) for number in range(3)))

    with pytest.raises(OSError, match="error 0"):
        run_to_the_end(fail_together())
    assert ended == [0, 1, 2]


def test_tasks_that_are_started_while_others_end_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else tensorstore, whose array is still on its way, prints that the event loop is closed."""
    promise, array = tensorstore.Promise[None].new()
    ignored: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: ignored.append(error.exc_value))

    async def fail(after: float) -> None:
        await asyncio.sleep(after)
        raise OSError(f"after {after}")

    async def write() -> None:
        await array
        ended.append("written")

    async def write_later() -> None:
        await asyncio.sleep(0.02)
        await asyncio.gather(write(), fail(0))

    async def save() -> None:
        await asyncio.gather(fail(0.01), write_later())

    ended: list[str] = []
    timer = threading.Timer(0.1, promise.set_result, (None,))
    timer.start()
    with pytest.raises(OSError, match=r"after 0\.01"):
        run_to_the_end(save())
    timer.join()
    assert ended == ["written"] and not ignored


def test_threads_of_orbax_that_outlive_a_block_stay_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A failed save leaves threads that log its error once more, on a busy machine after all is closed."""

    class Late(threading.Thread):
        def run(self) -> None:
            is_closed.wait()
            logging.getLogger("absl").error("late")

    is_closed = threading.Event()
    of_orbax, other = Late(), Late()
    Late.__module__ = "orbax.checkpoint"
    with quiet_loggers():
        of_orbax.start()
    is_closed.set()
    of_orbax.join()
    assert caplog.messages == []
    other.start()
    other.join()
    assert caplog.messages == ["late"]
