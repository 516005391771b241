"""Runs the program in this process for each line of stdin; `cli.Lasting` starts this file and says what it is for.

Lines and answers are those of forks.py. What a run leaves behind in the process is put back after it: the directory,
the streams, the arguments, handlers of signals and loggers, the state of Hydra, and what is printed once per process.
Each run finds the environment of its line; a line whose `READ_ONCE` are others than those of the first is refused.
"""

import contextlib
import ctypes
import gc
import json
import logging
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TextIO
from unittest.mock import patch

import psutil
from hydra._internal.hydra import Hydra

import zero.commands.cli
from tests.helpers import hydra_mode, key_table
from tests.helpers.shared_jobs import SharedJobs
from zero.corpus.text import tokenizers
from zero.files import json_lines
from zero.hosts import watchdog
from zero.hosts.signals import SIGNALS, unanswered

# Keys that no job depends on: those that change no loss, those of resumes, and those of the rows of a batch.
KEYS = (
    *key_table.NEUTRAL,
    *("resume", "data.resume_step"),
    *("data.corpus", "data.index_path_train", "data.index_path_validation", "data.shuffle_shards"),
    *("data.bucket_path", "data.train_samples", "training.max_epochs", "model.model_path", "model.warm_start"),
    *("training.batch_size", "batch", "training.staged_warmup_steps", "training.warmup_train_context"),
)
READ_ONCE = re.compile("JAX_|XLA_|TPU_|LIBTPU_|PYTHON|OMP_|OPENBLAS_|NPROC$")  # variables, when a process starts
ONCE = (
    tokenizers._warn_once,
    json_lines._report,
    json_lines.report_line,
)  # cached, so that a process prints each line once
UNKNOWN = 1  # the status of a program that ends with a traceback
MOST_MEMORY = 1100 << 20  # bytes; 300 MiB are modules, and a job with its programs takes 100 to 200


def end(status: int) -> NoReturn:
    """In place of `exit_immediately`, which would end this process."""
    raise SystemExit(status)


@contextlib.contextmanager
def written_to(output: TextIO, errors: TextIO) -> Iterator[None]:
    """Has everything that this process prints, libraries in C included, in these files."""
    streams = sys.stdout, sys.stderr
    kept = [os.dup(stream.fileno()) for stream in streams]
    for stream, file in zip(streams, (output, errors), strict=True):
        stream.flush()
        os.dup2(file.fileno(), stream.fileno())
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream, number in zip(streams, kept, strict=True):
            stream.flush()
            os.dup2(number, stream.fileno())
            os.close(number)


def read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process reads when it starts, or that are set for the time after it.

    >>> read_once({"XLA_FLAGS": "--xla_dump_to=here", "HOME": "/root"})
    {'XLA_FLAGS': '--xla_dump_to=here'}
    """
    return {name: value for name, value in environment.items() if READ_ONCE.match(name)}


def take_environment(environment: Mapping[str, str]) -> None:
    """Has the run find these variables instead of those of the run before; `READ_ONCE` stay as they are."""
    for name in os.environ.keys() - environment.keys() - read_once(os.environ).keys():
        del os.environ[name]
    os.environ.update((name, value) for name, value in environment.items() if not READ_ONCE.match(name))


def print_again() -> None:
    """Has the next run print what the program prints once per process."""
    for function in ONCE:
        function.cache_clear()


def status_of_run(jobs: SharedJobs) -> int:
    """Runs the program with the arguments in `sys.argv`; its exit status."""
    try:
        # Filters of warnings are put back, and each warning is given again.
        with (
            jobs.shared([]),
            patch.object(zero.commands.cli, "exit_immediately", end),
            patch.object(Hydra, "get_mode", hydra_mode.default_mode),
            warnings.catch_warnings(),
        ):
            zero.commands.cli.main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return UNKNOWN
        return 0 if ended.code is None else ended.code
    except BaseException:  # noqa: BLE001  the process goes on; Python would end it with this traceback
        sys.excepthook(*sys.exc_info())
        return UNKNOWN
    finally:
        print_again()
        for _, timer in unanswered:
            timer.cancel()
        unanswered.clear()
        if watchdog._watchdog is not None:  # of a run that was refused
            watchdog._watchdog.finish()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # of a signal that comes as the run ends
        for handler in logging.root.handlers[:]:
            logging.root.removeHandler(handler)
            handler.close()
    return 0


def answer(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    program = sys.argv[1]
    jobs = SharedJobs(KEYS)
    gc.set_threshold(100_000, 20, 20)
    expected: dict[str, str] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        expected = expected or read_once(request["environment"])
        if differing := expected.items() ^ read_once(request["environment"]).items():
            names = ", ".join(sorted(dict(differing)))
            answer(pid=os.getpid())
            answer(status=UNKNOWN, output="", errors=f"{names}: this process has read other values; fork the run")
            continue
        take_environment(request["environment"])
        sys.argv = [program, *request["arguments"]]
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            answer(pid=os.getpid())
            with contextlib.chdir(request["cwd"]), written_to(output, errors):
                status = status_of_run(jobs)
            output.seek(0)
            errors.seek(0)
            answer(status=status, output=output.read(), errors=errors.read())
        if psutil.Process().memory_info().rss > MOST_MEMORY:
            jobs.drop()
            with contextlib.suppress(OSError, AttributeError):  # only glibc has it
                ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main()
