"""The predictor beside published steps of the programs that it predicts: MaxText's own, for Google's recipes.

    MAXTEXT/bin/python benchmarks/maxtext_step.py --rows llama3-8b-v6e-16 --texts TEXTS    # in MaxText's environment
    python -m benchmarks.clock --texts TEXTS [--rows llama3-8b-v6e-16 ...]
    python -m benchmarks.clock    # prints the tables again from the rows that are there

Reads the texts of compiled programs and writes docs/sources/maxtext.json, the columns of MaxText in
benchmarks/measured/beside-maxtext.md, and the errors in benchmarks/measured/predicted-time.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks import published
from benchmarks.published import RECIPES, Recipe
from benchmarks.recipe_sources import REPOSITORY, with_part
from benchmarks.recipes import prediction
from zero.costs.predict import predict
from zero.costs.topology import find_devices, prepare_environment, slice_shape, slices_in

PAGE = REPOSITORY / "benchmarks" / "measured" / "predicted-time.md"
START = "<!-- printed by benchmarks/clock.py -->\n"
COMPILER = "MaxText 0.2.5, jax 0.12.0.1, libtpu 0.0.52"
# Chosen before their programs were compiled, so that no repair of the predictor is decided by them. The page says which
# of their errors were known when the last one was.
HELD_BACK = (
    "llama3-8b-v6e-128",
    "llama3-70b-v6e-128",
    "llama3-70b-v6e-256",
    "llama3-70b-tpu7x-64",
    "mistral-7b-v6e-8",
)
COLUMNS = (
    "recipe",
    "published, s",
    "predicted, s",
    "error",
    "error without waits for the host",
    "attention kernels, s",
    "other computation, s",
    "exposed collectives, s",
    "waits for the host, s",
    "by bytes alone, s",
)
GROUPS = ("programs", "number", "median of the size of errors", "lowest", "highest", "within 10 %")
WITHOUT_WAITS = "without waits for the host: "


@dataclass(frozen=True)
class Row:
    """The prediction of MaxText's step for a recipe.

    Attributes:
      compiler: versions.
      prediction: digest of the code that predicts.
      seconds: per step.
      kernel_seconds: of attention kernels, which are rated by their share of the peak.
      exposed_seconds: in which only collectives run.
      host_seconds: in which the program waits for the host's link.
      guessed_seconds: of instructions of which only bytes are known.
    """

    compiler: str
    prediction: str
    seconds: float
    kernel_seconds: float
    exposed_seconds: float
    host_seconds: float
    guessed_seconds: float

    def error(self, name: str) -> float:
        """Predicted over published, less one."""
        return self.seconds / RECIPES[name].seconds - 1

    def error_without_waits(self, name: str) -> float:
        """The error if the program did not wait for the host's link."""
        return (self.seconds - self.host_seconds) / RECIPES[name].seconds - 1


def row_of(name: str, text: str) -> Row:
    """Predicts the step of a recipe from the text of MaxText's program."""
    found = predict(text, find_devices(RECIPES[name].topology))
    assert found is not None and found.timeline is not None, "the compiler has written no cycles"
    kernel_seconds = guessed_seconds = 0.0
    for event, times in found.timeline.runs():
        if event.instruction.name.startswith("splash"):
            kernel_seconds += times * event.seconds
        if event.is_guess:
            guessed_seconds += times * event.seconds
    return Row(
        COMPILER,
        prediction(),
        found.seconds,
        kernel_seconds,
        found.exposed_seconds,
        found.host_exposed_seconds,
        guessed_seconds,
    )


def load_rows() -> dict[str, Row]:
    """The rows of docs/sources/maxtext.json."""
    if not published.MAXTEXT.exists():
        return {}
    return {name: Row(**row) for name, row in json.loads(published.MAXTEXT.read_text()).items()}


