"""A plugin of pytest that writes the CPU seconds and the memory of each test, those of started processes included.

`pytest -p tests.helpers.cpu_table --cpu-table FILE` appends a line of JSON per test to FILE, or FILE.gw0 and so on for
the workers of pytest-xdist; `python -m tests.helpers.cpu_table FILE...` sums them per file. Wall-clock times of a busy
machine say little; CPU seconds move by a quarter. The memory is the most that this process held at any time of a test,
in MiB; Linux alone tells it.
"""

import collections
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

FORGET_PEAK = "5"  # man 5 proc_pid_clear_refs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-table", type=Path, help="a file for the CPU seconds and the memory of each test")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    table: Path | None = item.config.getoption("--cpu-table")
    if table is None:
        return (yield)
    Path("/proc/self/clear_refs").write_text(FORGET_PEAK)
    started, own = started_seconds(), own_seconds()  # the search for processes is no part of the test
    result = yield
    own, started = own_seconds() - own, started_seconds() - started
    line = {"test": item.nodeid, "own": round(own, 2), "started": round(started, 2), "memory": peak_memory()}
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    with Path(f"{table}.{worker}" if worker else table).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return result


def own_seconds() -> float:
    return sum(psutil.Process().cpu_times()[:2])


def started_seconds() -> float:
    """Of all processes that this one has started, which may still run."""
    process = psutil.Process()
    seconds = sum(process.cpu_times()[2:4])
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            seconds += sum(child.cpu_times()[:4])
    return seconds


def peak_memory() -> int:
    """MiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) >> 10


def main(tables: list[str]) -> None:
    """Prints CPU seconds, tests and MiB per file, the largest first."""
    seconds: dict[str, float] = collections.defaultdict(float)
    tests: dict[str, int] = collections.defaultdict(int)
    memory: dict[str, int] = collections.defaultdict(int)
    for table in tables:
        for line in map(json.loads, Path(table).read_text().splitlines()):
            name = line["test"].partition("::")[0]
            seconds[name] += line["own"] + line["started"]
            tests[name] += 1
            memory[name] = max(memory[name], line["memory"])
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True):
        print(f"{seconds[name]:8.1f} s {tests[name]:5} tests {memory[name]:6} MiB  {name}")
    print(f"{sum(seconds.values()):8.1f} s in {sum(tests.values())} tests")


if __name__ == "__main__":
    main(sys.argv[1:])
