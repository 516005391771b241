"""The installed programs. Each handles signals before it imports anything large, and names a missing extra."""

from __future__ import annotations

import gc
import os
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any

from zero.base.errors import install_command

STATUS = 2  # for a mistake that the same command would repeat


def train() -> None:
    """`zero-train`: trains, evaluates, samples or plans; with `--doctor` it examines the machine instead.

    Exit status: 0 when finished, 75 when preempted after a saved checkpoint, 2 for a mistake that the same command
    would repeat, others on error.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # the import takes seconds, during which a signal may arrive
        signal.signal(number, _interrupted)
    if "--doctor" in sys.argv:
        sys.argv.remove("--doctor")
        sys.exit(_main_of("zero.commands.doctor", "train")(sys.argv[1:]))
    help_commands = import_module("zero.commands.help")
    if help_commands.OPTIONS.intersection(sys.argv):
        help_commands.main(sys.argv[1:])
        return
    _main_of("zero.commands.names", "train")(sys.argv[1:])
    gc.disable()  # until all is imported: a tenth of the CPU time to the first step went into passes over modules
    _main_of("zero.commands.cli", "train")()


def plan() -> None:
    """`zero-plan`: runs `zero-train` with mode=plan."""
    sys.argv.insert(1, "mode=plan")
    train()


def prepare() -> None:
    """`zero-prepare`: makes a corpus."""
    _main_of("zero.corpus.preparing.zero_prepare", "corpus")()


def report() -> None:
    """`zero-report`: draws finished runs."""
    _main_of("zero.commands.zero_report", "train")()


def weights() -> None:
    """`zero-weights`: converts, merges and averages weights."""
    _main_of("zero.exchange.zero_weights", "train")()


def _main_of(module: str, extra: str) -> Any:
    """The `main` of a module; ends the program if a library is missing, which this extra of the package brings."""
    try:
        return import_module(module).main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "zero":
            raise
        program = os.path.basename(sys.argv[0])
        print(f"error: {program}: {error.name} is missing; {install_command(extra)}", file=sys.stderr)
        sys.exit(STATUS)


def _interrupted(number: int, frame: FrameType | None) -> None:
    print("error: interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)
