"""What holds a device's memory at the peak of a program, by the compiler's own reports."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero.costs import hlo
from zero.costs.compiler import KeptProgram
from zero.costs.live_arrays import Place, read_live_arrays
from zero.costs.source_lines import SourceLines

_FLAT_ARGUMENT = re.compile(r"flat_args\[(\d+)\]")  # of a pmapped function


@dataclass(frozen=True)
class Holder:
    """What holds memory at the peak: the arrays that one line made, or one argument.

    Attributes:
      name: a source line, the path of an operation, or an argument.
      bytes: of one device.
    """

    name: str
    bytes: int


def holders_of(compiled: KeptProgram, arguments: Sequence[str]) -> tuple[Holder, ...]:
    """What holds a program's memory at the peak, by argument and by source line."""
    bodies, _ = hlo.computations(compiled.text)
    by_name = {instruction.name: instruction for body in bodies.values() for instruction in body}
    lines = SourceLines(compiled.text)
    sizes: defaultdict[str, int] = defaultdict(int)
    live = read_live_arrays(compiled.buffers, compiled.live_ranges, bodies)
    in_place: defaultdict[Place, list[hlo.Instruction]] = defaultdict(list)
    for array in live.arrays:
        in_place[array.place].append(array.instruction)
    for array in live.at_peak():
        # The parameter of a loop has no line of its own, what was there before the loop has.
        makers = (_maker(maker, by_name, lines, arguments) for maker in (array.instruction, *in_place[array.place]))
        sizes[next(filter(None, makers), array.instruction.name)] += array.bytes
    return tuple(Holder(name, size) for name, size in sorted(sizes.items(), key=lambda item: -item[1]))


def _maker(
    instruction: hlo.Instruction, by_name: Mapping[str, hlo.Instruction], lines: SourceLines, arguments: Sequence[str]
) -> str:
    """The argument or the source line that made an array.

    A copy has that of its original. "" if neither is known.
    """
    seen: set[str] = set()
    while instruction.name not in seen:
        flat = _FLAT_ARGUMENT.fullmatch(instruction.op_name)
        name = lines.of(instruction)
        if flat and int(flat[1]) < len(arguments):
            name = arguments[int(flat[1])]
        if name:
            return f"a copy of {name}" if seen else name
        seen.add(instruction.name)
        copied = [by_name[operand] for operand in instruction.operands if operand in by_name]
        if not copied:
            break
        instruction = copied[0]
    return ""
