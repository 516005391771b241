"""Starts main_zero.py as a person does, with a model and a corpus that take seconds.

- `make_workplace`: a directory with a small corpus; the fixtures `workplace` and `forks` of tests/conftest.py use it.
- `TINY`: the overrides of a run of 12 steps; `INDICES`, `CONTEXT`, `MAIN`: its corpus, row length and program.
- `start`, `finish`, `run`: a process of its own. `Forks`: short runs that are forked, which saves two seconds each.
  `Lasting`: runs one after the other in one process, which share their programs.
- `metrics`, `losses`: what a run wrote to metrics.jsonl; `CLOCKED` names what a clock measured.
- `contents`: the files of a run, to compare. `check_refusal`: a run ended with one line that names what is wrong.
- `environment`, `untouched_environment`, `customized`: of the processes that are started.
- `spinning`: processes that keep cores busy.
"""

import atexit
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import prepare
from zero.corpus.text.tokenizers import ByteTokenizer
from zero.partition.virtual_devices import IN_ORDER
from zero.record.metrics_file import read_metrics
from zero.tracking import goodput

MAIN = Path(__file__).parents[2] / "main_zero.py"
INDICES = ("corpus/index/tiny_train.index", "corpus/index/tiny_validation.index")
CONTEXT = 32
TINY = (
    "model.size=test",
    f"data.max_context={CONTEXT}",
    "data.corpus=null",
    f"data.index_path_train={INDICES[0]}",
    f"data.index_path_validation={INDICES[1]}",
    "data.wandb_project=null",
    "training.batch_size=16",
    "training.gradient_accumulation_steps=2",
    "training.warmup_steps=3",
    "training.staged_warmup_steps=0",
    "training.evaluation_frequency=6",
    "training.maximum_evaluation_steps=2",
    "training.log_frequency=1",
    "training.total_steps=12",  # a part of the program, as all schedules are: tests that keep it share what is compiled
    "training.sample_tokens=0",
    "distributed.cpu_devices=8",
)
CLOCKED = (  # metrics that a clock has measured
    *("step_time", "tokens_per_second", "tokens_per_second_per_device", "data_wait", "seconds_to_first_step"),
    *goodput.KEYS,
)
COMPILED = "ZERO_TESTS_COMPILED"  # a variable: the directory of compiled programs, which tests/conftest.py makes
SPIN = """
import os, sys, time
parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
while os.getppid() == parent and time.monotonic() < end:  # ends by itself where its parent was killed
    pass
"""


# Python's `sitecustomize` of programs that are started. It looks for garbage more rarely, as tests/conftest.py does: a
# seventh of a short run goes into passes over what has been imported.
CUSTOM = """
import gc, os
gc.set_threshold(100_000, 20, 20)
exec(os.environ.get("ZERO_TESTS_CODE", ""))
"""


