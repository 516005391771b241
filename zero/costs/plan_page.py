"""The page of a `zero.Plan`: the schedule on a time axis, waits, the longest instructions and memory (jinja2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zero.costs import hlo
from zero.costs.planned_program import PlannedProgram
from zero.costs.predict import CORE, SPARSE_CORE, Event, Timeline
from zero.hosts.speeds import GIB
from zero.pages.render import data_island, part, render

FOLDER = Path(__file__).parent / "page"
LANES = {
    CORE: "TensorCore",
    "network": "ICI",
    SPARSE_CORE: "SparseCore",
    "between slices": "between slices",
    "memory": "prefetches",
    "to host": "to the host",
    "from host": "from the host",
}
COMPUTES, WAITS, SENDS, COPIES = range(4)  # what a block of the picture does; each has a color
BLOCKS = 8000  # of a page: shorter events are drawn together
ROWS = 10  # of each table
POINTS = 500  # of the curve of memory


class Block(NamedTuple):
    """A rectangle of the schedule.

    Attributes:
      lane: the number of its lane.
      begin: as a share of the step.
      width: likewise.
      does: one of `COMPUTES`, `WAITS`, `SENDS` and `COPIES`.
      text: shown when a pointer is over it.
    """

    lane: int
    begin: float
    width: float
    does: int
    text: str


class Placed(NamedTuple):
    """An event on the time axis of the whole step; of a loop one run is shown, as wide as all of them."""

    event: Event
    begin: float
    seconds: float
    runs: int


class Row(NamedTuple):
    """A line of a table."""

    name: str
    what: str
    seconds: float
    runs: int


def page(
    title: str,
    facts: Sequence[str],
    programs: Sequence[tuple[PlannedProgram, int]],
    holders: Sequence[tuple[str, int]],
    available_bytes: int,
) -> str:
    """The page of a plan.

    Args:
      title: of the page.
      facts: lines of text above the pictures.
      programs: with the runs of each per step; none if the program does not fit.
      holders: each array that is alive at the peak, by its name and bytes; the largest comes first.
      available_bytes: of the memory of a device.
    """
    values = {
        "title": title,
        "facts": facts,
        "programs": [_program(program, runs, available_bytes) for program, runs in programs],
        "holders": [(name, size / GIB) for name, size in holders[: 2 * ROWS]],
        "styles": part("style.css"),
        "common": part("common.js"),
        "script": part("schedule.js", FOLDER),
    }
    return render(FOLDER / "plan.html.jinja", values)


def _program(program: PlannedProgram, runs: int, available_bytes: int) -> dict[str, Any]:
    placed = list(place(program.timeline))
    lanes = [lane for lane in LANES if any(event.event.lane == lane for event in placed)]
    total = sum(event.seconds for event in placed if event.event.lane == CORE)
    blocks = merged(_blocks(placed, lanes, total, program), BLOCKS)
    return {
        "name": program.name,
        "runs": runs,
        "seconds": total,
        "lanes": [LANES[lane] for lane in lanes],
        "data": data_island({"lanes": [LANES[lane] for lane in lanes], "seconds": total, "blocks": blocks}),
        "waits": table((event for event in placed if event.event.waits_for), program),
        "work": table((e for e in placed if e.event.lane == CORE and not e.event.waits_for), program),
        "memory": memory_curve(program.live.over_time(), available_bytes),
    }


def place(timeline: Timeline) -> Iterator[Placed]:
    """All events that call nothing, in the time of the whole step."""

    def visit(computation: str, begin: float, runs: int) -> Iterator[Placed]:
        for event in timeline.events[computation]:
            at = begin + runs * event.begin
            if event.calls is None:
                yield Placed(event, at, runs * event.seconds, runs)
            else:
                yield from visit(event.calls, at, runs * event.times)

    yield from visit(timeline.entry, 0.0, 1)


def _blocks(placed: Iterable[Placed], lanes: list[str], total: float, program: PlannedProgram) -> Iterator[Block]:
    for event, begin, seconds, runs in placed:
        if total:
            text = describe(event, seconds, runs, program)
            yield Block(lanes.index(event.lane), begin / total, seconds / total, does(event), text)


def does(event: Event) -> int:
    """What an event is drawn as."""
    if event.waits_for is not None:
        return WAITS
    if event.lane == CORE:
        return COMPUTES
    return SENDS if event.lane in ("network", SPARSE_CORE, "between slices") else COPIES


def describe(event: Event, seconds: float, runs: int, program: PlannedProgram) -> str:
    """The instruction, its cycles and bytes, and the line of the program that it was traced from."""
    instruction = event.waits_for or event.instruction
    parts = [f"{'wait for ' if event.waits_for else ''}{instruction.name}"]
    if line := program.lines.of(instruction):
        parts.append(line)
    parts.append(f"{1e6 * seconds / runs:,.1f} µs" + (f" x {runs}" if runs > 1 else ""))
    if event.waits_for is None and instruction.cycles is not None:
        parts.append(f"{instruction.cycles:,} cycles")
    sent = hlo.bytes_sent(instruction) if hlo.kind_of(instruction) else sum(hlo.sizes_of(instruction.result))
    parts.append(f"{sent / 1e6:,.3g} MB" + (" sent" if hlo.kind_of(instruction) else ""))
    if event.is_guess:
        parts.append("a guess")
    return " · ".join(parts)


def merged(blocks: Iterable[Block], most: int) -> list[Block]:
    """About so many blocks of each lane at most: the shortest ones are drawn as one with those right beside them.

    >>> three = [Block(0, 0.0, 0.5, 0, "a"), Block(0, 0.5, 0.001, 0, "b"), Block(0, 0.501, 0.001, 0, "c")]
    >>> [block.text for block in merged(three, 2)]
    ['a', '2 instructions']
    """
    listed = sorted(blocks, key=lambda block: (block.lane, block.begin))
    if len(listed) <= most:
        return listed
    shortest = sorted((block.width for block in listed), reverse=True)[most // 2]
    joined: list[Block] = []
    counts: list[int] = []
    for block in listed:
        last = joined[-1] if joined else None
        is_beside = last is not None and last.lane == block.lane and block.begin - last.begin - last.width <= 1 / most
        if last is not None and is_beside and counts[-1] and block.width <= shortest:
            counts[-1] += 1
            end = max(last.begin + last.width, block.begin + block.width)
            joined[-1] = last._replace(width=end - last.begin, text=f"{counts[-1]} instructions")
            continue
        joined.append(block)
        counts.append(1 if block.width <= shortest else 0)
    return joined


def table(placed: Iterable[Placed], program: PlannedProgram) -> list[Row]:
    """The most seconds, by source line and by what the instruction is or what it waits for.

    Instructions without a line, such as copies that the compiler added, are together if only their numbers differ.
    """
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    runs: defaultdict[tuple[str, str], int] = defaultdict(int)
    for event, _, spent, times in placed:
        instruction = event.waits_for or event.instruction
        kind = hlo.kind_of(instruction) or instruction.op.removesuffix("-start")
        key = program.lines.of(instruction) or instruction.name.rstrip(".0123456789"), kind
        seconds[key] += spent
        runs[key] += times
    longest = sorted(seconds, key=lambda key: -seconds[key])[:ROWS]
    return [Row(*key, seconds[key], runs[key]) for key in longest]


def memory_curve(alive: list[int], available: int) -> dict[str, Any]:
    """Points of the curve of bytes over the instructions of the schedule, in a picture of 1000 x 200."""
    if not alive:
        return {"points": "", "limit": None, "peak": 0.0}
    step = max(1, len(alive) // POINTS)
    highest = [max(alive[first : first + step]) for first in range(0, len(alive), step)]
    top = max(max(highest), 1)
    scale = max(top, available) if top > available / 3 else top  # the limit is drawn where it is near
    x = 1000 / max(1, len(highest) - 1)
    points = " ".join(f"{number * x:.1f},{200 - 200 * size / scale:.1f}" for number, size in enumerate(highest))
    limit = 200 - 200 * available / scale if available <= scale else None
    return {"points": points, "limit": limit, "peak": top / GIB}
