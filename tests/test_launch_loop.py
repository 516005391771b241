"""trainLoop.sh with stand-ins for a trainer: it starts again, forwards signals, and writes the status."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.launching import (
    REPOSITORY,
    copy_loop,
    end_group,
    statuses,
    write_program,
)


@pytest.mark.parametrize(
    ("statuses", "ended"),
    [
        *((str(status), status) for status, outcome, _ in statuses() if outcome != "failed"),
        *(("1 134 0", 0), ("1 2", 2), ("134 137 134 0", 134)),
    ],
)
def test_loop_starts_again(tmp_path: Path, statuses: str, ended: int) -> None:
    """`loop` starts again until training is finished, stopped or refused."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    (tmp_path / "statuses").write_text(statuses.replace(" ", "\n") + "\n")
    python.write_text(
        '#!/usr/bin/env bash\nprintf "%s|" "$@" >>calls\necho >>calls\n'
        "status=$(head -n 1 statuses)\nsed -i 1d statuses\nexit $status\n"
    )
    python.chmod(0o755)
    copy_loop(tmp_path)
    script = tmp_path / "trainLoop.sh"
    (tmp_path / "sleep").write_text(f'#!/usr/bin/env bash\necho "pause $1" >>{tmp_path}/calls\n')
    (tmp_path / "sleep").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TRAIN_ATTEMPTS": "3"}
    done = subprocess.run(["bash", script, "a=b c"], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == ended, done.stderr
    assert done.stderr.count("a library aborted (SIGABRT), XLA most likely") == statuses.split().count("134")
    assert ("gave up after 3 failed starts" in done.stderr) == (ended == 134)
    starts = min(3, len(statuses.split()))
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[::2] == ["main_zero.py|--resume=auto|a=b c|"] * starts
    assert calls[1::2] == ["pause 30"] * (starts - 1)
    assert (tmp_path / "train.status").read_text() == f"{ended}\n"


def test_loop_without_an_environment(tmp_path: Path) -> None:
    """`loop` ends at once and names what to call."""
    copy_loop(tmp_path)
    done = subprocess.run(["bash", tmp_path / "trainLoop.sh"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 127 and "call prepareTPUVM.sh" in done.stderr


def test_loop_is_stopped_in_a_pause(tmp_path: Path) -> None:
    """`loop` ends, and the reader of its log does not wait for the rest of the pause."""
    copy_loop(tmp_path)
    write_program(tmp_path / ".venv/bin/python", "#!/usr/bin/env bash\nexit 1\n")
    loop = subprocess.Popen(
        ["bash", tmp_path / "trainLoop.sh"],
        env={**os.environ, "TRAIN_PAUSE_SECONDS": "600"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert loop.stderr is not None
        while "starting again" not in loop.stderr.readline():
            pass
        time.sleep(0.2)
        loop.terminate()
        loop.communicate(timeout=30)
        assert loop.returncode == 1
    finally:
        end_group(loop)


def test_loop_is_stopped_before_it_knows_the_trainer(tmp_path: Path) -> None:
    """`loop` hands on a signal that came between two starts."""
    copy_loop(tmp_path)
    script = (tmp_path / "trainLoop.sh").read_text()
    early = script.replace("record running\n", "record running\nkill -s TERM $$\n")
    assert early != script
    (tmp_path / "trainLoop.sh").write_text(early)
    write_program(tmp_path / ".venv/bin/python", "#!/usr/bin/env bash\nsleep 60 & wait\n")
    loop = subprocess.Popen(["bash", tmp_path / "trainLoop.sh"], start_new_session=True)
    try:
        assert loop.wait(30) == 128 + signal.SIGUSR1
    finally:
        end_group(loop)


def test_loop_survives_a_signal(tmp_path: Path) -> None:
    """`loop` survives a signal and records how training ended.

    As where a machine shuts down, which signals every process.
    """
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/usr/bin/env bash\ntrap '' HUP USR1\ntrap 'sleep 0.5; exit 75' TERM\ntouch ready\nsleep 60 & wait\n"
    )
    python.chmod(0o755)
    copy_loop(tmp_path)
    loop = subprocess.Popen(["bash", tmp_path / "trainLoop.sh"], start_new_session=True)
    try:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.killpg(loop.pid, signal.SIGHUP)
        os.killpg(loop.pid, signal.SIGTERM)
        assert loop.wait(30) == 75
    finally:
        loop.kill()
    assert (tmp_path / "train.status").read_text() == "75\n"


TRAINER = """
import sys, time
sys.path.insert(0, {repository!r})
from zero.hosts.signals import PREEMPTED, stop_requests
with stop_requests() as received:
    open("ready", "w").close()
    while not received:
        time.sleep(0.01)
    time.sleep(1)  # saves a checkpoint; a second request would end it at once
sys.exit(PREEMPTED)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_whole_group", [False, True], ids=["container", "machine"])
@pytest.mark.parametrize("hangup", ["default", "ignore"], ids=["terminal", "nohup"])
def test_loop_forwards_a_signal(tmp_path: Path, number: int, is_whole_group: bool, hangup: str) -> None:
    """`loop` forwards a signal, which counts once, also under nohup.

    A container signals its first process alone; a machine or a terminal all of them, the trainer included.
    """
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    (tmp_path / "trainer.py").write_text(TRAINER.format(repository=str(REPOSITORY)))
    python.write_text(f"#!/usr/bin/env bash\nexec {sys.executable} trainer.py\n")
    python.chmod(0o755)
    copy_loop(tmp_path)
    signals = ["env", "--default-signal=INT,TERM,USR1", f"--{hangup}-signal=HUP"]  # not those of this process
    loop = subprocess.Popen([*signals, "bash", tmp_path / "trainLoop.sh"], start_new_session=True)
    try:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        (os.killpg if is_whole_group else os.kill)(loop.pid, number)
        assert loop.wait(30) == 75
    finally:
        end_group(loop)
    assert (tmp_path / "train.status").read_text() == "75\n"


def test_status_is_never_read_half_written(tmp_path: Path) -> None:
    """Where the disk is full as well: what was written before stays."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/usr/bin/env bash\ncat train.status >seen\nls -i train.status >inode\nexit 2\n")
    python.chmod(0o755)
    copy_loop(tmp_path)
    assert subprocess.run(["bash", tmp_path / "trainLoop.sh"], timeout=30).returncode == 2
    assert (tmp_path / "seen").read_text() == "running\n" and (tmp_path / "train.status").read_text() == "2\n"
    assert (tmp_path / "inode").read_text().split()[0] != str((tmp_path / "train.status").stat().st_ino)
