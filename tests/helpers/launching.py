"""Stand-ins for what the launchers call: gcloud, ssh, a trainer; and what their tests share.

- `Slice`: a checkout with slice.sh, and the stand-ins on the PATH. `Workers`: homes of two workers beside them.
  Commands for workers are run by a shell in the home directory of each, as ssh would.
- `copy_loop`: trainLoop.sh and what it reads. `statuses`, `with_outcome`: the list of exit statuses.
- `wait_for`, `is_alive`, `end_group`: of processes. `asked_function`: what a worker runs. `write_program`: a script.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HAS_TMUX = shutil.which("tmux") is not None
needs_tmux = pytest.mark.skipif(not HAS_TMUX, reason="tmux is not installed")
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
            if HAS_TMUX:
                self.tmux(number, "kill-server")
            if (place / "trainer.pid").exists() and is_alive(pid := int((place / "trainer.pid").read_text())):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree((self.homes[number] / "tmux").resolve())
