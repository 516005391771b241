"""report.html: the curves, configuration and samples of one or several runs in a file without a server (plotly)."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from zero.config.saved_config import default_config, flat_config
from zero.errors import UserError
from zero.files import storage
from zero.report.tensor_panels import tensor_panels
from zero.run_directory import LAYOUT_FILE, METRICS_FILE, SAMPLES_FILE, saved_config
from zero.tracking.evaluations_file import read_evaluations
from zero.tracking.goodput import describe
from zero.tracking.metrics_file import EVALUATED, read_metrics, read_resumes

REPORT_FILE = "report.html"
PANELS = {  # their metrics: the first one solid, the second one dashed, the third one dotted
    "loss (nats per token), validation dashed, of averaged weights dotted": (
        "train/loss",
        "validation/loss",
        "validation/ema_loss",
    ),
    "learning rate": ("learning_rate",),
    "sequence length (tokens)": ("sequence_length",),
    "throughput (tokens/s)": ("tokens_per_second",),
    "gradient norm": ("gradient_norm",),
    "model FLOPs utilization (share of the published peak)": ("mfu",),
    "peak memory (bytes per device)": ("peak_memory",),
    "wait for data (share of a step), for devices dashed": ("data_wait", "device_wait"),
    "speed (share of the predicted one)": ("predicted_speed",),
    "skipped steps, spikes dashed": ("skipped_steps", "skipped_spikes"),
    "step time (s)": ("step_time",),
    "goodput (share of the wall clock in steps), restarts and repeated work dashed, evaluation dotted": (
        "goodput/steps",
        "goodput/restarts",
        "goodput/evaluation",
    ),
    "share of tokens of the most chosen expert, of the least chosen dashed, share dropped dotted": (
        "expert_share_max",
        "expert_share_min",
        "dropped_share",
    ),
    "entropy of the router (nats)": ("router_entropy",),
    "perplexity of the codes of keys": ("codebook/perplexity",),
    "relative error of rounded keys, share of unused codes dashed": ("codebook/error", "codebook/unused"),
}
SETS = "loss of each validation set, and of evaluate.follow (nats per token)"
TASKS = "tasks of lm-evaluation-harness"
DASHES = ("solid", "dash", "dot", "dashdot")
MOST_POINTS = 2_000  # of a curve
COUNTS = ("sequence_length", "skipped_steps", "skipped_spikes")  # drawn as steps
LOGARITHMIC = ("gradient norm",)  # panels
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } td, th { border-bottom: 1px solid #ddd; padding: .2rem .8rem; text-align: left }
td, pre { font-family: ui-monospace, monospace; font-size: 13px }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto }
pre.text { white-space: pre-wrap } summary { cursor: pointer; margin: .6rem 0 } .dot { font-size: 1.4em }
"""


def write_report(directories: Sequence[Path], page: Path) -> Path:
    """Writes a page that shows the runs, one over the other; it is replaced whole, for browsers to reload.

    Raises:
      UserError: a directory is not a run directory.
    """
    configs = []
    for directory in directories:
        configs.append(flat_config(saved_config(directory)))
        if not (directory / METRICS_FILE).is_file():
            raise UserError(f"{directory}: {METRICS_FILE} is missing; expected a run that has made a step")
    names = ["/".join(directory.absolute().parts[-2:]) for directory in directories]
    colors = [qualitative.D3[i % len(qualitative.D3)] for i in range(len(names))]
    legend = " &nbsp; ".join(
        f'<span class="dot" style="color:{color}">&#9679;</span> {html.escape(name)}'
        for name, color in zip(names, colors, strict=True)
    )
    curves = _curves(directories, names, colors).to_html(
        full_html=False, include_plotlyjs=True, config={"displayModeBar": False, "responsive": True}
    )
    body = [
        f"<h1>{'Run' if len(names) == 1 else 'Runs'}</h1><p>{legend}</p>",
        *(f"<p>{html.escape(line)}</p>" for line in summary(directories)),
        curves,
        *_sweep(configs, directories),
        *_tensors(directories, names),
        "<h2>Configuration</h2>",
        _differences(configs, names),
        *(
            _details(name, directory, config)
            for name, directory, config in zip(names, directories, configs, strict=True)
        ),
    ]
    title = html.escape(", ".join(names))
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body>{"".join(body)}</body></html>\n'
    )
    storage.write(page, text.encode())
    return page