def table_row(name: str, row: Row) -> str:
    """The row of a recipe in the page."""
    other = row.seconds - row.kernel_seconds - row.exposed_seconds - row.host_seconds
    figures = (row.kernel_seconds, other, row.exposed_seconds, row.host_seconds, row.guessed_seconds)
    cells = (
        f"`{name}`",
        f"{RECIPES[name].seconds:.3f}",
        f"{row.seconds:.3f}",
        f"{row.error(name):+.0%}",
        f"{row.error_without_waits(name):+.0%}",
        *(f"{figure:.3f}" for figure in figures),
    )
    return f"| {' | '.join(cells)} |\n"


def chips_of(recipe: Recipe) -> int:
    """The chips of a recipe's slice.

    >>> chips_of(RECIPES["llama3-70b-tpu7x-64"]), chips_of(RECIPES["llama3-8b-v6e-32"])
    (64, 32)
    """
    number, slice_ = slices_in(recipe.topology)
    sizes = slice_shape(slice_).partition(":")[2].split("x")
    return number * math.prod(map(int, sizes))


def group_row(label: str, errors: Sequence[float]) -> str:
    """The distribution of the errors of some programs; empty without any."""
    if not errors:
        return ""
    near = sum(abs(error) <= 0.1 for error in errors)
    middle = median(map(abs, errors))
    return f"| {label} | {len(errors)} | {middle:.0%} | {min(errors):+.0%} | {max(errors):+.0%} | {near} |\n"


def page_part(rows: Mapping[str, Row]) -> str:
    """The tables of the page."""
    names = [name for name in RECIPES if name in rows]
    looked_at = [name for name in names if name not in HELD_BACK]
    held_back = [name for name in names if name in HELD_BACK]
    head = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
    part = head + "".join(table_row(name, rows[name]) for name in looked_at)
    part += "\nHeld back:\n\n" + head + "".join(table_row(name, rows[name]) for name in held_back)
    part += f"\n| {' | '.join(GROUPS)} |\n{'|---' * len(GROUPS)}|\n"
    groups = {"all": names, "looked at": looked_at, "held back": held_back}
    groups |= {label: list(filter(belongs, names)) for label, belongs in KINDS.items()}
    for label, members in groups.items():
        part += group_row(label, [rows[name].error(name) for name in members])
    for label in ("all", "looked at", "held back"):
        part += group_row(f"{WITHOUT_WAITS}{label}", [rows[name].error_without_waits(name) for name in groups[label]])
    return part


def _has_chips(first: int, last: int) -> Callable[[str], bool]:
    return lambda name: first <= chips_of(RECIPES[name]) <= last


KINDS: dict[str, Callable[[str], bool]] = {
    "v6e": lambda name: "v6e" in name,
    "TPU7x": lambda name: "tpu7x" in name,
    "8 to 16 chips": _has_chips(8, 16),
    "32 to 64 chips": _has_chips(32, 64),
    "128 to 256 chips": _has_chips(128, 256),
    "7B and 8B": lambda name: name.split("-")[1] in ("7b", "8b"),
    "70B": lambda name: name.split("-")[1] == "70b",
    "mixtures of experts": lambda name: "8x" in name,
    "windows of attention": lambda name: name.startswith("gemma"),
    "learned positions and biases": lambda name: name.startswith("gpt3"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="directory with the texts of compiled programs")
    parser.add_argument("--rows", nargs="*", choices=list(RECIPES), default=list(RECIPES), metavar="NAME")
    options = parser.parse_args()
    rows = load_rows()
    for name in options.rows:
        program = options.texts / f"{name}.txt" if options.texts else None
        if program is None or not program.exists():
            continue
        prepare_environment(RECIPES[name].topology)
        rows[name] = row_of(name, program.read_text())
        print(table_row(name, rows[name]), end="", flush=True)
    saved = {name: asdict(rows[name]) for name in RECIPES if name in rows}
    published.MAXTEXT.write_text(json.dumps(saved, indent=1) + "\n")
    PAGE.write_text(with_part(PAGE.read_text(), page_part(rows), START))
    published.write(published.load_rows())


if __name__ == "__main__":
    main()
