"""Draws docs/pictures/loss.svg, the losses of a first run: `python -m docs.draw_first_run`.

docs/sources/first-run/ holds what the README's first command logged and wrote on two busy CPU cores: the losses, the
text of `mode=sample sample.prompt='def main('`, and the losses of its last weights, by
`mode=evaluate evaluate.stride=255 evaluate.index=...` of a training shard and of the whole validation set.
"""

from __future__ import annotations

import json
from pathlib import Path

from docs.picture_of_numbers import save
from zero.report.picture_style import COLORS, GRAY, STYLE

RUN = Path(__file__).with_name("sources") / "first-run"
PICTURE = Path(__file__).with_name("pictures") / "loss.svg"


def numbers() -> str:
    return (RUN / "metrics.jsonl").read_text() + (RUN / "evaluations.jsonl").read_text()


def draw(path: Path) -> None:
    from matplotlib import rc_context  # here, as tests import `RUN`
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (RUN / "evaluations.jsonl").read_text().splitlines()]
    last_step = lines[-1]["step"]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.plot(*_points(lines, "train/loss"), color=COLORS[0], label="training")
        axes.plot(*_points(lines, "validation/loss"), "o-", color=COLORS[1], label="validation, the first 128 rows")
        beside = iter((last_step + 15, last_step + 35))  # of the last step, else the marks would hide each other
        for evaluation, marker, color in zip(evaluations, "^D", COLORS[3:], strict=False):
            label = f"at the end: {evaluation['loss']:.3f} on {evaluation['set']}"
            step = next(beside)
            axes.plot(step, evaluation["loss"], marker, color=color, label=label)
        longer = next(line["step"] for line in lines if line["sequence_length"] == 256)
        axes.axvline(longer - 5, color=GRAY, linestyle=":", label="from here on sequences of 256 bytes, not 64")
        axes.set(xlabel="step", ylabel="loss, nats per byte", title="The default job", xlim=(0, None))
        axes.legend()
        save(figure, path, numbers())


def _points(lines: list[dict[str, float]], metric: str) -> tuple[list[float], list[float]]:
    """Steps and values of the lines that have the metric."""
    logged = [line for line in lines if metric in line]
    return [line["step"] for line in logged], [line[metric] for line in logged]


if __name__ == "__main__":
    draw(PICTURE)
