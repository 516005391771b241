"""A picture knows the numbers that it shows, by a digest in its description; its colors follow the reader's theme."""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from docs.draw_idea import colors
from zero.report.picture_style import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEY = "Numbers"
VARIABLES = {  # of matplotlib's own colors, and of zero's
    "#ffffff": "--paper",
    "#000000": "--ink",
    "#b0b0b0": "--line",
    **{color: f"--c{number}" for number, color in enumerate(COLORS)},
}


def digest(numbers: str) -> str:
    return hashlib.sha256(numbers.encode()).hexdigest()


def save(figure: Figure, picture: Path, numbers: str) -> None:
    """Writes the SVG of these numbers, the text of a file or of a table, in light and dark colors."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Description": f"{KEY} {digest(numbers)}"})
    picture.write_text(themed(drawn.getvalue()))


def themed(svg: str) -> str:
    """An SVG of matplotlib with the colors of report.html in place of fixed ones."""
    pattern = "|".join(VARIABLES)
    svg = re.sub(rf"({pattern})\b", lambda match: f"var({VARIABLES[match[1]]})", svg)
    svg = re.sub(r" (?:width|height)=\"[\d.]+pt\"", "", svg, count=2)  # else it would not shrink with a narrow page
    style = f"{colors()}\ntext,g[id^=text_]{{fill:var(--ink)}}"
    return re.sub(r"(<svg[^>]*>)", rf"\1\n<style>{style}</style>", svg, count=1)


def shows(picture: Path, numbers: str) -> bool:
    """Whether the picture was drawn from these numbers."""
    return f"{KEY} {digest(numbers)}" in picture.read_text()
