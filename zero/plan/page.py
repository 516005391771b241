"""plan.html: all columns of a plan, and a picture of where the predicted time goes (matplotlib)."""

from __future__ import annotations

import html
import io
from collections import Counter
from typing import Any

from matplotlib.figure import Figure

from zero.plan.compile import Row
from zero.plan.table import DETAILS, RESULTS, SETTINGS

PAGE_FILE = "plan.html"
_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222255", "#ee8866", "#77aadd")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222 }
table { border-collapse: collapse } td, th { border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: right }
td, pre { font-family: ui-monospace, monospace; font-size: 12px }
"""


def page(result: dict[str, Any], summary: str) -> str:
    """The page for a plan.json and the table that is printed."""
    columns = SETTINGS | RESULTS | DETAILS
    lines = ["".join(f"<th>{html.escape(name)}</th>" for name in columns)]
    lines += ["".join(f"<td>{html.escape(show(row))}</td>" for show in columns.values()) for row in result["rows"]]
    table = "\n".join(f"<tr>{line}</tr>" for line in lines)
    predicted = [row for row in result["rows"] if row["breakdown"]]
    picture = _picture(predicted) if predicted else ""
    return (
        f'<!doctype html><meta charset="utf-8"><title>plan of {html.escape(result["topology"])}</title>'
        f"<style>{_STYLE}</style>\n<pre>{html.escape(summary)}</pre>\n{picture}\n<table>\n{table}\n</table>\n"
    )


def _picture(rows: list[Row]) -> str:
    """A bar per row, of the seconds of each part of the model, as SVG."""
    totals = [Counter[str]() for _ in rows]
    for total, row in zip(totals, rows, strict=True):
        for part, _, seconds in row["breakdown"]:
            total[part] += seconds
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [name for name, _ in sum(totals, Counter[str]()).most_common()]
    left = [0.0] * len(rows)
    for number, name in enumerate(names):
        seconds = [total[name] for total in totals]
        axes.barh(range(len(rows)), seconds, left=left, label=name, color=_COLORS[number % len(_COLORS)])
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    labels = [f"stage {row['stage']}, {row['micro_batch']} x {row['accumulation']}, {row['remat']}" for row in rows]
    axes.set(yticks=range(len(rows)), yticklabels=labels, xlabel="predicted seconds per step")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=8)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]
