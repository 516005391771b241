"""Starts main_zero.py as a person does, with a model and a corpus that take seconds. A helper of tests."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zero.runtime.corpus.prepare import prepare
from zero.runtime.tokenizers import ByteTokenizer

MAIN = Path(__file__).parents[1] / "main_zero.py"
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
    "training.staged_warmup_steps=6",
    "training.warmup_train_context=8",
    "training.evaluation_frequency=20",
    "training.maximum_evaluation_steps=2",
    "training.log_frequency=1",
    "training.total_steps=40",
    "training.sample_tokens=0",
    "distributed.cpu_devices=8",
)
SPIN = """
import os, sys, time
parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
while os.getppid() == parent and time.monotonic() < end:  # ends by itself where its parent was killed
    pass
"""


def make_workplace(place: Path) -> Path:
    """A directory to start from, with a corpus of nonsense in it; the index files are named relative to it."""
    absent = place / "absent" / "torch.py"
    absent.parent.mkdir(parents=True)
    absent.write_text('raise ModuleNotFoundError("torch is for tests alone")')
    words = random.Random(0)
    source = place / "text"
    source.mkdir(parents=True)
    for number in range(30):
        text = " ".join(words.choice(["shard", "gather", "scatter", "stage", "layout", "zéro"]) for _ in range(200))
        (source / f"{number}.txt").write_text(text, encoding="utf-8")
    prepare(
        source,
        "tiny",
        directory=place / "corpus",
        index_directory=place / "corpus" / "index",
        tokenizer=ByteTokenizer(),
        row_tokens=CONTEXT,
        progress=False,
    )
    return place


def environment(workplace: Path) -> dict[str, str]:
    """Nothing of what tests/conftest.py sets but what keeps a run off the network; programs are compiled once."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC", "JAX_NUM_CPU_DEVICES")
    }
    return inherited | {
        "JAX_COMPILATION_CACHE_DIR": str(workplace / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(workplace / "absent"),  # webdataset would import torch, which takes seconds, for nothing
    }


def start(workplace: Path, *arguments: str) -> subprocess.Popen[str]:
    """`python main_zero.py arguments` in the workplace, as it is: without the overrides of `TINY`."""
    return subprocess.Popen(
        [sys.executable, str(MAIN), *arguments],
        cwd=workplace,
        env=environment(workplace),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """What it printed and its exit status; it is killed if it takes longer."""
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run(workplace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return finish(start(workplace, *arguments))


class Forks:
    """Many short runs from one process that has imported everything; each is a process with a status of its own."""

    def __init__(self, workplace: Path) -> None:
        self.workplace = workplace
        self.server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forks.py")), str(MAIN)],
            cwd=workplace,
            env=environment(workplace) | {"PYTHONPATH": f"{workplace / 'absent'}:{MAIN.parent}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(arguments) + "\n")
        self.server.stdin.flush()
        answer: dict[str, Any] = json.loads(self.server.stdout.readline())
        return subprocess.CompletedProcess(arguments, answer["status"], answer["output"], answer["errors"])

    def close(self) -> None:
        self.server.communicate()


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
