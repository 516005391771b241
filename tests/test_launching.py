"""Launchers against stubs: of gcloud, which records its calls, of Python, and of Slurm.

Of files for other launchers: their commands are accepted by the trainer, and they read its exit status.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from zero.cli import compose

REPOSITORY = Path(__file__).parent.parent
STUB = """#!/usr/bin/env bash
# Records its arguments. The states of the slice, of training, and the exit status of every other call come from files,
# one line per call; the last line stays.
cd "$(dirname "$0")" || exit 1
printf '%q ' "$@" >>calls
echo >>calls
answer() { head -n 1 "$1"; sed -i '1{$!d}' "$1"; }
case "$*" in
    *describe*) answer states ;;
    *train.status*) answer statuses ;;
    *) exit "$(answer results)" ;;
esac
"""
SLEEP = """#!/usr/bin/env bash
echo pause >>"$(dirname "$0")/calls"
"""


class Slice:
    """A checkout with slice.sh, and the stub on the PATH."""

    def __init__(self, place: Path) -> None:
        self.bin, self.checkout = place / "bin", place / "checkout"
        self.bin.mkdir()
        for program, script in (("gcloud", STUB), ("sleep", SLEEP)):
            (self.bin / program).write_text(script)
            (self.bin / program).chmod(0o755)
        self.checkout.mkdir()
        (self.checkout / "slice.sh").write_text((REPOSITORY / "slice.sh").read_text())
        git = ["git", "-C", str(self.checkout), "-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "empty"], check=True)

    def run(
        self, *arguments: str, states: str = "ACTIVE", statuses: str = "", results: str = "0"
    ) -> subprocess.CompletedProcess[str]:
        for name, lines in (("states", states), ("statuses", statuses), ("results", results)):
            (self.bin / name).write_text(lines.replace(",", "\n") + "\n")
        (self.bin / "calls").write_text("")
        environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        command = ["bash", str(self.checkout / "slice.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)

    def calls(self) -> list[list[str]]:
        """The arguments of each call that changes something, without `compute tpus`."""
        lines = [shlex.split(line) for line in (self.bin / "calls").read_text().splitlines() if line != "pause"]
        assert all(line[:2] == ["compute", "tpus"] and "--zone=us-a" in line for line in lines)
        return [line[2:] for line in lines if "describe" not in line and "train.status" not in str(line)]

    def sequence(self) -> list[str]:
        """What was called to change something, and the pauses: create, scp, ssh, delete, pause."""
        lines = [shlex.split(line) for line in (self.bin / "calls").read_text().splitlines()]
        shown = [line for line in lines if "describe" not in line and "train.status" not in str(line)]
        return [line[0] if line == ["pause"] else line[3] for line in shown]


class Worker:
    """A home directory with zero/ in it, where commands run that would go through ssh, and a stub of tmux."""

    def __init__(self, home: Path, *, is_training: bool) -> None:
        self.home = home
        (home / "zero").mkdir(parents=True)
        tmux = f"#!/usr/bin/env bash\nprintf '%q ' \"$@\" >>{home}/calls\necho >>{home}/calls\n"
        (home / "tmux").write_text(f"{tmux}[[ $1 != has-session ]] || exit {0 if is_training else 1}\n")
        (home / "tmux").chmod(0o755)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{self.home}:{os.environ['PATH']}"}
        return subprocess.run(["bash", "-c", command], cwd=self.home, env=environment, capture_output=True, text=True)

    def tmux_calls(self) -> list[list[str]]:
        return [shlex.split(line) for line in (self.home / "calls").read_text().splitlines()]


@pytest.fixture
def tpus(tmp_path: Path) -> Slice:
    return Slice(tmp_path)


def test_create_waits_for_the_slice(tpus: Slice) -> None:
    """`create` waits until the slice is active."""
    done = tpus.run("create", "run", "us-a", "v3-32", "--spot", states="WAITING_FOR_RESOURCES,PROVISIONING,ACTIVE")
    assert done.returncode == 0, done.stderr
    (call,) = tpus.calls()
    assert call[:3] == ["queued-resources", "create", "run"]
    assert {"--node-id=run", "--accelerator-type=v3-32", "--runtime-version=tpu-ubuntu2204-base", "--spot"} <= {*call}
    assert "run is PROVISIONING" in done.stdout and "run is active" in done.stdout


def test_create_says_that_a_request_failed(tpus: Slice) -> None:
    done = tpus.run("create", "run", "us-a", "v6e-8", states="FAILED")
    assert done.returncode == 1 and "run is FAILED" in done.stderr and "delete" in done.stderr
    assert "--runtime-version=v2-alpha-tpuv6e" in tpus.calls()[0]


def test_create_is_refused(tpus: Slice) -> None:
    """`create` ends when the request is refused."""
    done = tpus.run("create", "run", "us-a", "v3-8", states="", results="7")
    assert done.returncode == 7 and tpus.sequence() == ["create"]


def test_setup_copies_this_commit(tpus: Slice) -> None:
    """`setup` brings this commit to all workers."""
    assert tpus.run("setup", "run", "us-a").returncode == 0
    copy, prepare = tpus.calls()
    assert copy[:2] == ["tpu-vm", "scp"] and "--worker=all" in copy and copy[2].endswith("zero.tar.gz")
    assert prepare[:3] == ["tpu-vm", "ssh", "run"] and "--worker=all" in prepare
    assert prepare[4].endswith("zero/prepareTPUVM.sh")


def test_launch_keeps_every_argument_whole(tpus: Slice, tmp_path: Path) -> None:
    assert tpus.run("launch", "run", "us-a", "data.corpus=null", "hydra.run.dir=runs/a b").returncode == 0
    (call,) = tpus.calls()
    assert "--worker=all" in call
    worker = Worker(tmp_path / "worker", is_training=False)
    assert worker.run(call[4].removeprefix("--command=")).returncode == 0
    assert worker.tmux_calls()[-1][:5] == ["new-session", "-d", "-s", "zero", worker.tmux_calls()[-1][4]]
    loop = shlex.split(worker.tmux_calls()[-1][4])
    assert loop[:3] == ["./trainLoop.sh", "data.corpus=null", "hydra.run.dir=runs/a b"] and "tee" in loop


def test_launch_skips_training_workers(tpus: Slice, tmp_path: Path) -> None:
    """`launch` does not touch a worker that trains already."""
    assert tpus.run("launch", "run", "us-a").returncode == 0
    (call,) = tpus.calls()
    worker = Worker(tmp_path / "worker", is_training=True)
    done = worker.run(call[4].removeprefix("--command="))
    assert done.returncode == 0 and "is training already" in done.stdout
    assert [call[0] for call in worker.tmux_calls()] == ["has-session"]


@pytest.mark.parametrize(("is_training", "status"), [(False, 0), (False, 1), (True, 1)])
def test_check_examines_every_worker(tpus: Slice, tmp_path: Path, is_training: bool, status: int) -> None:
    """`check` runs the doctor with the arguments of the launch; each line names its worker."""
    assert tpus.run("check", "run", "us-a", "data.bucket_path=a b").returncode == 0
    (call,) = tpus.calls()
    assert call[:3] == ["tpu-vm", "ssh", "run"] and "--worker=all" in call
    worker = Worker(tmp_path / "worker", is_training=is_training)
    python = worker.home / "zero" / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\nprintf "%s|" "$@"; echo; exit {status}\n')
    python.chmod(0o755)
    done = worker.run(call[4].removeprefix("--command="))
    host = socket.gethostname()
    examined = f"{host}: main_zero.py|--doctor|data.bucket_path=a b|\n"
    assert (done.returncode, done.stdout) == (
        status,
        f"{host} is training: stop it first\n" if is_training else examined,
    )


@pytest.mark.parametrize(
    ("command", "worker", "part"), [("watch", "0", "tail"), ("stop", "all", "tmux send-keys -t zero C-c")]
)
def test_watch_and_stop(tpus: Slice, command: str, worker: str, part: str) -> None:
    assert tpus.run(command, "run", "us-a").returncode == 0
    (call,) = tpus.calls()
    assert f"--worker={worker}" in call and part in call[4]


def test_launch_hands_over_the_key(tpus: Slice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key reaches each worker in a file that only its user reads, and is in no argument."""
    monkeypatch.setenv("WANDB_API_KEY", "sec ret")
    copy = f'[[ $4 != scp ]] || {{ stat -c %a "$5" >{tmp_path}/mode; cp "$5" {tmp_path}/copied; }}\n'
    (tpus.bin / "gcloud").write_text(STUB.replace("answer()", f"{copy}answer()"))
    done = tpus.run("launch", "run", "us-a", "seed=1")
    assert done.returncode == 0, done.stderr
    make, scp, start = tpus.calls()
    assert "install -m 600 /dev/null zero/.environment" in str(make) and scp[-2:] == ["--worker=all", "--zone=us-a"]
    assert "tmux new-session" in str(start) and "--worker=all" in start
    assert "sec" not in (tpus.bin / "calls").read_text() + done.stdout + done.stderr
    assert (tmp_path / "mode").read_text() == "600\n" and not Path(scp[2]).exists()
    sourced = f'. {tmp_path}/copied && printf %s "$WANDB_API_KEY"'
    assert subprocess.run(["bash", "-c", sourced], capture_output=True, text=True, check=True).stdout == "sec ret"


