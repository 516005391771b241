"""CPU seconds of plans: of the default answer, with an empty cache and again with what it left there.

    python -m benchmarks.plan_seconds [--plans 124m-v5e-8 ...] [--keys KEY=VALUE ...]

Runs `main_zero.py mode=plan` once for each of `PLANS` and prints a line of the table of benchmarks/measured/planning.md
as soon as it is there. CPU seconds are those of all processes of a plan, also of those whose parent has ended (Linux).
They vary less than seconds on a clock, but still by a third between an idle and a busy machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PLANS = {
    "124m-v5e-8": ["model.size=124m", "plan.topology=v5e-8", "plan.micro_batch=4"],
    "1_1b-v3-32": ["+preset=v3-32"],
    "1_1b-v4-32": ["+preset=v4-32"],
    "1_1b-v5e-16": ["+preset=v5e-16"],
    "8b-v5e-16": ["model.size=llama3_8b", "plan.topology=v5e-16", "plan.micro_batch=2", "data.max_context=2048"],
    "largest-v3-8": ["+preset=v3-8-largest"],
}


PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: processes whose parent has ended become children of this one


def cpu_seconds() -> float:
    """Of all processes that this one has started, which have ended."""
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(directory: Path, overrides: list[str]) -> tuple[float, float, list[dict[str, object]]]:
    """CPU seconds of a plan, seconds on a clock, and its rows."""
    command = [sys.executable, str(REPOSITORY / "main_zero.py"), "mode=plan", f"hydra.run.dir={directory}", *overrides]
    before = cpu_seconds()
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=directory.parent)
    rows = json.loads((directory / "plan.json").read_text())["rows"]
    return cpu_seconds() - before, time.monotonic() - began, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="*", choices=list(PLANS), default=list(PLANS), metavar="NAME")
    parser.add_argument("--keys", nargs="*", default=[], help="further overrides of each plan")
    parser.add_argument("--once", action="store_true", help="do not repeat a plan")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print("| plan | rows | CPU s | s | again, CPU s |\n|---|---|---|---|---|", flush=True)
    for name in arguments.plans:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            keys = [*PLANS[name], *arguments.keys]
            keys.append(f"distributed.compilation_cache={place / 'cache'}")
            cpu, seconds, rows = measured(place / "first", keys)
            again = "" if arguments.once else f"{measured(place / 'again', keys)[0]:.0f}"
        print(f"| {name} | {len(rows)} | {cpu:.0f} | {seconds:.0f} | {again} |", flush=True)


if __name__ == "__main__":
    main()
