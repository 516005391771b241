"""The step of each recipe on the slice of its authors: peak memory and predicted time, beside what they published.

    python benchmarks/recipes.py [--recipes zero-transformer-760m gpt-neo-2_7b ...]

Compiles the step and the evaluation of each recipe in conf/recipe for its slice, without a TPU, as `mode=plan` does for
several stages, and prints a row for each. One takes about two minutes of CPU.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from zero.cli import compose
from zero.job import steps_per_row
from zero.plan.compile import Request, compile_step, highest_peak
from zero.plan.topology import prepare_environment

DIRECTORY = Path(__file__).resolve().parents[1] / "conf" / "recipe"
RECIPES = sorted(path.stem for path in DIRECTORY.glob("*.yaml") if path.stem != "common")
COLUMNS = ("recipe", "slice", "peak, GiB", "step, s", "tokens/s", "MFU", "all steps, days", "published")


def row_of(name: str) -> dict[str, Any]:
    """The recipe's columns."""
    config, size = compose([f"+recipe={name}", "mode=plan", "training.sample_tokens=0"])
    prepare_environment(config.plan.topology)
    found = compile_step(Request(config, size, config.plan.micro_batch))
    row = {"recipe": f"`{name}`", "slice": config.plan.topology, "peak, GiB": f"{highest_peak(found) / 2**30:.2f}"}
    calls = config.training.total_steps // steps_per_row(config, size)  # a call of the program makes all steps of a row
    if found["fits"]:
        row |= {
            "step, s": f"{found['seconds']:.3f}",
            "tokens/s": f"{found['tokens_per_second']:,.0f}",
            "MFU": f"{found['mfu']:.0%}",
            "all steps, days": f"{found['seconds'] * calls / 86_400:.1f}",
        }
    else:
        row["step, s"] = f"does not fit in {found['available_bytes'] / 2**30:.2f} GiB"
    published = re.search(r"^# Published +(.*)$", (DIRECTORY / f"{name}.yaml").read_text(), re.M)
    assert published is not None, name
    return row | {"published": published[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, metavar="NAME")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for name in parser.parse_args().recipes:
        row = row_of(name)
        print(f"| {' | '.join(row.get(column, '') for column in COLUMNS)} |", flush=True)


if __name__ == "__main__":
    main()
