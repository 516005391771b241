"""A host that is killed or stopped: every other one names it within a minute, and ends with status 1."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.helpers import cli, hosts

pytestmark = pytest.mark.timeout(600)
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli.make_workplace(tmp_path_factory.mktemp("lost"))


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("count", "victim", "number"),
    [
        (3, 0, KILL),
        slow(3, 0, STOP),
        slow(3, 1, KILL),
        slow(3, 1, STOP),
        slow(2, 0, KILL),
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
    lost = time.monotonic()
    others = [process for host, process in enumerate(processes) if host != victim]
    try:
        for process in others:
            process.wait(max(0.1, hosts.MINUTE - (time.monotonic() - lost)))
    finally:
        processes[victim].kill()
        done = [cli.finish(process) for process in others]
        cli.finish(processes[victim])
    for one in done:
        assert one.returncode == 1, one.stderr
        name = rf"host {victim} of {count} \({socket.gethostname()}\) (has sent no heartbeat|which coordinates, )"
        assert re.search(f"{name}.*; this one ends as well", one.stderr), one.stderr