def summary(directories: Sequence[Path]) -> list[str]:
    """A line for each run: its last step, and the shares of its wall-clock time."""
    newest = [(read_metrics(directory / METRICS_FILE) or [{}])[-1] for directory in directories]
    return [
        f"{directory}: step {line.get('step', 0)}; {describe(line)}"
        for directory, line in zip(directories, newest, strict=True)
    ]


def _curves(directories: Sequence[Path], names: Sequence[str], colors: Sequence[str]) -> go.Figure:
    """One panel per quantity that any of the runs has logged."""
    logged = [
        read_metrics(directory / METRICS_FILE) + read_evaluations(directory)  # each metric is in one of the two
        for directory in directories
    ]
    known = {metric for lines in logged for line in lines for metric in line}
    of_sets = [name for name in sorted(known) if re.fullmatch("validation/[^/]+/loss|evaluation/([^/]+/)?loss", name)]
    tasks = [name for name in sorted(known) if name.startswith(("harness/", "evaluation/harness/"))]
    panels = {
        title: metrics
        for title, metrics in {**PANELS, SETS: of_sets, TASKS: tasks}.items()
        if not known.isdisjoint(metrics)
    }
    if not panels:
        raise UserError(f"{directories[0] / METRICS_FILE}: holds no curve; expected a run that has made a step")
    rows = -(-len(panels) // 2)
    figure = make_subplots(rows, 2, subplot_titles=list(panels), vertical_spacing=0.07)
    resume_lines: list[dict[str, Any]] = []
    for directory, lines, name, color in zip(directories, logged, names, colors, strict=True):
        resumes = read_resumes(directory / METRICS_FILE)
        for number, (title, metrics) in enumerate(panels.items()):
            place: Any = {"row": number // 2 + 1, "col": number % 2 + 1}
            for metric, dash in zip(metrics, cycle(DASHES)):
                points = _thinned([(line["step"], line[metric]) for line in lines if metric in line])
                figure.add_trace(
                    go.Scatter(
                        x=[step for step, _ in points],
                        y=[value for _, value in points],
                        name=f"{name}: {metric}",
                        # Their points are far apart.
                        mode="lines+markers" if metric.startswith(EVALUATED) else "lines",
                        line={"color": color, "dash": dash, "width": 1.6},
                        line_shape="hv" if metric in COUNTS else "linear",
                        showlegend=False,
                    ),
                    **place,
                )
            for index, step in enumerate(resumes):
                label = "resumed" if number == index == 0 else ""
                resume_lines.append(_vertical_line(step, number, color, label))
            figure.update_yaxes(
                type="log" if title in LOGARITHMIC else "linear",
                rangemode="normal" if number == 0 else "tozero",
                **place,
            )
            figure.update_xaxes(title_text="step" if number // 2 == rows - 1 else None, **place)
    # All at once: add_vline looks through all lines before, which takes minutes for a run that was often resumed.
    figure.update_layout(shapes=resume_lines)
    figure.update_layout(height=290 * rows, template="plotly_white", margin={"t": 40, "l": 50, "r": 20, "b": 40})
    return figure


def _tensors(directories: Sequence[Path], names: Sequence[str]) -> list[str]:
    """The statistics per tensor of each run that has logged them."""
    parts: list[str] = []
    for directory, name in zip(directories, names, strict=True):
        if figures := tensor_panels(read_metrics(directory / METRICS_FILE)):
            parts += [f"<h2>Statistics of tensors: {html.escape(name)}</h2>", *figures]
    return parts


def _sweep(configs: Sequence[dict[str, str]], directories: Sequence[Path]) -> list[str]:
    """The last loss against the logarithm of a swept number, a line for each value of a second swept key.

    Empty unless the runs differ in one or two keys, of which one is a positive number in all of them.
    """
    values = {key: [config.get(key, "") for config in configs] for key in {key for config in configs for key in config}}
    swept = {key: found for key, found in sorted(values.items()) if len(set(found)) > 1}
    numbers = {key: [_number(value) for value in found] for key, found in swept.items()}
    along = sorted((key for key in swept if min(numbers[key]) > 0), key=lambda key: -len(set(swept[key])))
    if not along or len(swept) > 2:
        return []
    (of, lines) = along[0], next((found for key, found in swept.items() if key != along[0]), [""] * len(configs))
    losses = [_last_loss(read_metrics(directory / METRICS_FILE)) for directory in directories]
    figure = go.Figure()
    for value in dict.fromkeys(lines):
        found = [(x, y) for x, y, line in zip(numbers[of], losses, lines, strict=True) if line == value]
        xs, ys = zip(*sorted(found, key=lambda point: point[0]), strict=True)
        figure.add_trace(go.Scatter(x=xs, y=ys, name=value, mode="lines+markers"))
    second = "".join(f", a line per {key}" for key in swept if key != of)
    figure.update_xaxes(type="log", dtick=math.log10(2), title_text=of)
    figure.update_layout(title=f"last loss against {of}{second}", template="plotly_white", height=420)
    return [figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False})]


def _number(value: str) -> float:
    """The number that a value is; -1 for anything else."""
    try:
        return float(value)
    except ValueError:
        return -1.0


def _last_loss(lines: Sequence[dict[str, Any]]) -> float | None:
    """The last loss of validation, or of training in a run without."""
    found = [[line[name] for line in lines if name in line] for name in ("validation/loss", "train/loss")]
    return next((losses[-1] for losses in found if losses), None)


def _thinned(points: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """At most `MOST_POINTS` of them, for browsers: the lowest and the highest of each stretch, and the last of all."""
    if len(points) <= MOST_POINTS:
        return points
    length = -(-len(points) // (MOST_POINTS // 2 - 1))
    kept: list[tuple[int, float | None]] = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        finite = [(value, step) for step, value in stretch if value is not None]
        extremes = {min(finite), max(finite)} if finite else set()
        kept += sorted((step, value) for value, step in extremes) or stretch[:1]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _vertical_line(step: int, panel: int, color: str, label: str) -> dict[str, Any]:
    axis = panel + 1 if panel else ""  # plotly calls the first one x and the second one x2
    return {
        "type": "line",
        "xref": f"x{axis}",
        "yref": f"y{axis} domain",
        "x0": step,
        "x1": step,
        "y0": 0,
        "y1": 1,
        "line": {"color": color, "dash": "dot", "width": 1},
        "label": {"text": label, "textposition": "end", "xanchor": "right"},
    }


def _differences(configs: Sequence[dict[str, str]], names: Sequence[str]) -> str:
    """The keys in which the runs differ from the default configuration or from each other."""
    default = flat_config(default_config())
    every = (default, *configs)
    keys = [key for key in configs[0] | default if len({config[key] for config in every if key in config}) > 1]
    if not keys:
        return "<p>All keys have their default values.</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("key", "default", *names))
    rows = ((key, *(config.get(key, "-") for config in every)) for key in keys)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _details(name: str, directory: Path, config: dict[str, str]) -> str:
    whole = "\n".join(f"{key}: {value}" for key, value in config.items())
    parts = [("whole configuration", whole, "")]
    layout = directory / LAYOUT_FILE
    if layout.is_file():
        parts.append(("layout and memory per device", layout.read_text(encoding="utf-8"), ""))
    samples = directory / SAMPLES_FILE
    if samples.is_file():
        texts = samples.read_text(encoding="utf-8")
        parts.append((f"{len(re.findall('^--- step', texts, re.MULTILINE))} samples over time", texts, "text"))
    blocks = (
        f'<details><summary>{title}</summary><pre class="{kind}">{html.escape(text)}</pre></details>'
        for title, text, kind in parts
    )
    return f"<h2>{html.escape(name)}</h2>{''.join(blocks)}"
