"""Which worker of pytest-xdist runs which file."""

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
PYTORCH = re.compile(r"^\s*(import|from) (torch|transformers|peft|lm_eval)\b|importorskip\(.(torch|lm_eval)", re.M)

LIBTPU = re.compile(r"\b(find_devices|get_topology_desc)\(")
LARGE = {"PyTorch": PYTORCH, "libtpu": LIBTPU}  # and by what a file of tests shows that it loads the library


@cache
def large_library(file: str) -> str | None:
    """The large library that tests of a file, named from the root, load themselves or by another one."""
    text = (ROOT / file).read_text()
    return next((name for name, pattern in LARGE.items() if pattern.search(text)), None)


class LargeTogether(LoadFileScheduling):
    """One worker runs all files with a large library, so that only one holds it; the rest is shared file by file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return f"with {library}" if (library := large_library(file)) is not None else file
