"""Which worker of pytest-xdist runs which file."""

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
PYTORCH = re.compile(r"^\s*(import|from) (torch|transformers|peft|lm_eval)\b|importorskip\(.(torch|lm_eval)", re.M)


@cache
def uses_pytorch(file: str) -> bool:
    """Whether tests of a file, named from the root, import PyTorch or a library that does."""
    return PYTORCH.search((ROOT / file).read_text()) is not None


class PyTorchTogether(LoadFileScheduling):
    """One worker runs all files with PyTorch, the others share the rest file by file: only one holds its modules."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "with PyTorch" if uses_pytorch(file) else file
