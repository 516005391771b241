"""report.html: one or several runs in a page without a server, drawn by uPlot in the browser (jinja2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from zero.files import storage
from zero.pages.render import data_island, part, render
from zero.record.metrics_file import lines_that_count
from zero.record.run_files import METRICS_FILE
from zero.record.run_record import RunRecord, read_run
from zero.report import summary as first_screen
from zero.report.confusion import confusion
from zero.report.curves import axes_of, panels_of, panels_of_leaves, payload
from zero.report.summary import loss_text
from zero.tracking.goodput import describe
from zero.tracking.progress import clock

PAGE = Path(__file__).parent / "page"  # its template and script
REPORT_FILE = "report.html"
RELOAD_SECONDS = 30  # of the page of a run that is not finished
COLUMNS = ("state", "best validation", "at step", "training loss", "tokens", "tokens/s", "wall clock", "goodput")
NUMBERS = (
    "step",
    "tokens_seen",
    "train/loss",
    "validation/loss",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
)


class RunRow(NamedTuple):
    """A row of the table of several runs."""

    name: str
    is_best: bool
    cells: tuple[str, ...]


def write_report(
    directories: Sequence[Path], page: Path, defaults: Mapping[str, str], with_pictures: bool = False
) -> Path:
    """Writes a page that shows a run, or several beside each other; it is replaced whole, and reloads itself.

    Args:
      defaults: of all keys, as texts, with which the values of the runs are compared.
      with_pictures: first draw `run.png` in each run.

    Raises:
      UserError: a directory is not a run directory, or no step of it is logged.
    """
    runs = [read_run(directory) for directory in directories]
    if with_pictures:
        from zero.report.plot import draw_run  # here, as its imports take a second

        for run in runs:
            draw_run(run.directory, run.history)
    storage.write(page, render(PAGE / "report.html.jinja", _values(runs, defaults)).encode())
    return page


def _values(runs: Sequence[RunRecord], defaults: Mapping[str, str]) -> dict[str, Any]:
    """What the template shows."""
    panels = panels_of(runs)
    leaves = panels_of_leaves(runs)
    curves = payload(runs, [*panels, *leaves])
    run = runs[0]
    return {
        "title": run.name if len(runs) == 1 else f"{len(runs)} runs",
        "runs": runs,
        "is_finished": all(each.is_finished for each in runs),
        "newest": run.last.get("time"),
        "reload_seconds": RELOAD_SECONDS,
        "outcome": first_screen.outcome(run),
        "cost": first_screen.cost(run),
        "model": first_screen.model(run),
        "files": first_screen.files(run),
        "commands": first_screen.commands(run),
        "columns": COLUMNS,
        "table": _table(runs),
        "axes": axes_of(runs),
        "panels": panels,
        "leaves": leaves,
        "heat": curves["heat"],
        "sweep": curves["sweep"],
        "confusions": [(each, table) for each in runs if (table := confusion(each)) is not None],
        "has_resumes": any(each.history.resumes for each in runs),
        "differences": _differences(runs, defaults),
        "number_columns": NUMBERS,
        "numbers": [_numbers(each) for each in runs],
        "curves": data_island(curves),
        "styles": part("uPlot.min.css") + part("style.css"),
        "scripts": part("uPlot.iife.min.js") + part("common.js") + part("charts.js", PAGE),
    }


def _table(runs: Sequence[RunRecord]) -> list[RunRow]:
    """A row for each run, the lowest validation loss first."""

    def loss(run: RunRecord) -> float:
        best = run.best("validation/loss")
        return float("inf") if best is None else best[1]

    rows = []
    for run in sorted(runs, key=loss):
        best = run.best("validation/loss")
        training = run.values("train/loss")
        last = run.last
        speeds = run.values("tokens_per_second")
        cells = (
            first_screen.state(run).value,
            "–" if best is None else loss_text(best[1]),
            "–" if best is None else f"{best[0]:,}",
            loss_text(training[-1][1]) if training else "–",
            f"{last['tokens_seen']:,}" if "tokens_seen" in last else "–",
            f"{speeds[-1][1]:,.0f}" if speeds else "–",
            clock(last["wall_time"]) if "wall_time" in last else "–",
            f"{last['goodput/steps']:.1%}" if "goodput/steps" in last else "–",
        )
        rows.append(RunRow(run.name, best is not None, cells))
    return rows


_FOUND_IN_DATA = ("data.last_target",)  # keys whose null a start replaces by what the rows are


def _differences(runs: Sequence[RunRecord], default: Mapping[str, str]) -> list[list[str]]:
    """The keys in which the runs differ from the default configuration or from each other, with all values."""
    configs = [default, *(run.config for run in runs)]
    keys = dict.fromkeys([*chain.from_iterable(run.config for run in runs), *default])
    rows = []
    for key in keys:
        values = [config.get(key, "–") for config in configs]
        if key in _FOUND_IN_DATA and values[0] == "null":
            values = values[1:]
        if len(set(values) - {"–"}) > 1:
            rows.append([key, *(config.get(key, "–") for config in configs)])
    return rows


def _numbers(run: RunRecord) -> list[list[str]]:
    """The newest lines with a validation loss, and the last line."""
    lines = list(run.history.evaluations)
    if not lines or lines[-1]["step"] != run.last["step"]:
        lines.append(run.last)
    return [_cells(line) for line in lines]


def _cells(line: Mapping[str, Any]) -> list[str]:
    return [_number(line.get(name, "–")) for name in NUMBERS]


def _number(value: float | str | None) -> str:
    if value is None:
        return "not finite"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return value
    return f"{value:.6g}"


def summary(directories: Sequence[Path]) -> list[str]:
    """A line for each run: its last step, and the shares of its wall-clock time."""
    newest: list[dict[str, Any]] = [next(lines_that_count(each / METRICS_FILE), {}) for each in directories]
    return [
        f"{directory}: step {line.get('step', 0)}; {describe(line)}"
        for directory, line in zip(directories, newest, strict=True)
    ]
