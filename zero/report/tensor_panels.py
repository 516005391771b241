"""Panels of `training.statistics` in the report: a heat map of layers by steps per activation, a curve per leaf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from zero.training.statistics import ACTIVATION, CHANGE, GRADIENT, WEIGHT

TITLES = {
    CHANGE: "mean |change| of a leaf / learning rate",
    GRADIENT: "norm of the gradient of a leaf",
    WEIGHT: "norm of the weights of a leaf",
}
MOST_STEPS = 400  # columns of a heat map, and points of a curve
_COLUMNS = 3
Line = Mapping[str, Any]


def tensor_panels(lines: Sequence[Line]) -> list[str]:
    """Two figures of a run's lines of metrics, without plotly itself; none without statistics.

    Heat maps are of log10 of the mean |x| of each activation.
    """
    lines = [line for line in lines if any(name.startswith(f"{ACTIVATION}/") for name in line)]
    if not lines:
        return []
    lines = [*lines[:: -(-len(lines) // MOST_STEPS)]]
    figures = (_heat_maps(lines), _curves(lines))
    options = {"displayModeBar": False, "responsive": True}
    return [figure.to_html(full_html=False, include_plotlyjs=False, config=options) for figure in figures]


def _heat_maps(lines: Sequence[Line]) -> go.Figure:
    layers: dict[str, int] = {}
    for name in lines[-1]:
        kind, _, rest = name.partition("/")
        if kind == ACTIVATION:
            activation, _, layer = rest.rpartition("/")
            layers[activation] = max(layers.get(activation, 0), int(layer) + 1)
    rows = -(-len(layers) // _COLUMNS)
    titles = [f"mean |{name}|" for name in layers]
    figure = make_subplots(rows, _COLUMNS, subplot_titles=titles, vertical_spacing=0.3 / rows)
    steps = [line["step"] for line in lines]
    for number, (name, count) in enumerate(layers.items()):
        sizes = [[_log10(line.get(f"{ACTIVATION}/{name}/{layer}")) for line in lines] for layer in range(count)]
        shown = "step %{x}, layer %{y}: 10^%{z:.2f}"
        heat_map = go.Heatmap(x=steps, y=list(range(count)), z=sizes, coloraxis="coloraxis", hovertemplate=shown)
        figure.add_trace(heat_map, number // _COLUMNS + 1, number % _COLUMNS + 1)
    figure.update_layout(coloraxis={"colorscale": "Viridis", "colorbar": {"title": "log10"}})
    title = "activations: layers by steps"
    return figure.update_layout(height=80 + 210 * rows, template="plotly_white", title=title)


def _curves(lines: Sequence[Line]) -> go.Figure:
    leaves = [name.removeprefix(f"{CHANGE}/") for name in lines[-1] if name.startswith(f"{CHANGE}/")]
    figure = make_subplots(1, len(TITLES), subplot_titles=list(TITLES.values()))
    steps = [line["step"] for line in lines]
    for column, kind in enumerate(TITLES, start=1):
        for leaf, color in zip(leaves, cycle(qualitative.Dark24)):
            curve = go.Scatter(
                x=steps,
                y=[line.get(f"{kind}/{leaf}") for line in lines],
                name=leaf,
                legendgroup=leaf,
                showlegend=column == 1,
                line={"color": color, "width": 1.4},
            )
            figure.add_trace(curve, 1, column)
        figure.update_yaxes(type="log", row=1, col=column)
        figure.update_xaxes(title_text="step", row=1, col=column)
    height = max(420, 20 * len(leaves) + 420)
    return figure.update_layout(height=height, template="plotly_white", legend={"orientation": "h", "y": -0.2})


def _log10(size: float | None) -> float | None:
    """None, an empty cell, for zero and for what was not finite."""
    return math.log10(size) if size else None