def test_view_kill_and_bucket(tpus: Slice) -> None:
    assert tpus.run("view", "run", "us-a", "9000").returncode == 0
    (view,) = tpus.calls()
    assert "--ssh-flag=-L9000:localhost:9000" in view and "http.server 9000" in str(view)
    assert tpus.run("kill", "run", "us-a").returncode == 0
    (kill,) = tpus.calls()
    assert "--worker=all" in kill and "pkill -KILL -f main_zero.py" in str(kill)
    assert tpus.run("bucket", "my-bucket", "us-central1").returncode == 0
    made = shlex.split((tpus.bin / "calls").read_text())
    assert made[:4] == ["storage", "buckets", "create", "gs://my-bucket"] and "--location=us-central1" in made


def test_delete(tpus: Slice) -> None:
    assert tpus.run("delete", "run", "us-a").returncode == 0
    assert tpus.calls() == [["queued-resources", "delete", "run", "--force", "--quiet", "--zone=us-a"]]


SET_UP = ["scp", "ssh", "ssh"]  # the archive, prepareTPUVM.sh, trainLoop.sh


def test_keep_requests_a_preempted_slice_again(tpus: Slice) -> None:
    # Nothing there, requested, trained; preempted, deleted, requested again, trained to the end.
    states = ",WAITING_FOR_RESOURCES,ACTIVE,ACTIVE,SUSPENDED,,ACTIVE"
    arguments = ("keep", "run", "us-a", "v3-32", "--spot", "model.size=1_1b")
    done = tpus.run(*arguments, states=states, statuses="none,running,none,0")
    assert done.returncode == 0, done.stderr
    assert [call[1] for call in tpus.calls()] == ["create", *SET_UP, "delete", "create", *SET_UP]
    create, launch = tpus.calls()[0], tpus.calls()[3]
    assert "--spot" in create and "model.size=1_1b" not in create and "model.size=1_1b" in launch[4]
    assert "run has finished" in done.stdout


