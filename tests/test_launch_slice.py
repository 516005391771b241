"""slice.sh against stand-ins for gcloud and ssh: a slice is requested, set up, trained on, watched and kept."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launching import (
    GCLOUD,
    HAS_TMUX,
    REPOSITORY,
    SLEEPER,
    Slice,
    Workers,
    asked_function,
    end_group,
    is_alive,
    needs_tmux,
    wait_for,
    with_outcome,
    write_program,
)


@pytest.fixture
def tpus(tmp_path: Path) -> Slice:
    return Slice(tmp_path)


@pytest.fixture
def workers(tpus: Slice) -> Iterator[Workers]:
    homes = Workers(tpus)
    yield homes
    homes.end()


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

    The command line of the shell that kills them names the same programs, so a careless pattern would kill that shell.
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
    assert done.returncode == 0 or not HAS_TMUX, done.stderr
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
