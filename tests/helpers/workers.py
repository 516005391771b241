"""Which worker of pytest-xdist runs which file."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
# Of the programs that run_path runs in the process of a test some import PyTorch.
PYTORCH = re.compile(
    r"^\s*(import|from) (torch|transformers|peft|trl|lm_eval|conversion)\b"
    r"|importorskip\(.(torch|trl|lm_eval)|\brun_path\((?!\{)",
    re.M,
)

IMPORT = re.compile(r"^\s*import (tests\.[\w.]+)", re.M)
IMPORT_FROM = re.compile(r"^\s*from (tests[\w.]*) import (\([^)]*\)|[^\n]*)", re.M)
LIBTPU = re.compile(r"\b(find_devices|get_topology_desc)\(|import .*\bdraw_torus\b")
LASTING = re.compile(r"\bcli\.Lasting\b")
# What a worker holds for many files, and by what a file of tests shows that it needs it: libraries of hundreds of MiB,
# and the process with compiled steps in which runs follow each other.
WITH_PYTORCH = "with PyTorch"
WITH_LIBTPU = "with libtpu"
HELD = {"PyTorch": PYTORCH, "libtpu": LIBTPU, "lasting runs": LASTING}


@cache
def held(file: str) -> str | None:
    """Which of `HELD` the tests of a file, named from the root, need, themselves or by a module of tests."""
    texts = [(ROOT / module).read_text() for module in modules_of(file)]
    return next((name for name, pattern in HELD.items() if any(map(pattern.search, texts))), None)


def modules_of(file: str) -> Iterator[str]:
    """The file, and the modules of tests/ that it imports, themselves or by another one.

    >>> "tests/helpers/llama.py" in modules_of("tests/run/test_train_objectives.py")  # by pair_runs.py
    True
    """
    seen = {file}
    left = [file]
    while left:
        yield (module := left.pop())
        new = imported(module) - seen
        seen |= new
        left += sorted(new)


@cache
def imported(file: str) -> set[str]:
    """The modules of tests/ that a file imports."""
    text = (ROOT / file).read_text()
    names = set(IMPORT.findall(text))
    for module, members in IMPORT_FROM.findall(text):
        names |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", members))}
    files = {f"{name.replace('.', '/')}.py" for name in names}
    return {module for module in files if (ROOT / module).exists()}


def scope_of(test: str) -> str:
    """What one worker runs as a whole: a file, or all files that need one of `HELD`.

    >>> scope_of("tests/exchange/test_peft_folder.py::test_one"), scope_of("tests/helpers/test_workers.py::test_one")
    ('with PyTorch', 'tests/helpers/test_workers.py')
    """
    file = test.partition("::")[0]
    return f"with {name}" if (name := held(file)) is not None else file


def turn(test: str) -> int:
    """0 for tests that come first, then 1 and 2: what fills memory for good comes as late as it can.

    >>> turn("tests/exchange/test_peft_folder.py::test_one"), turn("tests/costs/test_hlo.py::test_one")
    (0, 2)
    """
    return {WITH_PYTORCH: 0, WITH_LIBTPU: 2}.get(scope_of(test), 1)


class HeldOnce(LoadFileScheduling):
    """One worker runs all files that need one of `HELD`, so that only one has it; the rest is shared file by file.

    The worker with PyTorch, which holds 600 MiB more than the others, takes no other file if there are others.
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if WITH_PYTORCH not in self.assigned_work[node] or len(self.assigned_work) == 1:
            super()._assign_work_unit(node)
