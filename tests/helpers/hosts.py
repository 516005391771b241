"""Processes on this machine that find each other over gloo, as the hosts of a slice do.

- `start`, `start_forked`, `wait_for_step`, `finish`: runs of main_zero.py, one process per host.
- `joining`: the arguments by which the hosts of a run find each other.
- `run_together`: any command lines, all at once. `run_two`: two processes of a program, with number, port and folder.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from tests.helpers import cli
from zero.record.metrics_file import read_metrics

Host: TypeAlias = subprocess.Popen[str] | cli.Fork
MINUTE = 60
REPOSITORY = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start(
    places: Sequence[Path], *arguments: str, own: Mapping[int, Sequence[str]] | None = None
) -> list[subprocess.Popen[str]]:
    """`python main_zero.py arguments` in each place, as one run; `own` are more arguments of a host."""
    return [
        cli.start(place, *arguments, *together, *(own or {}).get(host, ()))
        for host, (place, together) in enumerate(zip(places, joining(len(places)), strict=True))
    ]


def start_forked(
    places: Sequence[Path], *arguments: str, own: Mapping[int, Sequence[str]] | None = None
) -> list[cli.Fork]:
    """As `start`, with hosts that are forked, each from a process of its own, which saves the seconds of imports."""
    return [
        cli.Forks(place, host).start(*arguments, *together, *(own or {}).get(host, ()))
        for host, (place, together) in enumerate(zip(places, joining(len(places)), strict=True))
    ]


def joining(count: int) -> list[list[str]]:
    """For each of so many hosts the arguments by which they find each other."""
    job = [f"distributed.coordinator_address=127.0.0.1:{free_port()}", f"distributed.num_processes={count}"]
    return [[*job, f"distributed.process_id={host}"] for host in range(count)]


def wait_for_step(run: Path, step: int, processes: Sequence[Host]) -> None:
    """Returns when a run has logged this step; fails where a process ends before."""
    path = run / "metrics.jsonl"
    while not (path.exists() and any(line["step"] >= step for line in read_metrics(path))):
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, [one.stderr for one in finish(processes)]
        time.sleep(0.01)


def finish(processes: Sequence[Host]) -> list[subprocess.CompletedProcess[str]]:
    """Their output and exit statuses; none continues after another has ended."""
    try:
        while all(process.poll() is None for process in processes):
            time.sleep(0.05)
        for process in processes:
            if isinstance(process, subprocess.Popen):  # whose pipes are read when all have ended
                process.wait(15 * MINUTE)
    finally:
        done = [cli.finish(process, 15 * MINUTE) for process in processes]
    return done


def run_together(
    lines: Sequence[Sequence[str]], env: dict[str, str] | None = None, timeout: float = 15 * MINUTE
) -> list[str]:
    """What each command line printed; all run at the same time, all must succeed, and none is left behind."""
    with contextlib.ExitStack() as stack:
        processes = []
        for line in lines:
            process = subprocess.Popen(
                line, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            processes.append(stack.enter_context(process))  # closes its pipe
            stack.callback(process.kill)
        printed = [process.communicate(timeout=timeout)[0] for process in processes]
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == 0, text
    return printed


def run_two(program: Path, folder: Path) -> None:
    """A program of tests that takes its number, a port and a folder, and prints `done` when all is well."""
    port = str(free_port())
    lines = [[sys.executable, str(program), str(number), port, str(folder)] for number in range(2)]
    for text in run_together(lines, os.environ | {"PYTHONPATH": str(REPOSITORY)}):
        assert text.endswith("done\n"), text
