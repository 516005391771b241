"""Launchers against stand-ins for gcloud and ssh, of Python, and of Slurm.

Commands for workers are run by a shell in the home directory of each, as ssh would. Of files for other launchers: their
commands are accepted by the trainer, and they read its exit status.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from zero.commands.cli import compose
from zero.hosts.signals import COMPANIONS, PREEMPTED, SIGNALS

REPOSITORY = Path(__file__).parent.parent
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
GCLOUD = r"""#!/usr/bin/env bash
# Records its arguments. The states of the slice come from a file, one line per call; the last line stays. An empty line
# is a slice that does not exist, ! an error. Where there are workers, ssh and scp reach them; else the status of
# training, and the exit status of every other call, come from files as well.
cd "$(dirname "$0")" || exit 1
printf -v call '%s\037' "$@"
# Slices are called at the same time: cat appends in one write, where printf has one for each line of an argument.
printf '%s\036' "$call" >"call.$$"
cat "call.$$" >>calls
answer() { head -n 1 "$1"; sed -i '1{$!d}' "$1"; }
homes() { case "$*" in *--worker=all*) ls -d ../homes/* ;; *) echo ../homes/0 ;; esac; }
describe() {
    state=$(answer states)
    case $state in
        "") echo "ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource was not found" >&2 ;;
        !*) echo "${state#!}" >&2 ;;
        *) echo "$state" && return ;;
    esac
    return 1
}
ssh() { # the status of the first worker that failed, and 255 for one whose shell was killed
    local home word command= status failed=0
    for word in "$@"; do [[ $word != --command=* ]] || command=${word#--command=}; done
    for home in $(homes "$@"); do
        status=0
        (cd "$home" && HOME=$PWD TMUX_TMPDIR=$PWD/tmux exec "$BASH" -c "$command") || status=$?
        ((status <= 128)) || status=255
        ((failed)) || failed=$status
    done
    return "$failed"
}
scp() { for home in $(homes "$@"); do cp "$1" "$home/${2#*:}" || return; done; }
case "$*" in
    *describe*) describe ;;
    *"tpu-vm ssh"*) if [[ -d ../homes ]]; then ssh "$@"; elif [[ $* == *"; training_status "* ]]; then answer statuses
        else exit "$(answer results)"; fi ;;
    *"tpu-vm scp"*) if [[ -d ../homes ]]; then scp "${@:5}"; else exit "$(answer results)"; fi ;;
    *) exit "$(answer results)" ;;
esac
"""
SLEEP = r"""#!/usr/bin/env bash
printf 'pause\037\036' >>"$(dirname "$0")/calls"
"""
SSH_KEYGEN = """#!/usr/bin/env bash
[[ ! -e $HOME/.ssh/passphrase ]]
"""
SSH_ADD = """#!/usr/bin/env bash
case $1 in -L) cat "$HOME/.ssh/agent" ;; *) echo "$@" >>"$HOME/.ssh/added"; cat "$1.pub" >>"$HOME/.ssh/agent" ;; esac
"""
SLEEPER = r"""
import os, signal, sys, time
with open("arguments", "w") as file:
    file.write("\n".join(sys.argv[1:]))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
with open("trainer.pid", "w") as file:
    file.write(str(os.getpid()))
print("training", flush=True)
time.sleep(60)
"""


def write_program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def copy_loop(checkout: Path) -> None:
    """Copies `trainLoop.sh` and what it reads."""
    (checkout / "launch").mkdir(parents=True, exist_ok=True)
    for name in ("trainLoop.sh", "launch/exit-statuses.sh"):
        shutil.copy(REPOSITORY / name, checkout / name)


def statuses() -> list[tuple[int, str, str]]:
    """The list of launch/exit-statuses.sh: status, outcome, meaning."""
    lines = re.findall(r"^(\d+) (\w+) (.+)$", (REPOSITORY / "launch/exit-statuses.sh").read_text(), re.MULTILINE)
    return [(int(status), outcome, meaning) for status, outcome, meaning in lines]


def with_outcome(wanted: str) -> list[int]:
    return [status for status, outcome, _ in statuses() if outcome == wanted]


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def end_group(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Kills a process that leads a group, and those that it left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Slice:
    """A checkout with slice.sh, and the stand-ins on the PATH."""

    def __init__(self, place: Path) -> None:
        self.place, self.bin, self.checkout = place, place / "bin", place / "checkout"
        programs = {"gcloud": GCLOUD, "sleep": SLEEP, "ssh-keygen": SSH_KEYGEN, "ssh-add": SSH_ADD}
        for program, script in programs.items():
            write_program(self.bin / program, script)
        self.keys = place / ".ssh"
        self.keys.mkdir()
        (self.keys / "google_compute_engine").touch()
        (self.keys / "google_compute_engine.pub").write_text("ssh-rsa AAAA me@laptop\n")
        (self.keys / "agent").write_text("ssh-rsa CCCC another\n")
        copy_loop(self.checkout)
        shutil.copy(REPOSITORY / "slice.sh", self.checkout)
        self.git("init", "-q")
        self.git("commit", "-q", "--allow-empty", "-m", "empty")

    def git(self, *arguments: str) -> None:
        git = ["git", "-C", str(self.checkout), "-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run([*git, *arguments], check=True)

    def run(
        self,
        *arguments: str,
        states: str = "ACTIVE",
        statuses: str = "",
        results: str = "0",
        environment: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        for name, lines in (("states", states), ("statuses", statuses), ("results", results)):
            (self.bin / name).write_text(lines.replace(",", "\n") + "\n")
        (self.bin / "calls").write_text("")
        variables = {name: value for name, value in os.environ.items() if name not in ("SSH_AUTH_SOCK", "TMUX")}
        variables |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.place)} | (environment or {})
        command = ["bash", str(self.checkout / "slice.sh"), *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)

    def recorded(self) -> list[list[str]]:
        """The arguments of each call, and pauses."""
        return [call.split("\037")[:-1] for call in (self.bin / "calls").read_text().split("\036")[:-1]]

    def changes(self) -> list[list[str]]:
        """Calls that change something, and pauses."""
        asked = [call for call in self.recorded() if "describe" in call or asked_function(call) == ["training_status"]]
        return [call for call in self.recorded() if call not in asked]

    def calls(self) -> list[list[str]]:
        """The arguments of each call that changes something, without `compute tpus`."""
        calls = [call for call in self.changes() if call != ["pause"]]
        assert all(call[:2] == ["compute", "tpus"] and "--zone=us-a" in call for call in calls)
        return [call[2:] for call in calls]

    def sequence(self) -> list[str]:
        """What was called to change something, and the pauses: create, scp, ssh, delete, pause."""
        return [call[0] if call == ["pause"] else call[3] for call in self.changes()]


def asked_function(call: list[str]) -> list[str]:
    """The function that a worker runs, with its arguments."""
    for word in call:
        if word.startswith("--command="):
            return shlex.split(word.rpartition("; ")[2])
    return []


class Workers:
    """Homes of two workers beside the stand-in for gcloud, set up with a trainer that sleeps."""

    def __init__(self, tpus: Slice) -> None:
        self.homes = [tpus.place / "homes" / number for number in ("0", "1")]
        self.places = [home / "zero" for home in self.homes]
        for home, place in zip(self.homes, self.places, strict=True):
            copy_loop(place)
            (place / "main_zero.py").write_text(SLEEPER)
            (place / ".venv/bin").mkdir(parents=True)
            (place / ".venv/bin/python").symlink_to(os.path.realpath(sys.executable))
            (home / "tmux").symlink_to(tempfile.mkdtemp(prefix="tmux-"))  # the path of a socket has to be short

    def tmux(self, number: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TMUX_TMPDIR": str((self.homes[number] / "tmux").resolve())}
        return subprocess.run(["tmux", *arguments], env=environment, capture_output=True, text=True)

    def trainers(self) -> list[int]:
        """Ids of the trainers, once they train."""
        pids = [place / "trainer.pid" for place in self.places]
        wait_for(lambda: all(pid.exists() and pid.read_text() for pid in pids))
        return [int(pid.read_text()) for pid in pids]

    def end(self) -> None:
        for number, place in enumerate(self.places):
            self.tmux(number, "kill-server")
            if (place / "trainer.pid").exists() and is_alive(pid := int((place / "trainer.pid").read_text())):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree((self.homes[number] / "tmux").resolve())


@pytest.fixture
def tpus(tmp_path: Path) -> Slice:
    return Slice(tmp_path)


@pytest.fixture
def workers(tpus: Slice) -> Iterator[Workers]:
    homes = Workers(tpus)
    yield homes
    homes.end()


needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


def test_create_waits_for_the_slice(tpus: Slice) -> None:
    """`create` waits until the slice is active."""
    done = tpus.run(
        "create", "run", "us-a", "v3-32", "--spot", states=",WAITING_FOR_RESOURCES,PROVISIONING,ACTIVE v3-32"
    )
    assert done.returncode == 0, done.stderr
    (call,) = tpus.calls()
    assert call[:3] == ["queued-resources", "create", "run"]
    assert {"--node-id=run", "--accelerator-type=v3-32", "--runtime-version=tpu-ubuntu2204-base", "--spot"} <= {*call}
    assert "the request is PROVISIONING" in done.stdout and "run is active" in done.stdout


def test_create_says_that_a_request_failed(tpus: Slice) -> None:
    done = tpus.run("create", "run", "us-a", "v6e-8", states=",FAILED")
    assert done.returncode == 1 and "run is FAILED" in done.stderr and "delete" in done.stderr
    assert "--runtime-version=v2-alpha-tpuv6e" in tpus.calls()[0]


def test_create_is_refused(tpus: Slice) -> None:
    """`create` ends when the request is refused."""
    done = tpus.run("create", "run", "us-a", "v3-8", states="", results="7")
    assert done.returncode == 7 and tpus.sequence() == ["create"]


@pytest.mark.parametrize("states", ["ACTIVE v3-8", "PROVISIONING v3-8,PROVISIONING v3-8,ACTIVE v3-8"])
def test_create_again(tpus: Slice, states: str) -> None:
    """A second `create` requests nothing and waits."""
    done = tpus.run("create", "run", "us-a", "v3-8", states=states)
    assert done.returncode == 0 and tpus.calls() == []
    assert "exists already" in done.stdout and "run is active" in done.stdout


@pytest.mark.parametrize("command", ["create", "keep"])
def test_a_slice_of_another_type(tpus: Slice, command: str) -> None:
    done = tpus.run(command, "run", "us-a", "v3-8", states="ACTIVE v3-32")
    assert done.returncode == 1 and "as v3-32 instead of v3-8" in done.stderr and tpus.calls() == []


def test_create_several_slices(tpus: Slice) -> None:
    """The number before the type is that of the nodes, whose names are made of the prefix."""
    states = ",PROVISIONING v5litepod-16 2,ACTIVE v5litepod-16 2"
    done = tpus.run("create", "run", "us-a", "2xv5litepod-16", "--spot", states=states)
    assert done.returncode == 0, done.stderr
    (call,) = tpus.calls()
    assert {"--node-count=2", "--node-prefix=run", "--accelerator-type=v5litepod-16", "--spot"} <= {*call}
    assert "--runtime-version=v2-alpha-tpuv5-lite" in call and "--node-id=run" not in call
    done = tpus.run("create", "run", "us-a", "4xv5litepod-16", states="ACTIVE v5litepod-16 2")
    assert done.returncode == 1 and "as 2xv5e-16 instead of 4xv5litepod-16" in done.stderr


@pytest.mark.parametrize(
    ("name", "accelerator", "version"),
    [
        ("v5e-16", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5litepod-16", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("2xv5e-16", "v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("tpu7x-8", "tpu7x-8", "v2-alpha-tpu7-ubuntu2404"),
    ],
)
def test_names_of_presets_and_plans(tpus: Slice, name: str, accelerator: str, version: str) -> None:
    """A slice has one name everywhere; gcloud is given Google's."""
    count = " 2" if name.startswith("2x") else ""
    done = tpus.run("create", "run", "us-a", name, states=f",ACTIVE {accelerator}{count}")
    assert done.returncode == 0, done.stderr
    (call,) = tpus.calls()
    assert {f"--accelerator-type={accelerator}", f"--runtime-version={version}"} <= {*call}


@pytest.mark.parametrize("script", ["slice.sh", "prepareTPUVM.sh", "trainLoop.sh"])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_scripts_print_help(script: str, option: str) -> None:
    """The comment at their head, in lines that a terminal of 80 columns shows whole, and they do nothing else."""
    done = subprocess.run([REPOSITORY / script, option], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert f"./{script} " in lines[0] and 6 <= len(lines) < 45 and max(map(len, lines)) < 80
    assert "#" not in done.stdout


def test_workers_of_several_slices(tpus: Slice) -> None:
    """What concerns all workers reaches those of each slice; the log is that of the first slice's worker 0."""
    two = "ACTIVE v5litepod-16 2"

    def calls_of(command: str) -> list[list[str]]:
        done = tpus.run(command, "run", "us-a", states=two)
        assert done.returncode == 0, done.stderr
        return sorted(call[1:4] for call in tpus.calls())

    assert calls_of("stop") == [["ssh", "run-0", "--worker=all"], ["ssh", "run-1", "--worker=all"]]
    assert calls_of("watch") == [["ssh", "run-0", "--worker=0"]]
    copies = [call[2] for call in calls_of("setup") if call[0] == "scp"]
    assert copies == ["run-0:", "run-1:"]
    failing = tpus.run("stop", "run", "us-a", states=two, results="3")
    assert failing.returncode == 3
    unknown = tpus.run("stop", "run", "us-a", states="!ERROR: Reauthentication failed")
    assert unknown.returncode == 1 and "Reauthentication failed" in unknown.stderr and tpus.calls() == []


def test_keep_several_slices(tpus: Slice) -> None:
    """`keep` asks worker 0 of the first slice, and launches on all."""
    states = ",ACTIVE v6e-8 2"
    done = tpus.run("keep", "run", "us-a", "2xv6e-8", states=states, statuses="none,0")
    assert done.returncode == 0, done.stderr
    created, *others = tpus.calls()
    assert "--node-count=2" in created
    launched = [call[2] for call in others if asked_function(call)[:1] == ["start_training"]]
    assert sorted(launched) == ["run-0", "run-1"]


def test_create_with_expired_login(tpus: Slice) -> None:
    """`create` shows gcloud's error and ends: at once before the request, after ten in a row while it waits."""
    error = "!ERROR: Reauthentication failed"
    done = tpus.run("create", "run", "us-a", "v3-8", states=error)
    assert done.returncode == 1 and "Reauthentication failed" in done.stderr and tpus.sequence() == []
    done = tpus.run("create", "run", "us-a", "v3-8", states=f",PROVISIONING,{error}")
    assert done.returncode == 1 and done.stderr.count("Reauthentication failed") == 10
    assert tpus.sequence() == ["create", *["pause"] * 10]


def test_create_survives_a_lost_connection(tpus: Slice) -> None:
    """`create` waits on after errors that pass."""
    states = ",PROVISIONING," + "!lost," * 9 + "PROVISIONING," + "!lost," * 9 + "ACTIVE"
    assert tpus.run("create", "run", "us-a", "v3-8", states=states).returncode == 0


def test_create_when_the_request_is_gone(tpus: Slice) -> None:
    """`create` ends where the request was deleted meanwhile."""
    done = tpus.run("create", "run", "us-a", "v3-8", states=",PROVISIONING,")
    assert done.returncode == 1 and "no state 10 times in a row" in done.stderr


def test_setup_copies_this_commit(tpus: Slice, workers: Workers) -> None:
    """`setup` brings this commit to all workers; a second one removes what the commit no longer has."""
    prepare = tpus.checkout / "prepareTPUVM.sh"
    write_program(prepare, '#!/usr/bin/env bash\ncd "$(dirname "$0")" && ls >>prepared\n')
    old = tpus.checkout / "zero" / "old name.py"
    old.parent.mkdir()
    old.touch()
    tpus.git("add", "-A")
    tpus.git("commit", "-q", "-m", "one")
    assert tpus.run("setup", "run", "us-a").returncode == 0
    written = [place / name for place in workers.places for name in ("runs/a/metrics.jsonl", "zero/notes.py")]
    for place in workers.places:
        assert (place / "zero" / "old name.py").exists() and "slice.sh" in (place / "prepared").read_text()
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    tpus.git("mv", "zero/old name.py", "zero/new.py")
    tpus.git("commit", "-q", "-m", "two")
    done = tpus.run("setup", "run", "us-a")
    assert done.returncode == 0, done.stderr
    for place in workers.places:
        assert {path.name for path in (place / "zero").iterdir()} == {"new.py", "notes.py"}
        assert not (place.parent / "zero.tar.gz").exists() and (place / ".venv/bin/python").exists()
    assert all(path.exists() for path in written)


def test_setup_with_a_broken_archive(tpus: Slice, workers: Workers) -> None:
    """`setup` removes nothing where the archive did not arrive whole."""
    write_program(tpus.checkout / "prepareTPUVM.sh", "#!/usr/bin/env bash\n")
    tpus.git("add", "-A")
    tpus.git("commit", "-q", "-m", "one")
    assert tpus.run("setup", "run", "us-a").returncode == 0
    cut = GCLOUD.replace('cp "$1" "$home/${2#*:}"', 'head -c 100 "$1" >"$home/zero.tar.gz"')
    assert cut != GCLOUD
    write_program(tpus.bin / "gcloud", cut)
    assert tpus.run("setup", "run", "us-a").returncode != 0
    assert all((place / "slice.sh").exists() for place in workers.places)


@needs_tmux
def test_launch_keeps_every_argument_whole(tpus: Slice, workers: Workers) -> None:
    """`launch` trains on all workers, whatever the arguments contain; a session with a longer name is another's."""
    arguments = ["data.corpus=null", "hydra.run.dir=runs/a b", "model.kinds=[a,'b c']", 'x="$HOME" `id` é', "y=a;b\nc"]
    for number in range(2):
        workers.tmux(number, "new-session", "-d", "-s", "zero-notebook", "sleep 60")
    done = tpus.run("launch", "run", "us-a", *arguments)
    assert done.returncode == 0, done.stderr
    workers.trainers()
    for place in workers.places:
        assert (place / "arguments").read_text() == "\n".join(["--resume=auto", *arguments])
    logs = [place / "train.log" for place in workers.places]
    wait_for(lambda: [log.read_text() for log in logs if log.exists()] == ["training\n"] * 2)


@needs_tmux
def test_launch_skips_training_workers(tpus: Slice, workers: Workers) -> None:
    """`launch` does not touch a worker that trains already."""
    workers.tmux(1, "new-session", "-d", "-s", "zero", "sleep 60")
    done = tpus.run("launch", "run", "us-a")
    assert done.returncode == 0 and done.stdout == f"{socket.gethostname()} is training already\n"
    wait_for(lambda: (workers.places[0] / "trainer.pid").exists())
    assert not (workers.places[1] / "train.status").exists()


@pytest.mark.parametrize("command", ["launch", "check"])
def test_workers_that_are_not_set_up(tpus: Slice, workers: Workers, command: str) -> None:
    for place in workers.places:
        shutil.rmtree(place)
    done = tpus.run(command, "run", "us-a", environment={"WANDB_API_KEY": "k"})
    assert done.returncode == 1 and done.stdout.count("is not set up: ./slice.sh setup") == 2


@needs_tmux
def test_stop_and_kill(tpus: Slice, workers: Workers, tmp_path: Path) -> None:
    """`stop` may be repeated while a checkpoint is saved; `kill` ends a trainer that ignores it, and nothing else.

    The shell that runs the command on a worker has the names of what is killed in its own command line.
    """
    other = tmp_path / "other"
    other.mkdir()
    (other / "main_zero.py").write_text("import time\ntime.sleep(60)\n")
    bystander = subprocess.Popen([workers.places[0] / ".venv/bin/python", "main_zero.py"], cwd=other)
    try:
        for number in range(2):
            workers.tmux(number, "new-session", "-d", "-s", "zero-notebook", "sleep 60")
        assert tpus.run("launch", "run", "us-a").returncode == 0
        stopped = workers.trainers()
        assert tpus.run("stop", "run", "us-a").returncode == 0
        wait_for(lambda: not any(map(is_alive, stopped)))
        written = [place / "train.status" for place in workers.places]
        wait_for(lambda: [path.read_text() for path in written] == ["75\n"] * 2)
        wait_for(lambda: workers.tmux(0, "has-session", "-t", "=zero").returncode == 1)
        again = tpus.run("stop", "run", "us-a")
        assert again.returncode == 0 and again.stdout.count("is not training") == 2

        for place in workers.places:
            (place / "main_zero.py").write_text(SLEEPER.replace("lambda *_: sys.exit(75)", "signal.SIG_IGN"))
            (place / "trainer.pid").unlink()
        wait_for(lambda: workers.tmux(1, "has-session", "-t", "=zero").returncode == 1)
        assert tpus.run("launch", "run", "us-a").returncode == 0
        trainers = workers.trainers()
        for _ in range(2):
            assert tpus.run("stop", "run", "us-a").returncode == 0
        assert all(map(is_alive, trainers))
        done = tpus.run("kill", "run", "us-a")
        assert done.returncode == 0, done.stderr
        wait_for(lambda: not any(map(is_alive, trainers)))
        assert [path.read_text() for path in written] == ["137\n"] * 2
        for number in range(2):
            assert workers.tmux(number, "has-session", "-t", "=zero").returncode == 1
            assert workers.tmux(number, "has-session", "-t", "=zero-notebook").returncode == 0
        assert bystander.poll() is None
        assert tpus.run("kill", "run", "us-a").returncode == 0  # there is nothing left to kill
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(("is_training", "status"), [(False, 0), (False, 1), pytest.param(True, 1, marks=needs_tmux)])
def test_check_examines_every_worker(tpus: Slice, workers: Workers, is_training: bool, status: int) -> None:
    """`check` runs the doctor with the arguments of the launch; each line names its worker."""
    for number, place in enumerate(workers.places):
        (place / "main_zero.py").write_text(f"import sys\nprint(*sys.argv[1:], sep='|')\nsys.exit({status})\n")
        if is_training:
            workers.tmux(number, "new-session", "-d", "-s", "zero", "sleep 60")
    done = tpus.run("check", "run", "us-a", "data.bucket_path=a b")
    host = socket.gethostname()
    line = f"{host} is training: stop it first\n" if is_training else f"{host}: --doctor|data.bucket_path=a b\n"
    assert (done.returncode, done.stdout) == (status, line * 2)


def test_launch_hands_over_the_key(tpus: Slice, workers: Workers) -> None:
    """The key reaches each worker in a file that only its user reads, and is in no argument."""
    done = tpus.run("launch", "run", "us-a", environment={"WANDB_API_KEY": "sec ret"})
    assert done.returncode == 0 or shutil.which("tmux") is None, done.stderr
    make, copy, start = tpus.calls()
    assert copy[-2:] == ["--worker=all", "--zone=us-a"] and not Path(copy[2]).exists()
    assert (asked_function(make), asked_function(start)) == (["private_file"], ["start_training"])
    assert "sec" not in (tpus.bin / "calls").read_text() + done.stdout + done.stderr
    for place in workers.places:
        assert (place / ".environment").stat().st_mode & 0o777 == 0o600
        sourced = f'. "{place}/.environment" && printf %s "$WANDB_API_KEY"'
        assert subprocess.run(["bash", "-c", sourced], capture_output=True, text=True, check=True).stdout == "sec ret"


def test_watch_and_view(tpus: Slice) -> None:
    """Both have a terminal, at whose end the command on the worker ends as well."""
    assert tpus.run("watch", "run", "us-a").returncode == 0
    (watch,) = tpus.calls()
    assert {"--worker=0", "--ssh-flag=-tt"} <= {*watch} and asked_function(watch) == ["show_log"]
    assert tpus.run("view", "run", "us-a", "9000").returncode == 0
    (view,) = tpus.calls()
    assert {"--worker=0", "--ssh-flag=-tt", "--ssh-flag=-L9000:localhost:9000"} <= {*view}
    assert asked_function(view) == ["serve_runs", "9000"]


def test_watch_shows_a_log_that_comes_later(tpus: Slice, workers: Workers) -> None:
    environment = {**os.environ, "PATH": f"{tpus.bin}:{os.environ['PATH']}", "HOME": str(tpus.place)}
    command = ["bash", str(tpus.checkout / "slice.sh"), "watch", "run", "us-a"]
    (tpus.bin / "calls").touch()
    watch = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert watch.stdout is not None
        (workers.places[0] / "train.log").write_text("step 1\n")
        assert watch.stdout.readline() == "step 1\n"
    finally:
        end_group(watch)
        watch.communicate()


def test_delete_and_bucket(tpus: Slice) -> None:
    assert tpus.run("delete", "run", "us-a").returncode == 0
    assert tpus.calls() == [["queued-resources", "delete", "run", "--force", "--quiet", "--zone=us-a"]]
    assert tpus.run("bucket", "my-bucket", "us-central1").returncode == 0
    (made,) = tpus.recorded()
    assert made[:4] == ["storage", "buckets", "create", "gs://my-bucket"] and "--location=us-central1" in made


def test_key_of_several_workers(tpus: Slice) -> None:
    """gcloud copies to several workers only with its key in the agent, if there is one; it is added once."""
    agent = {"SSH_AUTH_SOCK": "/nowhere"}
    assert tpus.run("setup", "run", "us-a", environment=agent).returncode == 0
    assert (tpus.keys / "added").read_text() == f"{tpus.keys}/google_compute_engine\n"
    assert tpus.run("stop", "run", "us-a", environment=agent).returncode == 0
    assert (tpus.keys / "added").read_text().count("\n") == 1

    (tpus.keys / "passphrase").touch()
    for arguments in (("stop", "run", "us-a"), ("keep", "run", "us-a", "v3-8")):  # before it requests a slice
        done = tpus.run(*arguments, states="")
        assert done.returncode == 1 and 'eval "$(ssh-agent)"' in done.stderr and tpus.calls() == []

    (tpus.keys / "google_compute_engine").unlink()  # the first connection makes it
    (tpus.keys / "passphrase").unlink()
    assert tpus.run("stop", "run", "us-a").returncode == 0
    assert tpus.calls()[0][2:] == ["run", "--worker=0", "--command=true", "--zone=us-a"]


SET_UP = ["scp", "ssh", "ssh"]  # the archive, prepareTPUVM.sh, trainLoop.sh


def test_keep_requests_a_preempted_slice_again(tpus: Slice) -> None:
    # Nothing there, requested, trained; preempted, deleted, requested again, trained to the end.
    states = ",WAITING_FOR_RESOURCES,ACTIVE,ACTIVE,SUSPENDED,,ACTIVE"
    arguments = ("keep", "run", "us-a", "v3-32", "--spot", "model.size=1_1b", "~data.x", "--valid-until-duration=6h")
    done = tpus.run(*arguments, states=states, statuses="none,running,none,0")
    assert done.returncode == 0, done.stderr
    assert [call[1] for call in tpus.calls()] == ["create", *SET_UP, "delete", "create", *SET_UP]
    create, launch = tpus.calls()[0], tpus.calls()[3]
    assert create[-3:-1] == ["--spot", "--valid-until-duration=6h"] and "model.size=1_1b" not in create
    assert asked_function(launch) == ["start_training", "model.size=1_1b", "~data.x"]
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
        # gcloud cannot tell the state: nothing is requested.
        ("!lost,!lost,ACTIVE", "none,0", "0", ["pause", "pause", *SET_UP]),
        # Each part of setup fails once, then the launch.
        ("ACTIVE", "none,none,0", "1,0", ["scp", "pause", *SET_UP]),
        ("ACTIVE", "none,none,0", "0,1,0", ["scp", "ssh", "pause", *SET_UP]),
        ("ACTIVE", "none,none,0", "0,0,1,0", [*SET_UP, "pause", *SET_UP]),
        # A launch after a stop fails once.
        ("ACTIVE", "running,75,75,0", "1,0", ["pause", "pause", "ssh", "pause", "pause", "ssh"]),
    ],
)
def test_keep_tries_again(tpus: Slice, states: str, statuses: str, results: str, sequence: list[str]) -> None:
    """`keep` pauses and tries again, whatever fails."""
    done = tpus.run("keep", "run", "us-a", "v3-8", states=states, statuses=statuses, results=results)
    assert done.returncode == 0, done.stderr
    assert tpus.sequence() == sequence


@pytest.mark.parametrize("status", [*with_outcome("stopped"), "lost"])
def test_keep_relaunches_stopped_training(tpus: Slice, status: int | str) -> None:
    """`keep` launches again where training was stopped and the slice is still there."""
    done = tpus.run("keep", "run", "us-a", "v3-8", statuses=f"none,{status},running,0")
    assert done.returncode == 0, done.stderr
    assert [call[1] for call in tpus.calls()] == [*SET_UP, "ssh"]  # set up once, launched twice


@pytest.mark.parametrize("status", [0, 1, 2, 75, "lost"])
def test_keep_after_an_earlier_run(tpus: Slice, status: int | str) -> None:
    """`keep` sets up and launches, however an earlier run on this slice ended."""
    done = tpus.run("keep", "run", "us-a", "v3-8", statuses=f"{status},running,0")
    assert done.returncode == 0, done.stderr
    assert tpus.sequence() == [*SET_UP, "pause"]


def test_keep_finds_training(tpus: Slice) -> None:
    """`keep` takes over where training runs."""
    done = tpus.run("keep", "run", "us-a", "v3-8", statuses="running,0")
    assert done.returncode == 0 and tpus.sequence() == ["pause"]


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
@needs_tmux
def test_status_of_training_on_a_worker(
    tpus: Slice, workers: Workers, written: str | None, is_training: bool, expected: str
) -> None:
    """Another session, whose name only begins with the same word, is not training."""
    workers.tmux(0, "new-session", "-d", "-s", "zero" if is_training else "zero-notebook", "sleep 60")
    if written is not None:
        (workers.places[0] / "train.status").write_text(f"{written}\n")
    workers.homes[0].parent.rename(tpus.place / "away")
    tpus.run("keep", "run", "us-a", "v3-8", statuses="running,0")
    (tpus.place / "away").rename(workers.homes[0].parent)
    call = next(call for call in tpus.recorded() if asked_function(call) == ["training_status"])
    (command,) = (word.removeprefix("--command=") for word in call if word.startswith("--command="))
    environment = {**os.environ, "TMUX_TMPDIR": str((workers.homes[0] / "tmux").resolve())}
    answer = subprocess.run(
        ["bash", "-c", command], cwd=workers.homes[0], env=environment, capture_output=True, text=True
    )
    assert answer.stdout == f"{expected}\n", answer.stderr


def test_keep_with_empty_status(tpus: Slice) -> None:
    """`keep` asks again where the status is empty."""
    done = tpus.run("keep", "run", "us-a", "v3-8", statuses="none,,running,0")
    assert done.returncode == 0, done.stderr
    assert tpus.sequence() == [*SET_UP, "pause", "pause"]


@pytest.mark.parametrize("status", [1, *with_outcome("refused"), *with_outcome("failed")])
def test_keep_stops_when_training_failed(tpus: Slice, status: int) -> None:
    done = tpus.run("keep", "run", "us-a", "v3-8", statuses=f"none,{status}")
    assert done.returncode == 1 and f"status {status}" in done.stderr
    assert ("SIGABRT" in done.stderr) == (status == 134)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("create", "run"), "expected COMMAND NAME ZONE"),
        (("create", "run", "us-a"), "needs a TYPE"),
        (("create", "run", "us-a", "h100-8"), "h100-8"),
        (("create", "run", "us-a", "1xv3-8"), "type 1xv3-8: expected"),
        (("keep", "run", "us-a", "h100-8"), "h100-8"),
        (("keep", "run", "us-a", "v3-8", "--reservation", "mine", "--spot"), "mine is neither an option"),
        (("fly", "run", "us-a"), "unknown command fly"),
    ],
)
def test_mistakes_call_nothing(tpus: Slice, arguments: tuple[str, ...], named: str) -> None:
    done = tpus.run(*arguments, states="")
    assert done.returncode == 1 and named in done.stderr
    assert tpus.sequence() == []


def test_keep_with_an_option_that_gcloud_does_not_know(tpus: Slice) -> None:
    """`keep` ends: gcloud's status 2 means that the same command would be refused for ever."""
    done = tpus.run("keep", "run", "us-a", "v3-8", "--reservation=mine", states="", results="2")
    assert done.returncode == 1 and "gcloud does not accept these options" in done.stderr
    assert tpus.sequence() == ["create"]


def test_statuses_of_signals() -> None:
    """The list has the status of each signal that stops a trainer, and the one after a saved checkpoint."""
    assert {*with_outcome("stopped")} == {PREEMPTED, *(128 + number for number in (*SIGNALS, *COMPANIONS))}


def test_statuses_in_the_documentation() -> None:
    page = (REPOSITORY / "docs" / "reference" / "exit-statuses.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.+) \|$", page, re.MULTILINE)
    assert [(int(status), outcome, meaning) for status, outcome, meaning in rows] == statuses()


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


@pytest.mark.parametrize("script", ["slice.sh", "trainLoop.sh", "launch/exit-statuses.sh", "launch/slurm.sbatch"])
def test_shellcheck_finds_nothing(script: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-x", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("status", "requeued"), [(0, ""), (75, "requeue 7\n"), (143, "requeue 7\n"), (2, ""), (1, "")])
def test_slurm_job_is_queued_again(tmp_path: Path, status: int, requeued: str) -> None:
    """Only where the trainer was stopped; the arguments reach it."""
    copy_loop(tmp_path)
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
    """Stops and disruptions are no failures, what would be refused again ends it; each host of the slice has a pod."""
    service, job = yaml.safe_load_all((REPOSITORY / "launch" / "gke-tpu.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule} == {
        "FailJob": with_outcome("refused"),
        "Ignore": with_outcome("stopped"),
    }
    assert all(rule["onExitCodes"]["containerName"] == container["name"] for rule in rules if "onExitCodes" in rule)
    config, _ = compose([*container["args"], "mode=plan"])
    chips = job["spec"]["completions"] * container["resources"]["limits"]["google.com/tpu"]
    assert config.plan.topology == f"v5e-{chips}" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_kubernetes_slices() -> None:
    """As of one slice; what would be refused again ends all of them, and each has a Job of its own."""
    _, one_slice = yaml.safe_load_all((REPOSITORY / "launch" / "gke-tpu.yaml").read_text())
    jobs = yaml.safe_load((REPOSITORY / "launch" / "gke-tpu-slices.yaml").read_text())
    assert jobs["metadata"]["annotations"] == {EXCLUSIVE: "cloud.google.com/gke-nodepool"}
    (rule,) = jobs["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (slices,) = jobs["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    assert slices["replicas"] > 1 and job["backoffLimit"] == 0
    for key in ("completions", "parallelism", "completionMode", "podFailurePolicy"):
        assert job[key] == one_slice["spec"][key]
    pod, other = job["template"]["spec"], one_slice["spec"]["template"]["spec"]
    (container,), (other_container,) = pod["containers"], other["containers"]
    assert container["resources"] == other_container["resources"] and pod["nodeSelector"] == other["nodeSelector"]
    topology = f"{slices['replicas']}xv5e-{job['completions'] * container['resources']['limits']['google.com/tpu']}"
    config, _ = compose([*container["args"], "mode=plan", f"plan.topology={topology}"])
    assert config.zero.replicas is None and config.data.bucket_path == "BUCKET"


def test_skypilot_task() -> None:
    """Its commands are accepted, and training that was stopped is started again."""
    task = yaml.safe_load((REPOSITORY / "launch" / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == with_outcome("stopped")
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