@cache
def _session() -> Path:
    """A directory for what all programs share that this process starts."""
    place = Path(tempfile.mkdtemp(prefix="zero-tests-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    (place / "absent").mkdir()
    (place / "absent" / "torch.py").write_text('raise ModuleNotFoundError("torch is for tests alone")')
    (place / "absent" / "sitecustomize.py").write_text(CUSTOM)
    return place


def make_workplace(place: Path) -> Path:
    """A directory to start from, with a corpus of nonsense in it; the index files are named relative to it."""
    words = random.Random(0)
    source = place / "text"
    source.mkdir(parents=True)
    for number in range(30):
        text = " ".join(words.choice(["shard", "gather", "scatter", "stage", "layout", "zéro"]) for _ in range(200))
        (source / f"{number}.txt").write_text(text, encoding="utf-8")
    prepare(
        source,
        "tiny",
        CorpusOptions(ByteTokenizer(), CONTEXT),
        directory=place / "corpus",
        index_directory=place / "corpus" / "index",
        progress=False,
    )
    return place


def untouched_environment() -> dict[str, str]:
    """The environment without what tests/conftest.py sets of jax's CPU devices."""
    own = ("XLA_FLAGS", "NPROC", "JAX_NUM_CPU_DEVICES")
    return {name: value for name, value in os.environ.items() if name not in own}


def environment() -> dict[str, str]:
    """Nothing of what tests/conftest.py sets but what keeps a run off the network; programs are compiled once.

    The cache is that of all workers. With a largest size jax locks it: two that write a program at once would spoil it.
    """
    return untouched_environment() | {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get(COMPILED) or str(_session() / "compiled"),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(4 << 30),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "").replace(IN_ORDER, "").strip(),  # quick compilation (conftest.py)
        # Donation that copies is a warning, and twice the state for a moment: here it ends the run.
        "PYTHONWARNINGS": "error:Donated pmap argument,error:Some donated buffers",
        "PYTHONPATH": str(_session() / "absent"),  # with CUSTOM; nothing that training needs imports torch
    }


@contextmanager
def customized(code: str) -> Iterator[None]:
    """Programs that are started within run this code first."""
    with patch.dict(os.environ, {"ZERO_TESTS_CODE": code}):
        yield


def later_values(*arguments: str) -> list[str]:
    """The arguments, each key once with its last value: a command line that sets a path twice is refused."""
    return list({argument.partition("=")[0]: argument for argument in arguments}.values())


def start(workplace: Path, *arguments: str) -> subprocess.Popen[str]:
    """`python main_zero.py arguments` in the workplace, as it is: without the overrides of `TINY`."""
    return subprocess.Popen(
        [sys.executable, str(MAIN), *arguments],
        cwd=workplace,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Fork:
    """A run that `Forks` has started."""

    def __init__(self, server: subprocess.Popen[str], workplace: Path, arguments: Sequence[str]) -> None:
        request = {"cwd": str(workplace), "environment": environment(), "arguments": arguments}
        print(json.dumps(request), file=server.stdin, flush=True)
        self._server, self._arguments = server, arguments
        self.pid: int = self._answer()["pid"]
        self._done: subprocess.CompletedProcess[str] | None = None

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        assert self._server.stdout is not None
        if self._done is None and not select.select([self._server.stdout], [], [], 0)[0]:
            return None
        return self.finish().returncode

    def wait_for(self, path: Path) -> None:
        """Returns as soon as the path exists, or the run has ended."""
        while self.poll() is None and not path.exists():
            time.sleep(0.005)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def finish(self, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """What it printed and its exit status.

        Raises:
          subprocess.TimeoutExpired: it took longer, and is killed.
        """
        assert self._server.stdout is not None
        if self._done is None:
            if timeout is not None and not select.select([self._server.stdout], [], [], timeout)[0]:
                os.kill(self.pid, signal.SIGKILL)
                if self.pid == self._server.pid:
                    _lasting_server.cache_clear()
                    raise subprocess.TimeoutExpired(self._arguments, timeout)
                raise subprocess.TimeoutExpired(self._arguments, timeout, self._answer()["errors"])
            answer = self._answer()
            results = answer["status"], answer["output"], answer["errors"]
            self._done = subprocess.CompletedProcess(self._arguments, *results)
        return self._done

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            _lasting_server.cache_clear()  # the next file has another one
            raise RuntimeError(f"{self._server.args!r} ended with {self._server.wait()} in the run {self._arguments}")
        return json.loads(line)


def finish(process: subprocess.Popen[str] | Fork, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """What it printed and its exit status; it is killed if it takes longer, and TimeoutExpired is raised."""
    if isinstance(process, Fork):
        return process.finish(timeout)
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run(workplace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return finish(start(workplace, *arguments))


class Forks:
    """Short runs in a workplace, one at a time; each is a process with a status of its own.

    They are forked from one process that has imported everything, which saves each of them two seconds.

    Args:
      host: of several that run at the same time, each of which has a process to be forked from.
    """

    def __init__(self, workplace: Path, host: int = 0) -> None:
        self.workplace = workplace
        self._host = host

    def start(self, *arguments: str) -> Fork:
        return Fork(_fork_server(self._host), self.workplace, arguments)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.start(*arguments).finish()

    def check(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """As `run`, and asserts that the exit status is 0."""
        done = self.run(*arguments)
        assert done.returncode == 0, f"{arguments}: status {done.returncode}\n{done.stderr}"
        return done

    def train(self, directory: str, *arguments: str) -> Path:
        """Runs to the end in a run directory, relative to the workplace, and returns its path."""
        self.check(*arguments, f"hydra.run.dir={directory}")
        return self.workplace / directory

    def evaluate(self, directory: str, *arguments: str) -> dict[str, Any]:
        """What `mode=evaluate` writes to evaluation.json in a run directory."""
        return json.loads((self.train(directory, "mode=evaluate", *arguments) / "evaluation.json").read_text())

    def fork(self, directory: str, step: int, *arguments: str) -> Path:
        """Continues a run from one of its steps to the end, in a run directory of its own, which is returned."""
        before = set(self.workplace.glob("runs/*/*"))
        self.check("--resume", f"hydra.run.dir={directory}", f"data.resume_step={step}", *arguments)
        (new,) = set(self.workplace.glob("runs/*/*")) - before
        return new


class Lasting(Forks):
    """Runs on eight devices in a workplace, one after the other in a process that outlasts them.

    Runs whose jobs are equal share their traced and compiled programs, as do the runs of all files of tests that a
    worker has: the first run of a job takes as long as a forked one, those after it a quarter. None may be killed, or
    depend on what `customized` runs, or on other variables of jax or Python; one that is refused is better forked.
    """

    def start(self, *arguments: str) -> Fork:
        assert not os.environ.get("ZERO_TESTS_CODE"), "customized programs are forked"
        return Fork(_lasting_server(), self.workplace, arguments)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock measured."""
    lines = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in CLOCKED} for line in lines]


def losses(run: Path, key: str = "train/loss") -> list[float]:
    """One metric of a run, from the lines of metrics.jsonl that have it."""
    return [line[key] for line in read_metrics(run / "metrics.jsonl") if key in line]


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of every file but the log, which every start writes to."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "main_zero.log")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def check_refusal(done: subprocess.CompletedProcess[str], *named: str, lines: int = 1) -> None:
    """Status 2, lines at the end of stderr of which the last names what is wrong, no traceback anywhere."""
    assert done.returncode == 2, done.stderr
    *before, last = done.stderr.strip().splitlines()
    assert last.startswith("error: ") and [name for name in named if name not in last] == [], done.stderr
    own = [line for line in before if not re.match(r"[EW]\d{4} ", line)]  # the others are XLA's
    assert [line.startswith("error: ") for line in own if "error" in line.lower()] == [True] * (lines - 1), done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@cache
def _fork_server(host: int) -> subprocess.Popen[str]:
    """The process that the runs of a host are forked from."""
    return _server("forks.py")


@cache
def _lasting_server() -> subprocess.Popen[str]:
    """The process that `Lasting` runs are in."""
    return _server("lasting.py")


def _server(file: str) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(file)), str(MAIN)],
        env=environment() | {"PYTHONPATH": f"{_session() / 'absent'}:{MAIN.parent}", "ZERO_TESTS_CODE": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # it ends when its input does
    return server


@contextmanager
def spinning(count: int, seconds: float = 7200) -> Iterator[list[subprocess.Popen[bytes]]]:
    """As many processes that only use a core each; ended at the end, and after `seconds`."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN, str(seconds)]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
            process.wait()
