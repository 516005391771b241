"""CPU seconds of the configuration of a start: composed by Hydra, checked, and the size of its model read.

    python -m benchmarks.configuration

Each row is the median over fresh processes, as a start pays it: imports are done, caches are empty, and the garbage
collector is off as in main_zero.py. A minute on two cores.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
STARTS = 7
ROWS = {
    "the default job": (),
    "a published model": ("model.size=llama3_8b", "data.max_context=1024"),
    "a recipe": ("+recipe=gpt-neo-125m",),
    "a plan": ("mode=plan", "+preset=v3-32"),
}
PROGRAM = """
import gc, sys, time
gc.disable()
import zero.commands.cli
began = time.process_time()
zero.commands.cli.compose(sys.argv[1:])
print(time.process_time() - began)
"""


def seconds(overrides: tuple[str, ...]) -> float:
    """The median over fresh processes."""
    command = [sys.executable, "-c", PROGRAM, *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    times = []
    for _ in range(STARTS):
        done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        times.append(float(done.stdout.splitlines()[-1]))
    return statistics.median(times)


if __name__ == "__main__":
    for name, overrides in ROWS.items():
        print(f"{name:20} {seconds(overrides):.3f} s")
