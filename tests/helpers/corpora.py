"""Prepares small corpora, and reads them back.

- `make`: calls `prepare`. `call`: the command zero-prepare in this process. `run`: data/prepare.py in one of its own.
- `tokens_of`, `documents_of`, `both`: the rows and documents of an index, and the documents of both splits.
- `digest`: one hash of all files of a directory.
- `kill_workers`: kills each process that a command starts, until it ends.
"""

import hashlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.loaders import open_loader
from zero.corpus.preparing import zero_prepare
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import Corpus, prepare
from zero.corpus.text.tokenizers import ByteTokenizer

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "data/prepare.py"]
HOW = (
    "workers",
    "overwrite",
    "progress",
    "part_bytes",
    "runner",
    "announce",
)  # of `prepare`, besides options of the corpus


def make(source: str | Path, tmp_path: Path, name: str = "c", **options: Any) -> Corpus:
    how = {key: options.pop(key) for key in HOW if key in options}
    return prepare(
        source,
        name,
        small_options(**options),
        directory=tmp_path / "corpus",
        index_directory=tmp_path / "index",
        **how,
    )


def small_options(**options: Any) -> CorpusOptions:
    """Rows of 16 bytes, two members of four rows in a shard, and what is said otherwise."""
    defaults: dict[str, Any] = {
        "tokenizer": ByteTokenizer(),
        "row_tokens": 16,
        "rows_per_member": 4,
        "rows_per_shard": 8,
    }
    return CorpusOptions(**defaults | options)


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command zero-prepare in this process, which takes a second less than `run`."""
    status: Any = 0
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        try:
            zero_prepare.main([*map(str, arguments)])
        except SystemExit as exit:
            status = exit.code
            if isinstance(status, str):  # Python prints it and exits with status 1
                print(status, file=sys.stderr)
                status = 1
    return subprocess.CompletedProcess([], status, output.getvalue(), errors.getvalue())


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python data/prepare.py arguments`, in a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        **options,
    )


def tokens_of(index: str, row_tokens: int, vocab_size: int = 1 << 16) -> np.ndarray:
    """The rows of a split, read back through the loader; -1 is padding."""
    loader = open_loader(index, global_rows=1, context=row_tokens, vocab_size=vocab_size, shuffle=False, max_epochs=1)
    return np.concatenate([batch.tokens for batch in loader.batches()])


def documents_of(index: str, row_tokens: int) -> list[str]:
    """The documents of a split of bytes."""
    tokens = tokens_of(index, row_tokens).ravel()
    *texts, rest = bytes(tokens[tokens >= 0].astype(np.uint8)).split(b"\0")
    assert rest == b""  # each document is ended, the last one too
    return [text.decode() for text in texts]


def both(corpus: Corpus, row_tokens: int = 16) -> list[str]:
    return sorted(documents_of(corpus.train_index, row_tokens) + documents_of(corpus.validation_index, row_tokens))


def digest(directory: Path) -> str:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return hashlib.sha256(b"".join(str(f.relative_to(directory)).encode() + f.read_bytes() for f in files)).hexdigest()


def kill_workers(process: "subprocess.Popen[str]") -> int:
    """Kills the processes that a command has started for its work, each one, until it ends; returns how many."""
    killed: set[int] = set()
    while process.poll() is None:
        for child in set(_workers(process.pid)) - killed:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            killed.add(child)
        time.sleep(0.01)
    return len(killed)


def _workers(pid: int) -> Iterator[int]:
    """The processes that multiprocessing has started for one of these ids, but for those that it needs itself."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    yield child
