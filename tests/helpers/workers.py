"""Which worker of pytest-xdist runs which file."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
# Of the programs that run_path runs some import PyTorch.
PYTORCH = re.compile(
    r"^\s*(import|from) (torch|transformers|peft|lm_eval)\b|importorskip\(.(torch|lm_eval)|\brun_path\(", re.M
)

LIBTPU = re.compile(r"\b(find_devices|get_topology_desc)\(")
LASTING = re.compile(r"\bcli\.Lasting\b")
# What a worker holds for many files, and by what a file of tests shows that it needs it: libraries of hundreds of MiB,
# and the process with compiled steps in which runs follow each other.
WITH_PYTORCH = "with PyTorch"
HELD = {"PyTorch": PYTORCH, "libtpu": LIBTPU, "lasting runs": LASTING}


@cache
def held(file: str) -> str | None:
    """Which of `HELD` the tests of a file, named from the root, need, themselves or by another module."""
    text = (ROOT / file).read_text()
    return next((name for name, pattern in HELD.items() if pattern.search(text)), None)


def scope_of(test: str) -> str:
    """What one worker runs as a whole: a file, or all files that need one of `HELD`.

    >>> scope_of("tests/exchange/test_peft_folder.py::test_one"), scope_of("tests/helpers/test_workers.py::test_one")
    ('with PyTorch', 'tests/helpers/test_workers.py')
    """
    file = test.partition("::")[0]
    return f"with {name}" if (name := held(file)) is not None else file


class HeldOnce(LoadFileScheduling):
    """One worker runs all files that need one of `HELD`, so that only one has it; the rest is shared file by file.

    The worker with PyTorch, which holds 600 MiB more than the others, takes no other file.
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if WITH_PYTORCH not in self.assigned_work[node]:
            super()._assign_work_unit(node)
