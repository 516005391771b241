"""Draws docs/pictures/torus.svg, where tensor groups lie on a slice of 64 TPUs: `python -m docs.draw_torus`.

The groups come from `zero.Axis` on the devices that libtpu describes, in the order of pmap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docs.draw_idea import colors
from zero.costs.topology import find_devices
from zero.partition.collectives.axis import Axis

PICTURE = Path(__file__).with_name("pictures") / "torus.svg"
TOPOLOGY, TENSOR = "v5e-64", 8  # 8 x 8 chips, and the devices of a group
SIDE = 8
STEP = 19  # from one chip to the next
CHIP = 12
PANEL = 164  # the width of one
HEIGHT = 262
WIDTH, SHOWN = 344, 430  # in the picture's own units, pixels on a telephone; and where there is room
PANELS = (
    ("zero.phases=flat", ("neighbors on the", "pmap axis: two hosts")),
    ("zero.phases=torus", ("a line of chips along", "one dimension")),
)
LEGEND = (("group", "one tensor group", 38), ("part", "gather the same part of the weights", 19))
STYLE = """\
text{font-family:system-ui,sans-serif;font-size:12px;fill:var(--ink)}
.title{font-weight:600;font-size:14px}
.paper{fill:var(--paper)}
.link{stroke:var(--line);stroke-width:1}
.chip{fill:var(--panel);stroke:var(--line)}
.group{fill:var(--c0)}
.part{fill:var(--c1)}
.both{fill:var(--c0);stroke:var(--c1);stroke-width:3}"""


def axes(devices: list[Any]) -> tuple[Axis, Axis]:
    """The axis with groups of neighbors, and with groups along lines."""
    return Axis.with_tensor_groups("zero", len(devices), TENSOR), Axis.with_tensor_lines("zero", devices, TENSOR)


def panel(axis: Axis, places: list[tuple[int, int]], left: float, title: str, sentence: tuple[str, ...]) -> list[str]:
    """The chips: the first group's, and the chips with the same part of the weights as its first device."""
    group = next(one for one in axis.groups(TENSOR, apart=axis.shards // TENSOR) or [] if 0 in one)
    part = next(one for one in axis.groups(axis.shards // TENSOR) or [] if 0 in one)
    top = 34
    lines = [f'<text class="title" x="{left}" y="18">{title}</text>']
    end = (SIDE - 1) * STEP + CHIP
    for number in range(SIDE):
        middle = number * STEP + CHIP / 2
        lines.append(f'<path class="link" d="M{left} {top + middle}h{end}M{left + middle} {top}v{end}"/>')
    for position, (x, y) in enumerate(places):
        kinds = {(True, True): "both", (True, False): "group", (False, True): "part", (False, False): "chip"}
        kind = kinds[position in group, position in part]
        at = f'x="{left + x * STEP}" y="{top + y * STEP}"'
        lines.append(f'<rect class="{kind}" {at} width="{CHIP}" height="{CHIP}" rx="3"/>')
    for number, text in enumerate(sentence):
        lines.append(f'<text x="{left}" y="{top + end + 20 + 15 * number}">{text}</text>')
    return lines


def picture() -> str:
    """Two panels, and what the colors mean."""
    devices = find_devices(TOPOLOGY)
    places = [device.coords[:2] for device in devices]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{SHOWN}" '
        f'height="{SHOWN * HEIGHT // WIDTH}" role="img" aria-labelledby="name">',
        '<title id="name">A tensor group of 8 on 8 x 8 TPUs, and the devices that gather the same part of the weights'
        "</title>",
        f"<style>{colors()}\n{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
    ]
    for number, (axis, (title, sentence)) in enumerate(zip(axes(devices), PANELS, strict=True)):
        parts += panel(axis, places, 6 + number * (PANEL + 12), title, sentence)
    for kind, meaning, above in LEGEND:
        parts.append(f'<rect class="{kind}" x="6" y="{HEIGHT - above}" width="{CHIP}" height="{CHIP}" rx="3"/>')
        parts.append(f'<text x="{CHIP + 11}" y="{HEIGHT - above + 10}">{meaning}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
