"""The command `zero-weights`: exports, merges and averages the weights of finished runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax

from zero.base.errors import exit_on_error
from zero.exchange.average import average
from zero.exchange.export import DTYPES, export
from zero.models.branches import LEFT_OUT


def fraction(text: str) -> float:
    """A number above 0, at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError(text)
    return value


def main() -> None:
    """Runs the command; an error is one line, and status 2 for a mistake, 1 where a repeat may succeed."""
    parser = argparse.ArgumentParser(prog="zero-weights", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("export", "write a checkpoint as a Hugging Face folder, or adapters as a PEFT folder"),
        ("merge", "write the base of a run that trained adapters, with the adapters merged, as a Hugging Face folder"),
    ):
        exporting = commands.add_parser(name, help=help_text)
        exporting.add_argument("run", help="a run directory, or a directory of checkpoints; RUN@STEP for one step")
        exporting.add_argument("folder", type=Path, help="the folder to create")
        exporting.add_argument("--step", type=int, help="default: the newest")
        exporting.add_argument("--ema", action="store_true", help="the moving average of the weights (training.ema)")
        exporting.add_argument(
            "--with-code", action="store_true", help="include PyTorch code, for models that transformers does not have"
        )
        for branch in LEFT_OUT:
            option = f"--with-{branch.key}"
            exporting.add_argument(
                option, dest="branches", action="append_const", const=branch.key, default=[], help=branch.words
            )
        exporting.add_argument(
            "--into",
            metavar="FOLDER",
            help="a folder, or hf:NAME, of a model that also reads images: write a copy of it with these weights as "
            "its text part",
        )
        dtype_help = "default: the dtype of the Hugging Face folder that the run started from, or float32"
        exporting.add_argument("--dtype", choices=DTYPES, help=dtype_help)
    averaging = commands.add_parser("average", help="write a run directory with the mean of several checkpoints")
    averaging.add_argument("run", help="a run directory, or a directory of checkpoints")
    averaging.add_argument("new_run", type=Path, help="the run directory to create")
    chosen = averaging.add_mutually_exclusive_group()
    chosen.add_argument("--steps", type=int, nargs="+", help="default: all")
    chosen.add_argument("--last", type=fraction, metavar="FRACTION", help="the last part of the run, such as 0.2")
    averaging.add_argument("--count", type=int, default=4, help="checkpoints of --last, evenly spaced; default: 4")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # accelerators may be busy with training
    with exit_on_error():
        if arguments.command in ("export", "merge"):
            merges = arguments.command == "merge"
            options: dict[str, Any] = {"ema": arguments.ema, "merges": merges, "with_code": arguments.with_code}
            options |= {"branches": arguments.branches, "dtype": arguments.dtype, "into": arguments.into}
            step = export(arguments.run, arguments.folder, arguments.step, **options)
            print(f"step {step} is in {arguments.folder}")
        else:
            steps = average(
                arguments.run, arguments.new_run, arguments.steps, last=arguments.last, count=arguments.count
            )
            print(f"the mean of steps {', '.join(map(str, steps))} is in {arguments.new_run}")


if __name__ == "__main__":
    main()
