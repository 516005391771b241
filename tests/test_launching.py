"""slice.sh against a stub of gcloud that records what would be called, and trainLoop.sh around a stub of Python."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
STUB = """#!/usr/bin/env bash
# Writes down its arguments; the states of the slice and of training come from files, a line a question.
cd "$(dirname "$0")" || exit 1
printf '%q ' "$@" >>calls
echo >>calls
answer() { head -n 1 "$1"; sed -i '1{$!d}' "$1"; }  # the last answer stays
case "$*" in
    *describe*) answer states ;;
    *train.status*) answer statuses ;;
esac
"""


class Slice:
    """A checkout with slice.sh, and the stub on the PATH."""

    def __init__(self, place: Path) -> None:
        self.bin, self.checkout = place / "bin", place / "checkout"
        self.bin.mkdir()
        (self.bin / "gcloud").write_text(STUB)
        (self.bin / "gcloud").chmod(0o755)
        self.checkout.mkdir()
        (self.checkout / "slice.sh").write_text((REPOSITORY / "slice.sh").read_text())
        git = ["git", "-C", str(self.checkout), "-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "empty"], check=True)

    def run(self, *arguments: str, states: str = "ACTIVE", statuses: str = "") -> subprocess.CompletedProcess[str]:
        (self.bin / "states").write_text(states.replace(",", "\n") + "\n")
        (self.bin / "statuses").write_text(statuses.replace(",", "\n") + "\n")
        (self.bin / "calls").write_text("")
        environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "SLICE_POLL_SECONDS": "0"}
        command = ["bash", str(self.checkout / "slice.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[list[str]]:
        """The arguments of each call, without `compute tpus` and without questions."""
        lines = [shlex.split(line) for line in (self.bin / "calls").read_text().splitlines()]
        assert all(line[:2] == ["compute", "tpus"] and "--zone=us-a" in line for line in lines)
        return [line[2:] for line in lines if "describe" not in line and "train.status" not in str(line)]


@pytest.fixture
def tpus(tmp_path: Path) -> Slice:
    return Slice(tmp_path)


def test_create_waits_until_the_slice_is_there(tpus: Slice) -> None:
    done = tpus.run("create", "run", "us-a", "v3-32", "--spot", states="WAITING_FOR_RESOURCES,PROVISIONING,ACTIVE")
    assert done.returncode == 0, done.stderr
    (call,) = tpus.calls()
    assert call[:3] == ["queued-resources", "create", "run"]
    assert {"--node-id=run", "--accelerator-type=v3-32", "--runtime-version=tpu-ubuntu2204-base", "--spot"} <= {*call}
    assert "run is PROVISIONING" in done.stdout and "run is there" in done.stdout


def test_create_says_that_a_request_failed(tpus: Slice) -> None:
    done = tpus.run("create", "run", "us-a", "v6e-8", states="FAILED")
    assert done.returncode == 1 and "run is FAILED" in done.stderr and "delete" in done.stderr
    assert "--runtime-version=v2-alpha-tpuv6e" in tpus.calls()[0]


def test_setup_brings_this_commit_to_all_workers(tpus: Slice) -> None:
    assert tpus.run("setup", "run", "us-a").returncode == 0
    copy, prepare = tpus.calls()
    assert copy[:2] == ["tpu-vm", "scp"] and "--worker=all" in copy and copy[2].endswith("zero.tar.gz")
    assert prepare[:3] == ["tpu-vm", "ssh", "run"] and "--worker=all" in prepare
    assert prepare[4].endswith("zero/prepareTPUVM.sh")


def test_launch_keeps_every_argument_whole(tpus: Slice) -> None:
    assert tpus.run("launch", "run", "us-a", "data.corpus=null", "hydra.run.dir=runs/a b").returncode == 0
    (call,) = tpus.calls()
    assert "--worker=all" in call
    inside = shlex.split(call[4].removeprefix("--command="))
    assert inside[:8] == ["cd", "zero", "&&", "tmux", "new-session", "-d", "-s", "zero"]
    loop = shlex.split(inside[8])
    assert loop[:3] == ["./trainLoop.sh", "data.corpus=null", "hydra.run.dir=runs/a b"] and "tee" in loop


@pytest.mark.parametrize(
    ("command", "worker", "part"), [("watch", "0", "tail"), ("stop", "all", "tmux send-keys -t zero C-c")]
)
def test_watch_and_stop(tpus: Slice, command: str, worker: str, part: str) -> None:
    assert tpus.run(command, "run", "us-a").returncode == 0
    (call,) = tpus.calls()
    assert f"--worker={worker}" in call and part in call[4]


def test_delete(tpus: Slice) -> None:
    assert tpus.run("delete", "run", "us-a").returncode == 0
    assert tpus.calls() == [["queued-resources", "delete", "run", "--force", "--quiet", "--zone=us-a"]]


def test_keep_asks_again_after_a_preemption(tpus: Slice) -> None:
    # Nothing there, created, trained; preempted, deleted, created again, trained to the end.
    states = ",ACTIVE,ACTIVE,ACTIVE,SUSPENDED,,ACTIVE,ACTIVE,ACTIVE"
    arguments = ("keep", "run", "us-a", "v3-32", "--spot", "model.size=1_1b")
    done = tpus.run(*arguments, states=states, statuses="none,running,none,0")
    assert done.returncode == 0, done.stderr
    kinds = [call[1] for call in tpus.calls()]
    start = ["create", "scp", "ssh", "ssh"]
    assert kinds == [*start, "delete", *start]
    assert "run has finished" in done.stdout


def test_keep_goes_on_when_a_stopped_slice_is_not_taken_away(tpus: Slice) -> None:
    done = tpus.run("keep", "run", "us-a", "v3-8", statuses="none,75,running,0")
    assert done.returncode == 0, done.stderr
    assert [call[1] for call in tpus.calls()] == ["scp", "ssh", "ssh", "ssh"]  # set up once, launched twice


def test_keep_launches_again_where_nothing_runs_any_more(tpus: Slice) -> None:
    done = tpus.run("keep", "run", "us-a", "v3-8", statuses="none,lost,running,0")
    assert done.returncode == 0, done.stderr
    assert [call[1] for call in tpus.calls()] == ["scp", "ssh", "ssh", "ssh"]


@pytest.mark.parametrize(
    ("said", "is_there", "expected"),
    [(None, 1, "none"), ("running", 0, "running"), ("running", 1, "lost"), ("1", 1, "1")],
)
def test_keep_asks_a_worker_how_training_stands(
    tpus: Slice, tmp_path: Path, said: str | None, is_there: int, expected: str
) -> None:
    worker = tmp_path / "worker"
    (worker / "zero").mkdir(parents=True)
    if said is not None:
        (worker / "zero" / "train.status").write_text(f"{said}\n")
    (worker / "tmux").write_text(f"#!/bin/sh\nexit {is_there}\n")
    (worker / "tmux").chmod(0o755)
    tpus.run("keep", "run", "us-a", "v3-8", statuses="0")
    asked = next(line for line in (tpus.bin / "calls").read_text().splitlines() if "train.status" in line)
    (command,) = (word.removeprefix("--command=") for word in shlex.split(asked) if word.startswith("--command="))
    environment = {**os.environ, "PATH": f"{worker}:{os.environ['PATH']}"}
    answer = subprocess.run(["bash", "-c", command], cwd=worker, env=environment, capture_output=True, text=True)
    assert answer.stdout == f"{expected}\n", answer.stderr


def test_keep_stops_when_training_failed(tpus: Slice) -> None:
    done = tpus.run("keep", "run", "us-a", "v3-8", statuses="none,1")
    assert done.returncode == 1 and "status 1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("create", "run"), "expected COMMAND NAME ZONE"),
        (("create", "run", "us-a"), "needs a TYPE"),
        (("create", "run", "us-a", "h100-8"), "h100-8"),
        (("fly", "run", "us-a"), "unknown command fly"),
    ],
)
def test_mistakes_call_nothing(tpus: Slice, arguments: tuple[str, ...], named: str) -> None:
    done = tpus.run(*arguments)
    assert done.returncode == 1 and named in done.stderr
    assert tpus.calls() == []


@pytest.mark.parametrize(
    ("statuses", "ended"), [("0", 0), ("75", 75), ("143", 143), ("129", 129), ("1 1 0", 0), ("1 1 1 1", 1)]
)
def test_the_loop_starts_again_until_finished_or_stopped(tmp_path: Path, statuses: str, ended: int) -> None:
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    (tmp_path / "statuses").write_text(statuses.replace(" ", "\n") + "\n")
    python.write_text(
        '#!/usr/bin/env bash\nprintf "%s|" "$@" >>calls\necho >>calls\n'
        "status=$(head -n 1 statuses)\nsed -i 1d statuses\nexit $status\n"
    )
    python.chmod(0o755)
    script = tmp_path / "trainLoop.sh"
    script.write_text((REPOSITORY / "trainLoop.sh").read_text())
    environment = {**os.environ, "TRAIN_ATTEMPTS": "3", "TRAIN_PAUSE_SECONDS": "0"}
    done = subprocess.run(["bash", script, "a=b c"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == ended, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["main_zero.py|--resume=auto|a=b c|"] * min(3, len(statuses.split()))
    assert (tmp_path / "train.status").read_text() == f"{ended}\n"


def test_the_loop_outlives_a_signal_and_says_how_training_ended(tmp_path: Path) -> None:
    """As where a machine shuts down, which tells every process."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/usr/bin/env bash\ntrap '' HUP\ntrap 'sleep 0.5; exit 75' TERM\ntouch ready\nsleep 60 & wait\n"
    )
    python.chmod(0o755)
    (tmp_path / "trainLoop.sh").write_text((REPOSITORY / "trainLoop.sh").read_text())
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


@pytest.mark.parametrize("script", ["slice.sh", "trainLoop.sh"])
def test_shellcheck_finds_nothing(script: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, REPOSITORY / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
