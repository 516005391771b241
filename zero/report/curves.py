"""The curves of report.html: which panels there are, and the points that a page holds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from zero.record.metrics_file import EVALUATED
from zero.record.run_record import RunRecord
from zero.report.panel import Panel
from zero.report.tensor_panels import heat_maps, leaf_panels
from zero.training.objectives.table import with_defaults

MOST_POINTS = 40_000  # of all curves of a page, which is then smaller than 1.5 MB
MOST_POINTS_OF_A_CURVE, FEWEST_POINTS_OF_A_CURVE = 2_000, 100


PANELS = (
    Panel(
        "Loss",
        "nats per token",
        (
            ("train/loss", "training"),
            ("validation/loss", "validation"),
            ("validation/ema_loss", "validation, averaged weights"),
        ),
        from_zero=False,
    ),
    Panel("Learning rate", "per step", (("learning_rate", "learning rate"),)),
    Panel("Gradient norm", "before clipping", (("gradient_norm", "gradient norm"),), is_logarithmic=True),
    Panel("Throughput", "tokens per second", (("tokens_per_second", "throughput"),)),
    Panel("Model FLOPs utilization", "share of the published peak", (("mfu", "MFU"),)),
    Panel("Speed", "share of the predicted one", (("predicted_speed", "speed"),)),
    Panel("Step time", "seconds", (("step_time", "step time"),)),
    Panel("Waiting", "share of a step", (("data_wait", "for data"), ("device_wait", "for devices"))),
    Panel("Sequence length", "tokens", (("sequence_length", "length"),), is_stepped=True),
    Panel("Peak memory", "bytes per device", (("peak_memory", "peak"),)),
    Panel(
        "Skipped steps",
        "so far",
        (("skipped_steps", "skipped"), ("skipped_spikes", "spikes")),
        is_stepped=True,
    ),
    Panel(
        "Goodput",
        "share of the wall clock",
        (
            ("goodput/steps", "steps"),
            ("goodput/restarts", "restarts and repeated work"),
            ("goodput/evaluation", "evaluation and reports"),
        ),
    ),
    Panel(
        "Experts",
        "share of the tokens",
        (
            ("expert_share_max", "most chosen expert"),
            ("expert_share_min", "least chosen expert"),
            ("dropped_share", "dropped"),
        ),
    ),
    Panel("Entropy of the router", "nats", (("router_entropy", "entropy"),)),
    Panel("Codes of keys", "perplexity", (("codebook/perplexity", "perplexity"),)),
    Panel(
        "Rounded keys",
        "share",
        (("codebook/error", "relative error"), ("codebook/unused", "unused codes")),
    ),
)


def panels_of_objectives() -> list[Panel]:
    """The panels of what objectives add to a line, by the titles of their metrics."""
    units: dict[str, str] = {}
    curves: dict[str, dict[str, str]] = {}
    for objective in with_defaults().values():
        for metric in objective.metrics_of_steps:
            units[metric.title] = metric.unit
            names = curves.setdefault(metric.title, {})
            names[metric.name] = metric.name
            names[f"validation/{metric.name}"] = f"{metric.name}, validation"
    return [Panel(title, unit, tuple(curves[title].items()), from_zero=False) for title, unit in units.items()]


SETS = re.compile(r"validation/[^/]+/loss|evaluation/([^/]+/)?loss")
TASKS = re.compile(r"harness/.+|evaluation/harness/.+")


def panels_of(runs: Sequence[RunRecord]) -> list[Panel]:
    """The panels with a curve of any of the runs."""
    logged: set[str] = set()
    for run in runs:
        logged.update(run.history.curves, *run.evaluations)
    sets = tuple((metric, metric) for metric in sorted(logged) if SETS.fullmatch(metric))
    tasks = tuple((metric, metric) for metric in sorted(logged) if TASKS.fullmatch(metric))
    panels = (
        *PANELS[:1],
        Panel("Loss of validation sets", "nats per token", sets, from_zero=False),
        Panel("Tasks", "lm-evaluation-harness", tasks),
        *panels_of_objectives(),
        *PANELS[1:],
    )
    return [panel for panel in panels if not logged.isdisjoint(panel.metrics)]


def panels_of_leaves(runs: Sequence[RunRecord]) -> list[Panel]:
    """The panels of `statistics.every`, of each run on its own."""
    return list(chain.from_iterable(leaf_panels(run.history.curves, number) for number, run in enumerate(runs)))


def payload(runs: Sequence[RunRecord], panels: Sequence[Panel]) -> dict[str, Any]:
    """What the script of the page draws."""
    metrics = set(chain.from_iterable(panel.metrics for panel in panels))
    count = sum(len(metrics.intersection(run.history.curves)) for run in runs)
    most = min(max(MOST_POINTS // max(count, 1), FEWEST_POINTS_OF_A_CURVE), MOST_POINTS_OF_A_CURVE)
    return {
        "runs": [_run(run, metrics, most) for run in runs],
        "panels": [_panel(panel) for panel in panels],
        "heat": heat_maps(runs[0].history.activations) if len(runs) == 1 else None,
        "sweep": sweep(runs),
    }


def _panel(panel: Panel) -> dict[str, Any]:
    """A panel with its curves that are drawn as single points."""
    return {**asdict(panel), "points": [name for name in panel.metrics if name.startswith(EVALUATED)]}


def _run(run: RunRecord, metrics: set[str], most: int) -> dict[str, Any]:
    curves = {}
    for metric in sorted(metrics):
        evaluated = [(line["step"], line[metric]) for line in run.evaluations if metric in line]
        points = [*run.history.curves.get(metric, ()), *evaluated]
        if points:
            steps, values = zip(*thinned(points, most), strict=True)
            curves[metric] = [steps, values]
    hours = [(step, seconds / 3600) for step, seconds in run.values("wall_time")]
    steps, clock = zip(*thinned(hours, most), strict=True) if hours else ((), ())
    tokens = run.last["tokens_seen"] / run.last["step"] if "tokens_seen" in run.last else None
    return {
        "name": run.name,
        "tokens_per_step": tokens,
        "parameters": run.parameters,
        "hours": [steps, clock],
        "resumes": run.history.resumes,
        "curves": curves,
    }


def thinned(points: Sequence[tuple[int, float | None]], most: int) -> list[tuple[int, float | None]]:
    """The points thinned for browsers: the lowest and the highest of each stretch, and the last of all.

    >>> thinned([(step, step % 4) for step in range(20)], 6)
    [(0, 0), (7, 3), (12, 0), (19, 3)]
    """
    if len(points) <= most:
        return list(points)
    length = -(-len(points) // (most // 2 - 1))
    kept: list[tuple[int, float | None]] = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        finite = [(value, step) for step, value in stretch if value is not None]
        extremes = {min(finite), max(finite)} if finite else set()
        kept += sorted((step, value) for value, step in extremes) or stretch[:1]
    if kept[-1] == points[-1]:
        return kept
    return [*kept, points[-1]]


def axes_of(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """What all runs can be drawn against: the name and the text of each."""
    axes = [("step", "steps")]
    if all("tokens_seen" in run.last for run in runs):
        axes.append(("tokens", "tokens"))
        if all(run.parameters is not None for run in runs):
            axes.append(("flops", "FLOPs"))
    if all("wall_time" in run.history.first and "wall_time" in run.last for run in runs):
        axes.append(("hours", "hours"))
    return axes


def sweep(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """The last loss against a swept number, with a line for each value of a second swept key.

    None unless the runs differ in one or two keys, of which one is a positive number in all of them.
    """
    swept: dict[str, list[str]] = {}
    for key in sorted(set(chain.from_iterable(run.config for run in runs))):
        values = [run.config.get(key, "") for run in runs]
        if len(set(values)) > 1:
            swept[key] = values
    numbers = {key: list(map(_number, values)) for key, values in swept.items()}
    positive = [key for key in swept if min(numbers[key]) > 0]
    if not positive or len(swept) > 2:
        return None
    along = max(positive, key=lambda key: len(set(swept[key])))
    seconds = [key for key in swept if key != along]
    second = seconds[0] if seconds else None
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for number, run in enumerate(runs):
        name = "last loss" if second is None else f"{second}={swept[second][number]}"
        lines.setdefault(name, []).append((numbers[along][number], last_loss(run)))
    return {"key": along, "lines": [{"name": name, "points": sorted(points)} for name, points in lines.items()]}


def _number(value: str) -> float:
    """The number that a value is; not a number for anything else."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def last_loss(run: RunRecord) -> float | None:
    """The last loss of validation, or of training in a run without."""
    for metric in ("validation/loss", "train/loss"):
        if metric in run.history.curves:
            return run.history.curves[metric][-1][1]
    return None
