"""run.png: losses, learning rate, sequence length and throughput over steps (matplotlib)."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from zero.files import storage
from zero.record.metrics_file import read_metrics, read_resumes
from zero.record.run_files import METRICS_FILE
from zero.report.picture_style import COLORS, GRAY, STYLE

PICTURE_FILE = "run.png"
TRAINING = COLORS[0]
VALIDATION = COLORS[1]
SKIPPED = COLORS[3]


def draw_run(run_directory: Path) -> Path:
    """Draws `run_directory/run.png` from metrics.jsonl and returns its path; it is replaced as a whole.

    Four panels over steps: losses of training, validation and averaged weights (nats per token), learning rate,
    sequence length (tokens) and throughput (tokens/s). Thin vertical lines mark resumes, crosses at the foot of the
    losses steps that were skipped.
    """
    metrics = run_directory / METRICS_FILE
    title = "/".join(run_directory.absolute().parts[-2:])
    picture = io.BytesIO()
    path = run_directory / PICTURE_FILE
    with rc_context(STYLE):
        _plot(read_metrics(metrics), read_resumes(metrics), title).savefig(picture, format="png")
    storage.write(path, picture.getvalue())
    return path


def _plot(metrics: list[dict[str, Any]], resumes: list[int], title: str) -> Figure:
    figure = Figure(figsize=(11, 6.5), dpi=110)
    figure.subplots_adjust(0.07, 0.08, 0.98, 0.9, 0.17, 0.14)  # a layout engine takes half of the time of drawing
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    panels = figure.subplots(2, 2, sharex=True)
    losses, rate, length, speed = panels.flat
    _plot_losses(losses, metrics)
    rate.plot(*_series(metrics, "learning_rate"), color=TRAINING)
    steps, lengths = _series(metrics, "sequence_length")
    length.plot(steps, lengths, color=TRAINING, drawstyle="steps-pre")  # a value holds since the line before
    length.set_yticks([0, *np.unique(lengths)])
    speed.plot(*_series(metrics, "tokens_per_second"), color=TRAINING)
    speed.yaxis.set_major_formatter(EngFormatter())
    names = ("loss (nats per token)", "learning rate", "sequence length (tokens)", "throughput (tokens/s)")
    for axes, name in zip(panels.flat, names, strict=True):
        axes.set_title(name)
        for index, step in enumerate(resumes):
            axes.axvline(step, color=GRAY, linewidth=0.8, linestyle=":", label="" if index else "resumed")
        if axes is not losses:
            axes.set_ylim(bottom=0)
    for axes in panels[1]:
        axes.set_xlabel("step")
    if losses.get_legend_handles_labels()[0]:
        losses.legend(loc="upper right")  # "best" looks at every point
    return figure


def _series(metrics: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which the key was logged, and its values; a value that is not finite leaves a gap."""
    logged = [(line["step"], np.nan if line[key] is None else line[key]) for line in metrics if key in line]
    steps, values = np.array(logged, dtype=float).reshape(-1, 2).T
    return steps, values


def _plot_losses(axes: Axes, metrics: list[dict[str, Any]]) -> None:
    """The losses, the last value of each in the legend, and a cross for every logged step that saw skipped ones."""
    for name, title, color, style in (
        ("train/loss", "train", TRAINING, "-"),
        ("validation/loss", "validation", VALIDATION, "o-"),
        ("validation/ema_loss", "averaged weights", VALIDATION, "o:"),
    ):
        steps, values = _series(metrics, name)
        finite = values[np.isfinite(values)]
        if finite.size:
            axes.plot(steps, values, style, color=color, markersize=3.5, label=f"{title} {finite[-1]:.3f}")
    steps, skipped = _series(metrics, "skipped_steps")
    _, spikes = _series(metrics, "skipped_spikes")
    if skipped.size and skipped[-1] > 0:
        more = steps[np.diff(skipped, prepend=0) > 0]
        axes.plot(
            more,
            np.full(more.shape, 0.02),
            "x",
            color=SKIPPED,
            transform=axes.get_xaxis_transform(),
            markersize=5,
            label=f"skipped steps: {skipped[-1]:.0f}" + (f", spikes: {spikes[-1]:.0f}" if spikes.any() else ""),
        )
