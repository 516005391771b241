"""Draws docs/pictures/coordinate-check.svg from what the benchmark has kept: `python -m docs.draw_coordinate_check`."""

from __future__ import annotations

import json
from pathlib import Path

from docs.picture_of_numbers import save
from zero.report.picture_style import STYLE

KEPT = Path(__file__).with_name("sources") / "coordinate-check.jsonl"
PICTURE = Path(__file__).with_name("pictures") / "coordinate-check.svg"
PARAMETRIZATIONS = ("standard", "mup")
KINDS = ("activation", "change")


def numbers() -> str:
    return KEPT.read_text()


def draw(path: Path) -> None:
    from matplotlib import colormaps, rc_context  # here, as tests import `numbers`
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    head, *lines = [json.loads(line) for line in numbers().splitlines()]
    tensors = list(dict.fromkeys(line["tensor"] for line in lines))
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, 2, sharex=True, sharey="row")
        for line in lines:
            row, column = KINDS.index(line["kind"]), PARAMETRIZATIONS.index(line["parametrization"])
            is_logits = line["tensor"] == "logits"
            color = (
                "black" if is_logits else colormaps["turbo"](0.15 + 0.75 * tensors.index(line["tensor"]) / len(tensors))
            )
            width = 2.5 if is_logits else 1
            label = line["tensor"] if row == column == 0 else None
            panels[row][column].plot(line["widths"], line["values"], "o-", ms=3, lw=width, color=color, label=label)
        for panel in panels.flat:
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
        for column, parametrization in enumerate(PARAMETRIZATIONS):
            panels[0][column].set(title=parametrization)
            panels[1][column].set(xlabel="width")
        panels[0][0].set_ylabel(f"mean |activation| after {head['steps']} steps")
        panels[1][0].set_ylabel("mean |change / learning rate|")
        figure.legend(loc="outside right center", fontsize=7)
        save(figure, path, numbers())


if __name__ == "__main__":
    draw(PICTURE)
