"""The command `zero-weights`: exports and averages the weights of finished runs."""

from __future__ import annotations

import argparse
from pathlib import Path

import jax

from zero.runtime.errors import exit_on_error
from zero.runtime.weights.average import average
from zero.runtime.weights.export import export


def main() -> None:
    """Runs the command; an error is one line, and status 2 for a mistake, 1 where a repeat may succeed."""
    parser = argparse.ArgumentParser(prog="zero-weights", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    exporting = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    exporting.add_argument("run", help="a run directory, or a directory of checkpoints")
    exporting.add_argument("folder", type=Path, help="the folder to create")
    exporting.add_argument("--step", type=int, help="default: the newest")
    exporting.add_argument("--ema", action="store_true", help="the moving average of the weights (training.ema)")
    averaging = commands.add_parser("average", help="write a run directory with the mean of several checkpoints")
    averaging.add_argument("run", help="a run directory, or a directory of checkpoints")
    averaging.add_argument("new_run", type=Path, help="the run directory to create")
    averaging.add_argument("--steps", type=int, nargs="+", help="default: all")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # accelerators may be busy with training
    with exit_on_error():
        if arguments.command == "export":
            step = export(arguments.run, arguments.folder, arguments.step, ema=arguments.ema)
            print(f"step {step} is in {arguments.folder}")
        else:
            steps = average(arguments.run, arguments.new_run, arguments.steps)
            print(f"the mean of steps {', '.join(map(str, steps))} is in {arguments.new_run}")


if __name__ == "__main__":
    main()
