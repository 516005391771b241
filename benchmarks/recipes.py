"""The step of each recipe on the slice of its authors: peak memory and predicted time, beside what they published.

    python -m benchmarks.recipes [--recipes zero-transformer-760m gpt-neo-2_7b ...]
    python -m benchmarks.recipes --compare   # compiles nothing; status 1 if a row is missing, or of another program

Compiles the step and the evaluation of recipes in conf/recipe for their slices, without a TPU, as `mode=plan` does for
several stages, and writes docs/sources/recipe_plans.json and the table of docs/reference/from-other-code.md. One takes
about two minutes of CPU. A row keeps digests of all that its figures depend on: the lowered programs, the compiler, and
the code that predicts seconds. A recipe whose digests are those of its row is not compiled again; to compute them takes
about five seconds of CPU. Each row is written once it is there, so that a repetition continues.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax

import zero.costs
import zero.hosts.speeds
import zero.hosts.torus
from benchmarks.recipe_sources import PAGE, REPOSITORY, load_runs, with_part
from zero.commands.cli import compose
from zero.costs.topology import find_devices, prepare_environment
from zero.job.job import make_job, place_model, steps_per_row
from zero.models.config import GPTConfig
from zero.planning.compile import (
    compile_step,
    evaluation_arguments,
    highest_peak,
    options_of,
    row_tokens,
    step_arguments,
)
from zero.planning.config import PlanConfig, Request

TABLE = REPOSITORY / "docs" / "sources" / "recipe_plans.json"
RUNS = load_runs()
START = "<!-- printed by benchmarks/recipes.py -->\n"
COLUMNS = (
    "recipe",
    "slice",
    "peak, GiB per device",
    "step, s",
    "tokens/s",
    "MFU",
    "all steps, days",
    "published speed",
)


@dataclass(frozen=True)
class Digests:
    """What the figures of a plan follow from; empty for figures of a program that is no longer there.

    Attributes:
      programs: of the lowered step and evaluation, and the compiler's options.
      compiler: its version.
      prediction: of the modules that read seconds from a compiled program.
    """

    programs: str
    compiler: str
    prediction: str


@dataclass(frozen=True)
class Plan:
    """The figures of a recipe; those of time are None where the programs do not fit.

    Attributes:
      digests: of all that they depend on.
      peak_bytes: the highest of one device.
      available_bytes: of one device.
      seconds: per call of the step's program, which makes all updates of a batch of rows.
      tokens_per_second: of the slice.
      mfu: model FLOPs utilization.
    """

    digests: Digests
    peak_bytes: int
    available_bytes: int
    seconds: float | None
    tokens_per_second: float | None
    mfu: float | None


def digest(texts: Iterable[str]) -> str:
    """Of texts in order, 16 hexadecimal digits.

    >>> digest(["a", "b"]) == digest(["a", "b"]) != digest(["ab"])
    True
    """
    total = hashlib.sha256()
    for text in texts:
        total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()[:16]


@cache
def prediction() -> str:
    """A digest of the modules that predict seconds; comments, docstrings and layout do not count."""
    directory = Path(next(iter(zero.costs.__path__)))
    paths = [*sorted(directory.glob("*.py")), Path(zero.hosts.speeds.__file__), Path(zero.hosts.torus.__file__)]
    return digest(ast.dump(_without_docstrings(ast.parse(path.read_text()))) for path in paths)


def _without_docstrings(module: ast.Module) -> ast.Module:
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return module


def requested(recipe: str) -> Request:
    """What is compiled of a recipe; samples between steps are left out."""
    config, size = compose([f"+recipe={recipe}", "mode=plan", "plan.exact=true", "training.sample_tokens=0"])
    return Request(config, size, config.plan.micro_batch)


def digests(request: Request) -> Digests:
    """Lowers the programs, and compiles nothing."""
    config = request.config
    devices = find_devices(config.plan.topology)
    job = make_job(config, place_model(config, request.size, devices, request.rows))
    step = job.programs.step.lower(*step_arguments(job, request.rows, row_tokens(request)))
    evaluation = job.programs.evaluate.lower(*evaluation_arguments(job, request))
    options = json.dumps(options_of(config.zero, devices), sort_keys=True)
    programs = digest([step.as_text(), evaluation.as_text(), options])
    return Digests(programs, f"libtpu {version('libtpu')}", prediction())


def compiled(request: Request, of_programs: Digests) -> Plan:
    """The figures of a recipe, by the compiler."""
    row = compile_step(request)
    times = [row[name] if row["fits"] else None for name in ("seconds", "tokens_per_second", "mfu")]
    return Plan(of_programs, highest_peak(row), row["available_bytes"], *times)


def load_plans() -> dict[str, Plan]:
    """The plans of docs/sources/recipe_plans.json."""
    rows = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return {name: Plan(Digests(**row.pop("digests")), **row) for name, row in rows.items()}


def write(plans: Mapping[str, Plan]) -> None:
    """Writes the table, and the page that is printed from it."""
    text = json.dumps({name: asdict(plans[name]) for name in RUNS if name in plans}, indent=1)
    TABLE.write_text(text + "\n")
    PAGE.write_text(with_part(PAGE.read_text(), page_part(plans), START))


def what_changed(then: Digests | None, now: Digests) -> str | None:
    """Why the figures of a row may no longer be those of its recipe; None if they are.

    >>> then = Digests("a", "libtpu 1", "c")
    >>> what_changed(then, then), what_changed(then, Digests("b", "libtpu 2", "c")), what_changed(None, then)
    (None, 'other programs, compiler', 'no row')
    """
    if then is None:
        return "no row"
    before = asdict(then)
    names = [name for name, value in asdict(now).items() if value != before[name]]
    return f"other {', '.join(names)}" if names else None


def published_speed(published: str) -> str:
    """What a sentence on published results says of speed.

    >>> published_speed("4 days on a v3-32; LAMBADA 46.4 %"), published_speed("LAMBADA 37.4 %")
    ('4 days on a v3-32', '-')
    """
    parts = [part for part in published.split("; ") if re.search(r"days|hours|tokens/s", part)]
    return "; ".join(parts) or "-"


def days(config: PlanConfig, size: GPTConfig, seconds: float) -> float:
    """Of all steps of a run; a call of the program makes all steps of a batch of rows."""
    return seconds * (config.training.total_steps // steps_per_row(config.data, size)) / 86_400


def short(number: float) -> str:
    """With three digits.

    >>> short(0.02147), short(5.416), short(134.66), short(0.0312)
    ('0.0215', '5.42', '135', '0.0312')
    """
    return f"{number:.3g}"


def table_row(name: str, plan: Plan) -> str:
    """The row of a recipe in the page."""
    request = requested(name)
    row = {
        "recipe": f"`{name}`" if plan.digests.programs else f"`{name}`, earlier program",
        "slice": request.config.plan.topology,
        "peak, GiB per device": f"{plan.peak_bytes / 2**30:.2f}",
        "published speed": published_speed(RUNS[name].published),
    }
    if plan.seconds is None or plan.tokens_per_second is None or plan.mfu is None:
        row["step, s"] = f"does not fit in {plan.available_bytes / 2**30:.2f} GiB"
    else:
        row |= {
            "step, s": short(plan.seconds),
            "tokens/s": f"{plan.tokens_per_second:,.0f}",
            "MFU": f"{plan.mfu:.0%}".replace("%", " %"),
            "all steps, days": short(days(request.config, request.size, plan.seconds)),
        }
    return f"| {' | '.join(row.get(column, '') for column in COLUMNS)} |\n"


def page_part(plans: Mapping[str, Plan]) -> str:
    """The table of plans in docs/reference/from-other-code.md."""
    rows = [table_row(name, plans[name]) for name in RUNS if name in plans]
    return f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n{''.join(rows)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="NAME")
    parser.add_argument("--compare", action="store_true", help="print what has changed, and compile nothing")
    options = parser.parse_args()
    jax.config.update("jax_traceback_in_locations_limit", 0)  # else kernels hold the lines of their sources
    is_other = False
    for name in options.recipes:
        request = requested(name)
        prepare_environment(request.config.plan.topology)
        now = digests(request)
        plan = load_plans().get(name)
        changed = what_changed(None if plan is None else plan.digests, now)
        is_other = is_other or changed is not None
        if changed is not None and not options.compare:
            plan = compiled(request, now)
            write(load_plans() | {name: plan})  # read again: another process may have written a row
        print(f"{name}: {changed or 'the same'}", flush=True)
    if not options.compare:
        write(load_plans())
    return int(options.compare and is_other)


if __name__ == "__main__":
    sys.exit(main())
