"""Panels of `statistics.every` in the report: a heat map of layers by steps per activation, a curve per leaf."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from zero.report.panel import Panel
from zero.training.leaf_statistics import OF_LEAVES
from zero.training.statistics import ACTIVATION

Line = Mapping[str, Any]


def heat_maps(lines: Sequence[Line]) -> dict[str, Any] | None:
    """A map for each activation of log10 of its mean size, by layer and step, and the range of all; None without."""
    if not lines:
        return None
    layers: dict[str, int] = {}
    for name in lines[-1]:
        kind, _, rest = name.partition("/")
        if kind == ACTIVATION:
            activation, _, layer = rest.rpartition("/")
            layers[activation] = max(layers.get(activation, 0), int(layer) + 1)
    steps = [line["step"] for line in lines]
    values = {name: _sizes(lines, name, count) for name, count in layers.items()}
    maps = [{"name": name, "steps": steps, "values": rows} for name, rows in values.items()]
    sizes = [size for size in chain.from_iterable(chain(*values.values())) if size is not None]
    return {"maps": maps, "range": [min(sizes, default=0.0), max(sizes, default=1.0)]}


def _sizes(lines: Sequence[Line], activation: str, layers: int) -> list[list[float | None]]:
    """A row for each layer, with a column for each line."""
    return [_row(lines, f"{ACTIVATION}/{activation}/{layer}") for layer in range(layers)]


def _row(lines: Sequence[Line], metric: str) -> list[float | None]:
    return [_log10(line.get(metric)) for line in lines]


def leaf_panels(logged: Iterable[str], run: int) -> list[Panel]:
    """The panels of curves of leaves of a run, by the names of its metrics; none without statistics."""
    names = sorted(logged)
    panels = []
    for kind, statistic in OF_LEAVES.items():
        curves = tuple((name, name.removeprefix(f"{kind}/")) for name in names if name.startswith(f"{kind}/"))
        if curves:
            panels.append(Panel(statistic.title, statistic.unit, curves, is_logarithmic=True, run=run))
    return panels


def _log10(size: float | None) -> float | None:
    """None, an empty cell, for zero and for what was not finite."""
    if not size:
        return None
    return math.log10(size)
