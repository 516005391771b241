"""Draws docs/pictures/quantized.svg from what the benchmark has kept: `python -m docs.draw_quantized`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from docs.picture_of_numbers import save
from zero.report.picture_style import COLORS, STYLE

KEPT = Path(__file__).with_name("sources") / "quantized.jsonl"
PICTURE = Path(__file__).with_name("pictures") / "quantized.svg"
REFERENCE = "float32"


def numbers() -> str:
    return KEPT.read_text()


def curves() -> tuple[list[int], dict[str, np.ndarray]]:
    """Steps, and for each form its validation losses by seed and step; the last one is of more rows, and left out."""
    lines = [json.loads(line) for line in numbers().splitlines()]
    forms = dict.fromkeys(line["form"] for line in lines)
    seeds = sorted({line["seed"] for line in lines})
    by_run = {(line["form"], line["seed"]): line["losses"][:-1] for line in lines}
    by_form = {}
    for form in forms:
        by_form[form] = np.array([by_run[form, seed] for seed in seeds])
    return lines[0]["steps"][:-1], by_form


def draw(path: Path) -> None:
    from matplotlib import rc_context  # here, as tests import `numbers`
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses = curves()
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        whole, relative = figure.subplots(1, 2)
        for (form, of_form), color in zip(losses.items(), COLORS, strict=False):
            ratios = 100 * (of_form / losses[REFERENCE] - 1)
            whole.plot(steps, of_form.mean(0), color=color, label=form)
            relative.plot(steps, ratios.mean(0), color=color)
            if form != REFERENCE:
                relative.fill_between(steps, ratios.min(0), ratios.max(0), color=color, alpha=0.15, lw=0)
        seeds = len(losses[REFERENCE])
        whole.set(title=f"means of {seeds} seeds", xlabel="step", ylabel="validation loss, nats per byte")
        relative.set(title="to float32 of the same seed: mean and range", xlabel="step", ylabel="%")
        whole.legend()
        save(figure, path, numbers())


if __name__ == "__main__":
    draw(PICTURE)
