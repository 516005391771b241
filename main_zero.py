"""Trains a GPT with ZeRO on `jax.pmap`: `python main_zero.py [key=value ...] [--resume]`, installed as `zero-train`.

With `--doctor` it examines the machine instead, and prints one line per check.

Exit status: 0 when finished, 75 when preempted after a saved checkpoint, 2 for a mistake that the same command would
repeat, others on error.
"""

import gc
import os
import signal
import sys
from types import FrameType


def interrupted(number: int, frame: FrameType | None) -> None:
    print("error: interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # the import takes seconds, during which a signal may arrive
        signal.signal(number, interrupted)
    if "--doctor" in sys.argv:
        from zero.doctor import main as examine

        sys.argv.remove("--doctor")
        sys.exit(examine(sys.argv[1:]))
    gc.disable()  # until all is imported: a tenth of the CPU time to the first step went into passes over modules
    from zero.cli import main

    main()


def plan() -> None:
    """`zero-plan`: runs with mode=plan."""
    sys.argv.insert(1, "mode=plan")
    main()


if __name__ == "__main__":
    main()
