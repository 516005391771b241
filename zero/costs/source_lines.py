"""The line of a user's program that an instruction was traced from, by the tables at the head of a compiled program."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from zero.costs.hlo import Instruction

_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_ENTRY = re.compile(r"^(\d+) (.+)$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_WRAPPERS = re.compile(r"(?:jit\(\w+\)|shard_map|while|body|closed_call)/")  # of a path: what jax calls within
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_PACKAGE = re.compile(r"/(?:site|dist)-packages/(\w+)")
# Packages that programs call: their lines say nothing about a program. Any other installed package can be the program.
_LIBRARIES = {
    "aqt",
    "chex",
    "distrax",
    "einops",
    "equinox",
    "flax",
    "haiku",
    "haliax",
    "jax",
    "jaxlib",
    "jaxtyping",
    "jmp",
    "numpy",
    "optax",
    "orbax",
    "qwix",
    "tokamax",
}
_PYTHON = sysconfig.get_path("stdlib")
_ZERO = f"{Path(__file__).parents[1]}/"
_COSTS = f"{Path(__file__).parent}/"  # calls the program: frames around it are not the program's


class SourceLines:
    """Finds the source line of each instruction of a program.

    Args:
      text: of the program; without tables no line is found.
    """

    def __init__(self, text: str) -> None:
        tables: dict[str, dict[int, str]] = {}
        table: dict[int, str] = {}
        for line in text.splitlines():
            if _TABLE.match(line):
                table = tables.setdefault(line, {})
            elif match := _ENTRY.match(line):
                table[int(match[1])] = match[2]
            elif line.startswith(("%", "ENTRY")):
                break
        self._files = {number: name.strip('"') for number, name in tables.get("FileNames", {}).items()}
        self._locations = {number: _fields(entry) for number, entry in tables.get("FileLocations", {}).items()}
        self._frames = {number: _fields(entry) for number, entry in tables.get("StackFrames", {}).items()}

    def of(self, instruction: Instruction) -> str:
        """The innermost line outside of libraries, such as `train.py:19`; the path of the operation without one."""
        match = _FRAME.search(instruction.rest)
        frame = int(match[1]) if match else 0
        while frame in self._frames:
            location = self._locations[self._frames[frame]["file_location_id"]]
            file = self._files[location["file_name_id"]]
            if file.startswith(_COSTS):
                break
            if not _is_library(file):
                return f"{Path(file).name}:{location['line']}"
            frame = self._frames[frame]["parent_frame_id"] - 1  # 1: it has no parent
        # XLA joins the paths of instructions that it merges, and says the same path twice.
        return ";".join(dict.fromkeys(_WRAPPERS.sub("", path) for path in instruction.op_name.split(";")))


def _is_library(file: str) -> bool:
    """Whether a file is of zero, of Python or of a library that programs call.

    >>> _is_library("/env/lib/python3.12/site-packages/flax/linen/linear.py"), _is_library("<frozen runpy>")
    (True, True)
    >>> _is_library("/env/lib/python3.12/site-packages/maxtext/layers/decoders.py"), _is_library("/home/me/train.py")
    (False, False)
    """
    package = _PACKAGE.search(file)
    if package is None or file.startswith(_ZERO):
        return file.startswith((_ZERO, _PYTHON, "<"))
    return package[1] in _LIBRARIES


def _fields(entry: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(entry)}
