"""Draws docs/pictures/vq.svg from the table of losses in benchmarks/measured/vq.md: `python -m docs.draw_vq`."""

from __future__ import annotations

import re
from pathlib import Path

from docs.picture_of_numbers import save
from zero.report.picture_style import COLORS, STYLE

PAGE = Path(__file__).parents[1] / "benchmarks" / "measured" / "vq.md"
PICTURE = Path(__file__).with_name("pictures") / "vq.svg"
ROWS_OF_A_STEP = 2
ROW_TOKENS = 1024
LINES = (
    ("full attention, keys as they are (bytes_gated)", COLORS[0], "o-"),
    ("128 codes, blocks of 128 (bytes_vq)", COLORS[1], "o-"),
    ("the same without splitting codes", COLORS[1], "o:"),
)


def numbers() -> str:
    """The table of losses."""
    return PAGE.read_text().partition("| step | full attention")[2].partition("\n\n")[0]


def losses() -> list[tuple[list[float], list[float]]]:
    """Million tokens and validation losses of each column of the table; a cell may be empty."""
    lines = re.findall(r"^\| (\d+ \|.*) \|$", numbers(), re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    curves = []
    for column in range(1, 1 + len(LINES)):
        shown = [row for row in rows if row[column]]
        tokens = [int(row[0]) * ROWS_OF_A_STEP * ROW_TOKENS / 1e6 for row in shown]
        curves.append((tokens, [float(row[column]) for row in shown]))
    return curves


def draw(path: Path) -> None:
    from matplotlib import rc_context  # here, as tests import `numbers`
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for (tokens, values), (label, color, style) in zip(losses(), LINES, strict=True):
            axes.plot(tokens, values, style, color=color, markersize=4, label=label)
        axes.set(title="Vector-quantized keys, 2.05 million parameters", xlim=(0, None))
        axes.set(xlabel="million tokens", ylabel="validation loss, nats per byte")
        axes.legend()
        save(figure, path, numbers())


if __name__ == "__main__":
    draw(PICTURE)
