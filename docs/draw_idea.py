"""Draws docs/pictures/idea.svg, one layer of stage 3 in four frames: `python -m docs.draw_idea`.

The picture is as wide as a telephone, so that its text is as large there as in the page around it. Colors are
report.html's, light and dark.
"""

from __future__ import annotations

import re
from pathlib import Path

from zero.pages.render import SHARED

PAGE_STYLE = SHARED / "style.css"
PICTURE = Path(__file__).with_name("pictures") / "idea.svg"
DEVICES = 4
LAYERS = 3
RUNS = 1  # the layer that the frames show
WIDTH = 344  # of the picture, in its own units: pixels on a telephone
SHOWN = 430  # pixels, where there is room
FRAME = (164, 190)  # width and height
GAP = 16  # between frames, and above the first one
DEVICE = (35, 62)  # width and height of a device
STEP = 40  # from one device to the next
TOP = 52  # of the devices, below the top of their frame
CELL = (7, 12)  # width and height of a slice
ROW = 17  # from one layer to the next
FRAMES = (
    ("1 shards", ("Each device holds one", "slice of every layer.")),
    ("2 gather", ("One layer becomes", "whole on each device.")),
    ("3 layer", ("Each device runs it on", "rows of its own.")),
    ("4 scatter", ("Each keeps its slice", "of the summed gradient.")),
)
STYLE = """\
text{font-family:system-ui,sans-serif;font-size:13px;fill:var(--ink)}
.title{font-weight:600;font-size:14px}
.paper{fill:var(--paper)}
.device{fill:var(--panel);stroke:var(--line)}
.empty{fill:none;stroke:var(--line);stroke-width:.75}
.arrow{fill:none;stroke:var(--quiet);stroke-width:1.25;marker-end:url(#tip)}
#tip path{fill:var(--quiet)}"""


def colors() -> str:
    """The declarations of the colors, as in report.html: for light pages and for dark ones."""
    light, dark = re.findall(r":root \{(.*?)\}", PAGE_STYLE.read_text(), re.DOTALL)
    declared = [" ".join(declarations.split()) for declarations in (light, dark)]
    return f":root{{{declared[0]}}}\n@media(prefers-color-scheme:dark){{:root{{{declared[1]}}}}}"


def looks(frame: int, device: int, layer: int) -> list[str]:
    """How each slice of a layer on a device is drawn: held, absent, or part of a gradient."""
    filled = [f'fill="var(--c{number})"' for number in range(DEVICES)]
    if layer == RUNS and frame in (1, 2):
        return filled
    if layer == RUNS and frame == 3:  # every device has the whole gradient, of which it keeps the sum of its slice
        pale = [f'{fill} fill-opacity=".15" stroke="var(--c{number})"' for number, fill in enumerate(filled)]
        return [*pale[:device], filled[device], *pale[device + 1 :]]
    absent = ['class="empty"'] * DEVICES
    return [*absent[:device], filled[device], *absent[device + 1 :]]


def arrows(frame: int, left: float, top: float) -> list[str]:
    """What moves: slices to all devices, rows through each, gradients to the device that holds the slice."""
    centers = [left + device * STEP + DEVICE[0] / 2 for device in range(DEVICES)]
    bottom = top + DEVICE[1]
    match frame:
        case 1:  # from the first device to the others; the others send likewise
            pairs = [(centers[0], x) for x in centers[1:]]
        case 3:
            pairs = [(x, centers[0]) for x in centers[1:]]
        case 2:
            return [f'<path class="arrow" d="M{x} {top - 16}V{top - 3}"/>' for x in centers] + [
                f'<path class="arrow" d="M{x} {bottom + 2}V{bottom + 15}"/>' for x in centers
            ]
        case _:
            return []
    return [f'<path class="arrow" d="M{a} {top - 2}Q{(a + b) / 2} {top - 24} {b} {top - 3}"/>' for a, b in pairs]


def frame(number: int, left: float, top: float) -> list[str]:
    """A title, the devices with their slices, what moves, and a sentence."""
    title, sentence = FRAMES[number]
    parts = [f'<text class="title" x="{left}" y="{top + 14}">{title}</text>']
    for device in range(DEVICES):
        x = left + device * STEP
        parts.append(f'<rect class="device" x="{x}" y="{top + TOP}" width="{DEVICE[0]}" height="{DEVICE[1]}" rx="4"/>')
        for layer in range(LAYERS):
            y = top + TOP + 8 + layer * ROW
            for slice_number, look in enumerate(looks(number, device, layer)):
                cell_x = x + 2 + slice_number * (CELL[0] + 1)
                parts.append(f'<rect x="{cell_x}" y="{y}" width="{CELL[0]}" height="{CELL[1]}" rx="1" {look}/>')
    parts += arrows(number, left, top + TOP)
    for line, text in enumerate(sentence):
        parts.append(f'<text x="{left}" y="{top + TOP + DEVICE[1] + 34 + 17 * line}">{text}</text>')
    return parts


def picture() -> str:
    """Two rows of two frames."""
    height = GAP + 2 * FRAME[1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{SHOWN}" '
        f'height="{SHOWN * height // WIDTH}" role="img" aria-labelledby="name">',
        '<title id="name">Shards, gather, layer, scatter: how four devices run one layer at stage 3</title>',
        f"<style>{colors()}\n{STYLE}</style>",
        '<defs><marker id="tip" markerWidth="7" markerHeight="6" refX="5" refY="3" orient="auto">'
        '<path d="M0 0L6 3L0 6Z"/></marker></defs>',
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>',
    ]
    for number in range(len(FRAMES)):
        row, column = divmod(number, 2)
        parts += frame(number, 6 + column * (FRAME[0] + 10), GAP / 2 + row * FRAME[1])
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
