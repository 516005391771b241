"""Which arrays are in the memory of a device when, by the TPU compiler's reports of buffers and of live ranges."""

from __future__ import annotations

import re
from typing import NamedTuple

from zero.costs.hlo import Bodies, Instruction

_ORDER = re.compile(r"^    (\d+):(.+)$")
_RANGE = re.compile(r"^    (.+\{[\d,]*\}):(\d+)-(\d+)$")
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(, color \d+)?(?:, parameter (\d+))?")
_VALUE = re.compile(r"^ value: <\d+ ([^ {]+)(\{[\d,]*\})?(?: \(phi\))? @0> \(size=(\d+),offset=(\d+)\)")


class Place(NamedTuple):
    """Where an array is in the memory of a device."""

    allocation: int
    offset: int
    bytes: int


class LiveArray(NamedTuple):
    """An array in the memory of a device, and the instructions of the schedule between which it is alive."""

    instruction: Instruction
    place: Place
    first: int
    last: int

    @property
    def bytes(self) -> int:
        return self.place.bytes


class LiveArrays(NamedTuple):
    """The arrays of a program, and the name of each instruction in the order of the schedule."""

    arrays: list[LiveArray]
    order: list[str]

    def over_time(self) -> list[int]:
        """Bytes that are alive at each instruction."""
        changes = [0] * (len(self.order) + 2)
        for array in self.arrays:
            changes[array.first] += array.bytes
            changes[array.last + 1] -= array.bytes
        alive = []
        total = 0
        for change in changes[: len(self.order)]:
            total += change
            alive.append(total)
        return alive

    def at_peak(self) -> list[LiveArray]:
        """The arrays that are alive when most bytes are, largest first."""
        alive = self.over_time()
        if not alive:
            return []
        peak = alive.index(max(alive))
        found = [array for array in self.arrays if array.first <= peak <= array.last]
        return sorted(found, key=lambda array: -array.bytes)


def read_live_arrays(buffers: str, live_ranges: str, bodies: Bodies) -> LiveArrays:
    """The arrays that the compiler placed in the memory of a device.

    An argument keeps its memory for the whole program; a result that takes an argument's place is not counted again.

    Args:
      buffers: the report of the memory assigned to each array; an empty one has no arrays.
      live_ranges: the report of the instructions between which each is alive.
      bodies: the instructions of the program.
    """
    by_name = {instruction.name: instruction for body in bodies.values() for instruction in body}
    order, ranges = _read_ranges(live_ranges)
    arrays: list[LiveArray] = []
    is_argument = is_counted = False
    number = size = 0
    for line in buffers.splitlines():
        if allocation := _ALLOCATION.match(line):
            is_argument = allocation[4] is not None
            is_counted = allocation[3] is None
            number, size = int(allocation[1]), int(allocation[2])
        elif is_counted and (value := _VALUE.match(line)) and value[1] in by_name:
            instruction = by_name[value[1]]
            if is_argument:
                is_counted = False  # the other values of the allocation take the argument's place
                arrays.append(LiveArray(instruction, Place(number, 0, size), 0, len(order)))
            elif f"{value[1]}{value[2] or '{}'}" in ranges:
                first, last = ranges[f"{value[1]}{value[2] or '{}'}"]
                place = Place(number, int(value[4]), int(value[3]))
                arrays.append(LiveArray(instruction, place, first, last))
    return LiveArrays(_one_at_a_time(arrays), order)


def _one_at_a_time(arrays: list[LiveArray]) -> list[LiveArray]:
    """The arrays without the instruction at which one takes the place of another, as in a loop."""
    by_place: dict[Place, list[LiveArray]] = {}
    for array in sorted(arrays, key=lambda array: (array.first, array.last)):
        by_place.setdefault(array.place, []).append(array)
    alone = []
    for shared in by_place.values():
        for array, following in zip(shared, [*shared[1:], None], strict=True):
            if following is not None:
                array = array._replace(last=min(array.last, following.first - 1))
            if array.first <= array.last:
                alone.append(array)
    return alone


def _read_ranges(report: str) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """The names of instructions in the order of the schedule, and the first and last place of each array."""
    order: list[str] = []
    ranges: dict[str, tuple[int, int]] = {}
    for line in report.splitlines():
        if place := _ORDER.match(line):
            order.append(place[2])
        elif line.startswith("  Live ranges at"):
            break
        elif found := _RANGE.match(line):
            ranges[found[1]] = int(found[2]), int(found[3])
    return order, ranges
