"""Draws docs/pictures/rooms.svg, who imports whom, from the sources: `python -m docs.draw_rooms`."""

from __future__ import annotations

import ast
from collections import Counter
from html import escape
from pathlib import Path

from tests.helpers.rooms import ROOMS, SOURCES, imports, room

PICTURE = Path(__file__).with_name("pictures") / "rooms.svg"
ROW = 34  # pixels from one room to the next
BOX = (250, 24)  # width and height
LEFT = 20  # of the boxes
SENTENCE = 285  # left end of the sentences
ARCS = 960  # x of the ends of the arcs
EVERYWHERE = {"zero.base.errors", "zero.files", "commands"}  # imported by most rooms, or importing most: without arcs
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


def picture() -> str:
    """The picture: the highest room on top, an arc to each lower room that it imports, its width by their number."""
    height = ROW * len(ROOMS) + 20
    y = {name: ROW * (len(ROOMS) - 1 - number) + 10 + BOX[1] / 2 for number, name in enumerate(ROOMS)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1320 {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="1320" height="{height}" fill="#ffffff"/>',
    ]
    for (upper, lower), count in sorted(uses().items()):
        if {upper, lower} & EVERYWHERE:
            continue
        start, end = y[upper], y[lower]
        radius = (end - start) / 2
        width = min(1 + count / 6, 6)
        parts.append(
            f'<path d="M {ARCS} {start:.0f} A {min(radius, 330):.0f} {radius:.0f} 0 0 1 {ARCS} {end:.0f}" fill="none" '
            f'stroke="#3b6ea5" stroke-opacity="0.45" stroke-width="{width:.1f}">'
            f"<title>{escape(upper)} imports {escape(lower)}</title></path>"
        )
    for name in ROOMS:
        top = y[name] - BOX[1] / 2
        baseline = y[name] + 5
        box = f'x="{LEFT}" y="{top:.0f}" width="{BOX[0]}" height="{BOX[1]}"'
        parts += [
            f'<rect {box} rx="4" fill="#e8eef5" stroke="#3b6ea5"/>',
            f'<text x="{LEFT + 10}" y="{baseline:.0f}" fill="#10243d">{escape(name)}</text>',
            f'<text x="{SENTENCE}" y="{baseline:.0f}" fill="#333333" font-size="12">{escape(sentence(name))}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
