"""Which worker of pytest-xdist runs which file."""

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
PYTORCH = re.compile(r"^\s*(import|from) (torch|transformers|peft|lm_eval)\b|importorskip\(.(torch|lm_eval)", re.M)

LIBTPU = re.compile(r"\b(find_devices|get_topology_desc)\(")
LASTING = re.compile(r"\bcli\.Lasting\b")
# What a worker holds for many files, and by what a file of tests shows that it needs it: libraries of hundreds of MiB,
# and the process with compiled steps in which runs follow each other.
HELD = {"PyTorch": PYTORCH, "libtpu": LIBTPU, "lasting runs": LASTING}


@cache
def held(file: str) -> str | None:
    """Which of `HELD` the tests of a file, named from the root, need, themselves or by another module."""
    text = (ROOT / file).read_text()
    return next((name for name, pattern in HELD.items() if pattern.search(text)), None)


def place_in_order(test: str) -> int:
    """0 of tests that any worker may run, 1 of those of `HELD`, 2 of the examples of modules, which are light.

    >>> [place_in_order(f"{file}::one") for file in ("tests/test_workers.py", "tests/test_main.py", "zero/job.py")]
    [0, 1, 2]
    """
    file = test.partition("::")[0]
    if not file.startswith("tests/"):
        return 2
    return 0 if held(file) is None else 1


class HeldOnce(LoadFileScheduling):
    """One worker runs all files that need one of `HELD`, so that only one has it; the rest is shared file by file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return f"with {name}" if (name := held(file)) is not None else file
