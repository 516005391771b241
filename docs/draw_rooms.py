"""Draws docs/pictures/rooms.svg, the rooms in floors, from the imports: `python -m docs.draw_rooms`.

The rooms of a floor do not import each other, and each imports only from floors below. The picture is as wide as a
telephone, and its colors are report.html's, light and dark.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

from docs.draw_idea import colors
from tests.helpers.rooms import LIBRARY, ROOMS, SOURCES, WITHOUT_JAX, imports, room

PICTURE = Path(__file__).with_name("pictures") / "rooms.svg"
WIDTH = 344  # of the picture, in its own units: pixels on a telephone
SHOWN = 560  # pixels, where there is room
MARGIN = 8
GAP = 6  # between rooms of a floor
BOX = 58  # height of a room
FLOOR = 66  # from one floor to the next
KINDS = (  # rooms, the color of their mark, its meaning
    (LIBRARY, "var(--c0)", "touches no file, network or process"),
    (WITHOUT_JAX, "var(--c2)", "works where jax is not installed"),
)
STYLE = """\
text{font-family:system-ui,sans-serif;font-size:12px;fill:var(--ink);text-anchor:middle}
.name{font-weight:600;font-size:13px}
.inside{font-size:10px;fill:var(--quiet)}
.legend{text-anchor:start}
.paper{fill:var(--paper)}
.room{fill:var(--panel);stroke:var(--line)}"""


def uses() -> Counter[tuple[str, str]]:
    """How many imports lead from one room to another."""
    pairs: Counter[tuple[str, str]] = Counter()
    for module, path in SOURCES.items():
        targets = {name for name in imports(module, path.read_text()) if name in SOURCES}
        pairs.update((room(module), room(name)) for name in targets if room(name) != room(module))
    return pairs


def floors() -> list[list[str]]:
    """The rooms of each floor, the lowest first: each room is as low as what it imports allows."""
    used: dict[str, set[str]] = {name: set() for name in ROOMS}
    for upper, lower in uses():
        used[upper].add(lower)
    height: dict[str, int] = {}
    for name in TopologicalSorter(used).static_order():
        height[name] = 1 + max((height[lower] for lower in used[name]), default=-1)
    return [[name for name in ROOMS if height[name] == floor] for floor in range(max(height.values()) + 1)]


def subrooms(name: str, width: float) -> list[str]:
    """The folders inside a room, in lines that a box of this width holds."""
    if name not in SOURCES or name == "zero":
        return []
    folders = sorted(path.parent.name for path in SOURCES[name].parent.glob("*/__init__.py"))
    return textwrap.wrap(", ".join(folders), int(width / 5.6))


def box(name: str, left: float, top: float, width: float) -> list[str]:
    """A room: its name, and the folders inside it."""
    center = left + width / 2
    inside = subrooms(name, width)
    parts = [f'<rect class="room" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BOX}" rx="4"/>']
    for members, color, _ in KINDS:
        if name in members:
            parts.append(f'<rect x="{left:.1f}" y="{top}" width="4" height="{BOX}" rx="2" fill="{color}"/>')
    first = top + BOX // 2 + 5 - 6 * len(inside)
    parts.append(f'<text class="name" x="{center:.1f}" y="{first}">{escape(name.removeprefix("zero."))}</text>')
    for number, line in enumerate(inside):
        y = first + 13 + 11 * number
        parts.append(f'<text class="inside" x="{center:.1f}" y="{y}">{escape(line)}</text>')
    return parts


def picture() -> str:
    """The highest floor on top, and a legend."""
    rows = floors()[::-1]
    legend = MARGIN + FLOOR * len(rows)
    height = legend + 18 * len(KINDS) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{SHOWN}" '
        f'height="{SHOWN * height // WIDTH}" role="img" aria-labelledby="name">',
        '<title id="name">The rooms in floors: each imports only from floors below it</title>',
        f"<style>{colors()}\n{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>',
    ]
    for number, names in enumerate(rows):
        width = (WIDTH - 2 * MARGIN - GAP * (len(names) - 1)) / len(names)
        for index, name in enumerate(names):
            parts += box(name, MARGIN + index * (width + GAP), MARGIN + number * FLOOR, width)
    for number, (_, color, meaning) in enumerate(KINDS):
        y = legend + 18 * number
        parts.append(f'<rect x="{MARGIN}" y="{y}" width="4" height="14" rx="2" fill="{color}"/>')
        parts.append(f'<text class="legend" x="{MARGIN + 10}" y="{y + 11}">{meaning}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
