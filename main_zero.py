"""Trains a GPT with ZeRO on `jax.pmap`: `python main_zero.py [key=value ...] [--resume]`, installed as `zero-train`.

With `--doctor` it examines the machine instead, and prints one line per check.

Exit status: 0 when finished, 75 when preempted after a saved checkpoint, 2 for a mistake that the same command would
repeat, others on error.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def check_python() -> None:
    """Ends the program if this Python is too old or does not have the packages, before the imports that need them."""
    needed = ["jax"] if "--doctor" in sys.argv else ["jax", "hydra"]
    if sys.version_info < (3, 11):  # noqa: UP036  an older Python would fail at an import
        problem = f"Python {sys.version.split()[0]} is too old, zero needs 3.11 or newer"
    elif None in map(find_spec, needed):
        problem = f"{sys.executable} does not have zero's packages"
    else:
        return
    print(f"error: {problem}; run ./prepareTPUVM.sh, then .venv/bin/python main_zero.py", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    check_python()
    from zero.commands.start import train

    train()


if __name__ == "__main__":
    main()
