"""plan.html: the chosen setting, the time and memory of each setting, and all columns (jinja2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from zero.costs.predict import UPDATE
from zero.hosts.speeds import GIB
from zero.pages.render import part, render
from zero.planning import search
from zero.planning.compile import PAUSES, Row, highest_peak
from zero.planning.config import Request
from zero.planning.table import (
    COLUMNS,
    COSTS,
    PHASES,
    RESULTS,
    differing_settings,
    same_settings,
    shown,
    tokens_text,
    training_command,
    verdict,
)

PAGE_FILE = "plan.html"
SCHEDULE_FILE = "schedule.html"  # beside it, of the one setting that was compiled
TEMPLATE = Path(__file__).parent / "plan.html.jinja"
MEMORY = (  # names of the parts of a peak, with the keys of their bytes
    ("state", "state_bytes"),
    ("gradients", "gradient_bytes"),
    ("gathered weights", "gathered_bytes"),
)


class Segment(NamedTuple):
    """A part of a bar.

    Attributes:
      share: relative to the width of the longest bar.
      text: its value with the unit.
    """

    name: str
    share: float
    text: str


class Setting(NamedTuple):
    """A row of a plan, prepared for the page."""

    name: str
    is_chosen: bool
    fits: bool
    verdict: str
    facts: tuple[tuple[str, str], ...]
    time: tuple[Segment, ...]
    memory: tuple[Segment, ...]
    limit: float  # where the memory ends, as a share of the memory bar's width


def page(result: dict[str, Any], request: Request, *, has_schedule: bool = False) -> str:
    """The page for a plan.json."""
    plan = request.config.plan
    rows = result["rows"]
    chosen = chosen_row(result)
    decision: dict[str, Any] = {"chosen": None, "best": None, "command": None, "model": None, "breakdown": []}
    if chosen is not None:
        decision["chosen"] = setting_name(chosen, rows)
        decision["best"] = rows.index(chosen)
        if plan.search == "largest":
            decision["model"] = chosen["model"]
        else:
            decision["command"] = training_command(chosen, request)
        if chosen["breakdown"]:
            decision["breakdown"] = breakdown(chosen)
    values = decision | {
        "title": f"Plan of {request.config.model.size} on {result['topology']}",
        "facts": (
            f"{result['devices']:,} devices of {rows[0]['available_bytes'] / GIB:.2f} GiB",
            f"{result['parameters']:,} parameters",
            f"a run of {tokens_text(plan, result['parameters'])}",
        ),
        "is_estimate": rows[0]["is_estimate"],
        "same": same_settings(rows),
        "settings": settings(rows, chosen),
        "is_search": plan.search in ("fastest", "largest"),
        "is_from_schedule": any(row.get("from_schedule") for row in rows),
        "price": plan.dollars_per_hour,
        "phases": PHASES,
        "columns": list(COLUMNS),
        "cells": list(zip(*(shown(rows, name) for name in COLUMNS), strict=True)),
        "schedule": SCHEDULE_FILE if has_schedule else None,
        "styles": part("style.css"),
    }
    return render(TEMPLATE, values)


def chosen_row(result: dict[str, Any]) -> Row | None:
    """The row that the search chose; without a search the fastest that fits, preferably with memory to spare."""
    if result["best"] is not None:
        return result["rows"][result["best"]]
    with_headroom = search.best(result["rows"], search.HEADROOM)
    if with_headroom is not None:
        return with_headroom
    return search.best(result["rows"], 0.0)


def setting_name(row: Row, rows: list[Row]) -> str:
    """The settings in which the rows differ; the stage if they differ in nothing."""
    differing = [f"{name} {COLUMNS[name](row)}" for name in differing_settings(rows)]
    return ", ".join(differing) if differing else f"stage {row['stage']}"


def settings(rows: list[Row], chosen: Row | None) -> list[Setting]:
    """Each row with its bars, all drawn to the same scale."""
    longest = max((seconds_of(row) or 0.0 for row in rows), default=0.0)
    most = max(max(highest_peak(row), row["available_bytes"]) for row in rows)

    def setting(row: Row) -> Setting:
        results = {name: show(row) for name, show in (RESULTS | COSTS).items()}
        return Setting(
            setting_name(row, rows),
            row is chosen,
            row["fits"],
            verdict(row),
            tuple((name, text) for name, text in results.items() if text != "-") + host_facts(row),
            time_segments(row, longest),
            memory_segments(row, most),
            row["available_bytes"] / most,
        )

    return [setting(row) for row in rows]


def host_facts(row: Row) -> tuple[tuple[str, str], ...]:
    """What is stored in host memory, if anything."""
    if not row.get("host_bytes"):
        return ()
    return (("in the host's memory", f"{row['host_bytes'] / GIB:.2f} GiB per device"),)


def seconds_of(row: Row) -> float | None:
    """The predicted seconds of a step, or their lower bound; None if neither is known."""
    return row["seconds_lower_bound"] if row["seconds"] is None else row["seconds"]


def time_segments(row: Row, longest: float) -> tuple[Segment, ...]:
    """The seconds of a step; without a prediction only the lower bound on them."""
    if row["seconds"] is None:
        bound = row["seconds_lower_bound"]
        if bound is None:
            return ()
        return (Segment("at least", bound / longest, f"{bound:.4g} s"),)
    update = sum(seconds for _, phase, seconds in row["breakdown"] if phase == UPDATE)
    exposed = min(row["exposed_seconds"], row["seconds"] - update)
    parts = (
        ("forward and backward", row["seconds"] - update - exposed),
        ("exposed communication", exposed),
        ("optimizer update", update),
    )
    return tuple(Segment(name, seconds / longest, f"{seconds:.4g} s") for name, seconds in parts)


def memory_segments(row: Row, most: float) -> tuple[Segment, ...]:
    """The bytes at the peak of a step, and the excess of a program between two steps."""
    parts = [(name, row[key]) for name, key in MEMORY]
    named = sum(size for _, size in parts)
    if row["peak_bytes"] > named:
        parts.append(("activations and buffers", row["peak_bytes"] - named))
    highest = highest_peak(row)
    if highest > max(row["peak_bytes"], named):
        pause = max(PAUSES, key=lambda name: row[f"{name}_peak_bytes"] or 0)
        parts.append((f"more in the {pause}", highest - max(row["peak_bytes"], named)))
    return tuple(Segment(name, size / most, f"{size / GIB:.2f} GiB") for name, size in parts if size)


def breakdown(row: Row) -> list[tuple[str, list[float], float, float]]:
    """For each part of the model: its name, milliseconds by phase and in total, and share; longest first."""
    parts: dict[str, dict[str, float]] = {}
    for name, phase, seconds in row["breakdown"]:
        parts.setdefault(name, dict.fromkeys(PHASES, 0.0))[phase] += 1000 * seconds
    lines = [
        (name, list(phases.values()), sum(phases.values()), sum(phases.values()) / (1000 * row["seconds"]))
        for name, phases in parts.items()
    ]
    return sorted(lines, key=lambda line: -line[2])