@pytest.mark.parametrize(
    ("states", "statuses", "results", "sequence"),
    [
        # The request is refused twice, as where no capacity is left.
        (",,,ACTIVE", "none,0", "1,1,0", ["create", "pause", "create", "pause", "create", *SET_UP]),
        # It is accepted and then fails, or is suspended before it was ever active.
        (",FAILED,,ACTIVE", "none,0", "0", ["create", "delete", "pause", "create", *SET_UP]),
        (",SUSPENDED,,ACTIVE", "none,0", "0", ["create", "delete", "pause", "create", *SET_UP]),
        # It cannot be deleted at first.
        ("FAILED,FAILED,,ACTIVE", "none,0", "1,0", ["delete", "pause", "delete", "pause", "create", *SET_UP]),
        # Each part of setup fails once, then the launch.
        ("ACTIVE", "none,none,0", "1,0", ["scp", "pause", *SET_UP]),
        ("ACTIVE", "none,none,0", "0,1,0", ["scp", "ssh", "pause", *SET_UP]),
        ("ACTIVE", "none,none,0", "0,0,1,0", [*SET_UP, "pause", *SET_UP]),
        # A launch after a stop fails once.
        ("ACTIVE", "75,75,0", "1,0", ["pause", "ssh", "pause", "pause", "ssh"]),
    ],
)
def test_keep_tries_again(tpus: Slice, states: str, statuses: str, results: str, sequence: list[str]) -> None:
    """`keep` pauses and tries again, whatever fails."""
    done = tpus.run("keep", "run", "us-a", "v3-8", states=states, statuses=statuses, results=results)
    assert done.returncode == 0, done.stderr
    assert tpus.sequence() == sequence


