"""Draws docs/pictures/rooms.svg, who imports whom, from the sources: `python -m docs.draw_rooms`."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from html import escape
from pathlib import Path

from docs.draw_idea import colors
from tests.helpers.rooms import ROOMS, SOURCES, imports, room

PICTURE = Path(__file__).with_name("pictures") / "rooms.svg"
WIDTH = 860  # of the picture
BOX = (200, 62)  # width and height of a room
GAP = 12
STYLE = """\
text{font-family:system-ui,sans-serif;font-size:11px;fill:var(--quiet)}
.name{font-weight:600;font-size:13px;fill:var(--ink)}
.paper{fill:var(--paper)}
.layer{fill:none;stroke:var(--line);stroke-dasharray:3 3}
.room{fill:var(--panel);stroke:var(--line)}"""
SENTENCES = {
    "zero": "The public names: the primitives, which need no configuration and no file.",
    "scripts": "main_zero.py and data/prepare.py: thin commands.",
}


def sentence(name: str) -> str:
    """What a room is for: the first sentence of its docstring."""
    if name in SENTENCES:
        return SENTENCES[name]
    docstring = ast.get_docstring(ast.parse(SOURCES[name].read_text())) if name in SOURCES else None
    return (docstring or "").split("\n", 1)[0].replace("`", "")


def uses() -> Counter[tuple[str, str]]:
    """How many imports lead from one room to another."""
    pairs: Counter[tuple[str, str]] = Counter()
    for module, path in SOURCES.items():
        targets = {name for name in imports(module, path.read_text()) if name in SOURCES}
        pairs.update((room(module), room(name)) for name in targets if room(name) != room(module))
    return pairs


def layers() -> list[list[str]]:
    """The rooms by how many rooms lie below them on the longest way of imports, the highest layer first."""
    below: dict[str, set[str]] = {name: set() for name in ROOMS}
    for upper, lower in uses():
        below[upper].add(lower)
    level: dict[str, int] = {}
    for name in ROOMS:  # from the lowest to the highest
        level[name] = 1 + max((level[lower] for lower in below[name]), default=-1)
    return [[name for name in ROOMS if level[name] == number] for number in range(max(level.values()), -1, -1)]


def picture() -> str:
    """A row of boxes for each layer, the highest on top. A room imports only from layers below its own."""
    imported = uses()
    parts: list[str] = []
    top = GAP
    for names in layers():
        for first in range(0, len(names), 4):
            for column, name in enumerate(names[first : first + 4]):
                parts += _box(name, GAP + column * (BOX[0] + GAP), top, imported)
            top += BOX[1] + GAP
        parts.append(f'<path class="layer" d="M{GAP} {top - GAP / 2}H{WIDTH - GAP}"/>')
    parts.pop()  # below the lowest layer is nothing
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img" aria-labelledby="name">'
    title = '<title id="name">The packages in layers: each imports only from layers below its own</title>'
    paper = f'<rect class="paper" width="{WIDTH}" height="{top}"/>'
    return "\n".join([head, title, f"<style>{colors()}\n{STYLE}</style>", paper, *parts, "</svg>"]) + "\n"


def _box(name: str, left: float, top: float, imported: Counter[tuple[str, str]]) -> list[str]:
    """A room: its name, its sentence in three short lines, and on hovering what it imports."""
    lower = [other for other in ROOMS if (name, other) in imported]
    lines = textwrap.wrap(sentence(name), 32, max_lines=3, placeholder=" ...")
    return [
        f"<g><title>{escape(name)} imports {escape(', '.join(lower)) or 'nothing'}</title>",
        f'<rect class="room" x="{left}" y="{top}" width="{BOX[0]}" height="{BOX[1]}" rx="5"/>',
        f'<text class="name" x="{left + 9}" y="{top + 17}">{escape(name.removeprefix("zero."))}</text>',
        *(f'<text x="{left + 9}" y="{top + 31 + 12 * row}">{escape(line)}</text>' for row, line in enumerate(lines)),
        "</g>",
    ]


if __name__ == "__main__":
    PICTURE.write_text(picture())
