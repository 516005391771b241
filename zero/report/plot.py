"""run.png: losses, learning rate, sequence length and throughput over steps (matplotlib)."""

import io
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from zero.files import storage
from zero.record.history import History
from zero.report.picture_style import COLORS, GRAY, STYLE

PICTURE_FILE = "run.png"
TRAINING = COLORS[0]
VALIDATION = COLORS[1]
SKIPPED = COLORS[3]


def draw_run(run_directory: Path, history: History) -> Path:
    """Draws `run_directory/run.png` and returns its path; it is replaced as a whole.

    Four panels over steps: losses of training, validation and averaged weights (nats per token), learning rate,
    sequence length (tokens) and throughput (tokens/s). Thin vertical lines mark resumes, crosses at the foot of the
    losses steps that were skipped.
    """
    title = "/".join(run_directory.absolute().parts[-2:])
    picture = io.BytesIO()
    path = run_directory / PICTURE_FILE
    with rc_context(STYLE):
        _plot(history, title).savefig(picture, format="png")
    storage.write(path, picture.getvalue())
    return path


def _plot(history: History, title: str) -> Figure:
    figure = Figure(figsize=(11, 6.5), dpi=110)
    figure.subplots_adjust(0.07, 0.08, 0.98, 0.9, 0.17, 0.14)  # a layout engine takes half of the time of drawing
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    panels = figure.subplots(2, 2, sharex=True)
    losses, rate, length, speed = panels.flat
    _plot_losses(losses, history)
    rate.plot(*_series(history, "learning_rate"), color=TRAINING)
    steps, lengths = _series(history, "sequence_length")
    length.plot(steps, lengths, color=TRAINING, drawstyle="steps-pre")  # a value holds since the line before
    length.set_yticks([0, *np.unique(lengths)])
    speed.plot(*_series(history, "tokens_per_second"), color=TRAINING)
    speed.yaxis.set_major_formatter(EngFormatter())
    names = ("loss (nats per token)", "learning rate", "sequence length (tokens)", "throughput (tokens/s)")
    for axes, name in zip(panels.flat, names, strict=True):
        axes.set_title(name)
        for index, step in enumerate(history.resumes):
            axes.axvline(step, color=GRAY, linewidth=0.8, linestyle=":", label="" if index else "resumed")
        if axes is not losses:
            axes.set_ylim(bottom=0)
    for axes in panels[1]:
        axes.set_xlabel("step")
    if losses.get_legend_handles_labels()[0]:
        losses.legend(loc="upper right")  # "best" looks at every point
    return figure


def _series(history: History, key: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which the key was logged, and its values; a value that is not finite leaves a gap."""
    logged = [(step, np.nan if value is None else value) for step, value in history.curves.get(key, ())]
    steps, values = np.array(logged, dtype=float).reshape(-1, 2).T
    return steps, values


def _plot_losses(axes: Axes, history: History) -> None:
    """The losses, the last value of each in the legend, and a cross for every logged step that saw skipped ones."""
    for name, title, color, style in (
        ("train/loss", "train", TRAINING, "-"),
        ("validation/loss", "validation", VALIDATION, "o-"),
        ("validation/ema_loss", "averaged weights", VALIDATION, "o:"),
    ):
        steps, values = _series(history, name)
        finite = values[np.isfinite(values)]
        if finite.size:
            axes.plot(steps, values, style, color=color, markersize=3.5, label=f"{title} {finite[-1]:.3f}")
    steps, skipped = _series(history, "skipped_steps")
    _, spikes = _series(history, "skipped_spikes")
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