@pytest.mark.parametrize("status", ["75", "143", "lost"])
def test_keep_relaunches_stopped_training(tpus: Slice, status: str) -> None:
    """`keep` launches again where training was stopped and the slice is still there."""
    done = tpus.run("keep", "run", "us-a", "v3-8", statuses=f"none,{status},running,0")
    assert done.returncode == 0, done.stderr
    assert [call[1] for call in tpus.calls()] == [*SET_UP, "ssh"]  # set up once, launched twice


@pytest.mark.parametrize(
    ("written", "is_training", "expected"),
    [
        (None, False, "none"),
        ("running", True, "running"),
        ("running", False, "lost"),
        ("1", False, "1"),
        ("", True, "running"),
        ("", False, "lost"),
    ],
)
def test_status_of_training_on_a_worker(
    tpus: Slice, tmp_path: Path, written: str | None, is_training: bool, expected: str
) -> None:
    worker = Worker(tmp_path / "worker", is_training=is_training)
    if written is not None:
        (worker.home / "zero" / "train.status").write_text(f"{written}\n")
    tpus.run("keep", "run", "us-a", "v3-8", statuses="0")
    call = next(line for line in (tpus.bin / "calls").read_text().splitlines() if "train.status" in line)
    (command,) = (word.removeprefix("--command=") for word in shlex.split(call) if word.startswith("--command="))
    answer = worker.run(command)
    assert answer.stdout == f"{expected}\n", answer.stderr


def test_keep_with_empty_status(tpus: Slice) -> None:
    """`keep` asks again where the status is empty."""
    done = tpus.run("keep", "run", "us-a", "v3-8", statuses="none,,running,0")
    assert done.returncode == 0, done.stderr
    assert tpus.sequence() == [*SET_UP, "pause", "pause"]


@pytest.mark.parametrize("status", ["1", "2", "134"])
def test_keep_stops_when_training_failed(tpus: Slice, status: str) -> None:
    done = tpus.run("keep", "run", "us-a", "v3-8", statuses=f"none,{status}")
    assert done.returncode == 1 and f"status {status}" in done.stderr
    assert ("SIGABRT" in done.stderr) == (status == "134")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("create", "run"), "expected COMMAND NAME ZONE"),
        (("create", "run", "us-a"), "needs a TYPE"),
        (("create", "run", "us-a", "h100-8"), "h100-8"),
        (("keep", "run", "us-a", "h100-8"), "h100-8"),
        (("fly", "run", "us-a"), "unknown command fly"),
    ],
)
def test_mistakes_call_nothing(tpus: Slice, arguments: tuple[str, ...], named: str) -> None:
    done = tpus.run(*arguments)
    assert done.returncode == 1 and named in done.stderr
    assert tpus.sequence() == []


