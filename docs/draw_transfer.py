"""Draws docs/pictures/transfer.svg from what the benchmark has kept: `python -m docs.draw_transfer`."""

from __future__ import annotations

import json
from pathlib import Path

from docs.picture_of_numbers import save
from zero.report.picture_style import COLORS, STYLE

KEPT = Path(__file__).with_name("sources") / "transfer.jsonl"
PICTURE = Path(__file__).with_name("pictures") / "transfer.svg"
PARAMETRIZATIONS = ("standard", "mup")


def numbers() -> str:
    return KEPT.read_text()


def draw(path: Path) -> None:
    from matplotlib import rc_context  # here, as tests import `numbers`
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in numbers().splitlines()]
    widths = sorted({line["width"] for line in lines})
    lowest = min(loss for line in lines for loss in line["losses"])
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2, sharey=True)
        for line in lines:
            panel = panels[PARAMETRIZATIONS.index(line["parametrization"])]
            color = COLORS[widths.index(line["width"])]
            rates = [2.0**exponent for exponent in line["exponents"]]
            panel.plot(rates, line["losses"], "o-", ms=3, color=color, label=f"width {line['width']}")
            best_loss, best_rate = min(zip(line["losses"], rates, strict=True))
            panel.plot(best_rate, best_loss, "*", ms=12, color=color)
        for panel, parametrization in zip(panels, PARAMETRIZATIONS, strict=True):
            panel.set_xscale("log", base=2)
            panel.set(title=parametrization, xlabel="peak learning rate", ylim=(lowest - 0.05, lowest + 1))
        panels[0].set_ylabel("validation loss, nats per byte")
        panels[0].legend()
        save(figure, path, numbers())


if __name__ == "__main__":
    draw(PICTURE)
