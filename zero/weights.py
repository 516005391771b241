"""Finished weights on their way elsewhere: `python -m zero.weights export RUN FOLDER`, `... average RUN NEW_RUN`."""

import argparse
import sys
from pathlib import Path

import jax

from zero.runtime.errors import UserError
from zero.runtime.weights.interchange import average, export


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zero.weights")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    one.add_argument("run", help="a run directory, or where its checkpoints lie")
    one.add_argument("folder", type=Path, help="made")
    one.add_argument("--step", type=int, help="by default the newest")
    several = commands.add_parser("average", help="write a run directory with the mean of several checkpoints")
    several.add_argument("run", help="a run directory, or where its checkpoints lie")
    several.add_argument("new_run", type=Path, help="made")
    several.add_argument("--steps", type=int, nargs="+", help="by default all that stand")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # the accelerators may be busy training
    try:
        if arguments.command == "export":
            step = export(arguments.run, arguments.folder, arguments.step)
            print(f"step {step} is in {arguments.folder}")
        else:
            steps = average(arguments.run, arguments.new_run, arguments.steps)
            print(f"the mean of steps {', '.join(map(str, steps))} is in {arguments.new_run}")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
