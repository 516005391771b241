"""A host that is lost: every other one names it, and a replacement continues from the emergency checkpoints."""

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.helpers import cli, hosts
from zero.record.metrics_file import read_resumes
from zero.record.run_files import LINEAGE_FILE, saved_steps

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("count", "victim", "number"),
    [
        pytest.param(2, 0, KILL, marks=pytest.mark.wide),  # hosts/test_watchdog.py has what they say
        slow(3, 0, KILL),
        slow(3, 0, STOP),
        slow(3, 1, KILL),
        slow(3, 1, STOP),
        slow(2, 1, STOP),
        slow(5, 0, STOP),
        slow(5, 3, KILL),
    ],
)
def test_all_others_name_the_lost_host(workplace: Path, count: int, victim: int, number: int) -> None:
    run = f"{number}-{victim}-of-{count}"
    job = ("training.total_steps=4000", "training.batch_size=2", "distributed.cpu_devices=1", f"hydra.run.dir={run}")
    processes = hosts.start([workplace] * count, *cli.TINY, *job)
    hosts.wait_for_step(workplace / run, 3, processes)
    os.kill(processes[victim].pid, number)
    others = [process for host, process in enumerate(processes) if host != victim]
    try:
        for process in others:
            process.wait(15 * hosts.MINUTE)
    finally:
        processes[victim].kill()
        done = [cli.finish(process) for process in others]
        cli.finish(processes[victim])
    for one in done:
        assert one.returncode == 1, one.stderr
        name = rf"host {victim} of {count} \({socket.gethostname()}\) (has sent no heartbeat|the coordinator, )"
        assert re.search(f"{name}.*; this host exits too", one.stderr), one.stderr
        assert "Error executing job" not in one.stderr and "Traceback" not in one.stderr, one.stderr


@pytest.mark.slow
def test_24_hosts_lose_one_and_7_continue(workplace: Path) -> None:
    """The others name the lost host; 7 of them continue with the samples and losses of one process of 7 devices."""
    rows = ("training.batch_size=7", "training.gradient_accumulation_steps=1", "training.evaluation_frequency=4")
    job = (*rows, "zero.stage=3")
    one_each = ("distributed.cpu_devices=1", "hydra.run.dir=many")
    begun = hosts.start([workplace] * 24, *cli.TINY, *job, *one_each)
    hosts.wait_for_step(workplace / "many", 6, begun)
    begun[17].kill()
    done = hosts.finish(begun)
    name = rf"host 17 of 24 \({socket.gethostname()}\) has sent no heartbeat"
    assert [bool(re.search(name, one.stderr)) for one in done] == [host != 17 for host in range(24)]
    shutil.copytree(workplace / "many", workplace / "alone")
    done = hosts.finish(hosts.start([workplace] * 7, "--resume", *cli.TINY, *job, *one_each))
    assert [one.returncode for one in done] == [0] * 7, [one.stderr for one in done]
    one = cli.run(workplace, "--resume", *cli.TINY, *job, "distributed.cpu_devices=7", "hydra.run.dir=alone")
    assert one.returncode == 0, one.stderr
    for name in ("step", "samples_checksum", "tokens_seen"):
        assert cli.losses(workplace / "many", name) == cli.losses(workplace / "alone", name)
    many, alone = (cli.losses(workplace / run) for run in ("many", "alone"))
    assert len(many) == 12 and many == pytest.approx(alone, rel=1e-6)  # gloo adds in another order


@pytest.mark.slow
def test_run_continues_from_memory(workplace: Path) -> None:
    """A run that lost a host continues from the memory of the others.

    Bit for bit as a run that lost none; the replacement, whose memory is empty, gets its shards from a neighbor.
    """

    def start(run: str) -> list[subprocess.Popen[str]]:
        job = (
            *("training.total_steps=24", "training.evaluation_frequency=24", "data.keep_checkpoints=1"),
            *("training.batch_size=2", "training.gradient_accumulation_steps=1", "distributed.cpu_devices=1"),
            *("zero.emergency_steps=4", f"hydra.run.dir={run}"),
        )
        own = {host: [f"zero.emergency_directory={workplace}/memory-{host}"] for host in range(3)}
        return hosts.start([workplace] * 3, "--resume=auto", *cli.TINY, *job, own=own)

    processes = start("calm")
    assert [one.returncode for one in hosts.finish(processes)] == [0, 0, 0]
    assert not list(workplace.glob("memory-*/*/*.shards"))
    processes = start("disturbed")
    hosts.wait_for_step(workplace / "disturbed", 18, processes)
    processes[1].kill()
    hosts.finish(processes)
    assert saved_steps(workplace / "disturbed") == [4]  # the durable one
    shutil.rmtree(workplace / "memory-1")
    done = hosts.finish(start("disturbed"))
    assert [one.returncode for one in done] == [0, 0, 0], [one.stderr for one in done]
    (resumed,) = read_resumes(workplace / "disturbed" / "metrics.jsonl")
    assert resumed >= 12
    assert f"resumed from the emergency checkpoint of step {resumed}, from the copy of host 2" in done[1].stderr
    assert f"resumed from the emergency checkpoint of step {resumed}, from its own files" in done[2].stderr
    calm, disturbed = (cli.metrics(workplace / run) for run in ("calm", "disturbed"))
    assert calm == disturbed and len(calm) == 24


@pytest.mark.slow
def test_a_restore_that_hangs_names_its_host(workplace: Path) -> None:
    """One of two hosts opens a file of its memory and never gets it; the other waits for what it has."""

    def start(*arguments: str) -> list[hosts.Host]:
        job = (
            "training.evaluation_frequency=2",
            "training.batch_size=2",
            "distributed.cpu_devices=1",
            "zero.emergency_steps=2",
            "hydra.run.dir=hung",
        )
        own = {host: [f"zero.emergency_directory={workplace}/hung-{host}"] for host in range(2)}
        return [*hosts.start_forked([workplace] * 2, *arguments, *cli.TINY, *job, own=own)]

    done = hosts.finish(start("training.total_steps=2"))
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    lineage = (workplace / "hung" / LINEAGE_FILE).read_text().split()[0]
    (memory,) = (workplace / "hung-1").iterdir()
    os.mkfifo(memory / f"{lineage}-4-1.shards")
    done = hosts.finish(start("--resume=auto", "training.total_steps=4", "distributed.start_minutes=1"))
    assert [one.returncode for one in done] == [1, 1], [one.stderr for one in done]
    for one in done:
        assert "host 1 of 2 " in one.stderr and "distributed.start_minutes=1" in one.stderr, one.stderr
        assert "and has not arrived where the others wait" in one.stderr, one.stderr
    assert "in _held" in done[1].stderr, done[1].stderr