@pytest.mark.parametrize(
    ("statuses", "ended"),
    [("0", 0), ("2", 2), ("75", 75), ("143", 143), ("129", 129), ("1 134 0", 0), ("1 2", 2), ("134 137 134 0", 134)],
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
    script = tmp_path / "trainLoop.sh"
    script.write_text((REPOSITORY / "trainLoop.sh").read_text())
    (tmp_path / "sleep").write_text(f'#!/usr/bin/env bash\necho "pause $1" >>{tmp_path}/calls\n')
    (tmp_path / "sleep").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TRAIN_ATTEMPTS": "3"}
    done = subprocess.run(["bash", script, "a=b c"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == ended, done.stderr
    assert done.stderr.count("a library aborted (SIGABRT), XLA most likely") == statuses.split().count("134")
    starts = min(3, len(statuses.split()))
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[::2] == ["main_zero.py|--resume=auto|a=b c|"] * starts
    assert calls[1::2] == ["pause 30"] * (starts - 1)
    assert (tmp_path / "train.status").read_text() == f"{ended}\n"


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
    (tmp_path / "trainLoop.sh").write_text((REPOSITORY / "trainLoop.sh").read_text())
    signals = ["env", "--default-signal=INT,TERM,USR1", f"--{hangup}-signal=HUP"]  # not those of this process
    loop = subprocess.Popen([*signals, "bash", tmp_path / "trainLoop.sh"], start_new_session=True)
    try:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        (os.killpg if is_whole_group else os.kill)(loop.pid, number)
        assert loop.wait(30) == 75
    finally:
        os.killpg(loop.pid, signal.SIGKILL) if loop.poll() is None else None
    assert (tmp_path / "train.status").read_text() == "75\n"


def test_status_is_never_read_half_written(tmp_path: Path) -> None:
    """Where the disk is full as well: what was written before stays."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/usr/bin/env bash\ncat train.status >seen\nls -i train.status >inode\nexit 2\n")
    python.chmod(0o755)
    (tmp_path / "trainLoop.sh").write_text((REPOSITORY / "trainLoop.sh").read_text())
    assert subprocess.run(["bash", tmp_path / "trainLoop.sh"], timeout=30).returncode == 2
    assert (tmp_path / "seen").read_text() == "running\n" and (tmp_path / "train.status").read_text() == "2\n"
    assert (tmp_path / "inode").read_text().split()[0] != str((tmp_path / "train.status").stat().st_ino)


@pytest.mark.parametrize("script", ["slice.sh", "trainLoop.sh", "launch/slurm.sbatch"])
def test_shellcheck_finds_nothing(script: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, REPOSITORY / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("status", "requeued"), [(0, ""), (75, "requeue 7\n"), (2, ""), (1, "")])
def test_slurm_job_is_queued_again(tmp_path: Path, status: int, requeued: str) -> None:
    """Only where the trainer was stopped after a saved checkpoint; the arguments reach it."""
    for name, script in (("srun", f'printf "%s\\n" "$@" >words; exit {status}'), ("scontrol", 'echo "$@" >calls')):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "calls").touch()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ["bash", str(REPOSITORY / "launch" / "slurm.sbatch"), "model.size=124m"]
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=30).returncode == status
    assert (tmp_path / "calls").read_text() == requeued
    program, resume, *overrides = (tmp_path / "words").read_text().splitlines()[-5:]
    assert (program, resume) == ("main_zero.py", "--resume=auto")
    config, _ = compose(overrides)
    assert config.data.checkpoint_directory == f"{tmp_path}/runs/slurm-7/checkpoints" and config.model.size == "124m"


def test_kubernetes_job() -> None:
    """Status 75 and disruptions are no failures, status 2 ends the job; each host of the slice has a pod."""
    service, job = yaml.safe_load_all((REPOSITORY / "launch" / "gke-tpu.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule} == {
        2: "FailJob",
        75: "Ignore",
    }
    assert all(rule["onExitCodes"]["containerName"] == container["name"] for rule in rules if "onExitCodes" in rule)
    config, _ = compose(container["args"])
    chips = job["spec"]["completions"] * container["resources"]["limits"]["google.com/tpu"]
    assert config.plan.topology == f"v5e-{chips}" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_skypilot_task() -> None:
    """Its commands are accepted, and a stop after a saved checkpoint is started again."""
    task = yaml.safe_load((REPOSITORY / "launch" / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    values = task["envs"] | {"BUCKET": "b", "SKYPILOT_TASK_ID": "t"}
    for name, value in values.items():
        task["run"] = task["run"].replace(f"${name}", value)
    doctor, loop = (line.split() for line in task["run"].splitlines() if not line.startswith("#"))
    assert (doctor[1:3], loop[:2]) == (["main_zero.py", "--doctor"], ["exec", "./trainLoop.sh"])
    compose(doctor[3:])
    assert compose(loop[2:])[0].data.bucket_path == "b"


def test_image_has_what_it_copies() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    sent = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent and all((REPOSITORY / name).exists() for name in copied)
