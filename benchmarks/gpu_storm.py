"""A run of the default job on one GPU that is killed again and again, beside one that is left alone.

    python benchmarks/gpu_storm.py [--kills 10] [--steps 6000] [--seed 0]

The run is ended by SIGKILL or SIGTERM a random time after its first step, and started again with --resume=auto. With
deterministic operations its losses, gradient norms and sums of rows must equal those of the undisturbed run to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
COMPARED = ("train/loss", "validation/loss", "gradient_norm", "learning_rate", "tokens_seen", "samples_checksum")
FLAGS = "--xla_gpu_deterministic_ops=true"


def started(directory: Path, keys: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "main_zero.py", "--resume=auto", f"hydra.run.dir={directory}", *keys]
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()}
    with Path(f"{directory}.log").open("ab") as printed:
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=printed, stderr=printed)


def lines(directory: Path) -> list[dict[str, Any]]:
    """The whole lines of the run's metrics."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def by_step(directory: Path) -> dict[int, dict[str, Any]]:
    """What is compared of each step; of two lines of a step the later one counts."""
    steps: dict[int, dict[str, Any]] = {}
    for line in lines(directory):
        if "event" not in line:
            steps.setdefault(line["step"], {}).update({key: line[key] for key in COMPARED if key in line})
    return steps


def killed(directory: Path, keys: list[str], kills: int, draw: random.Random) -> list[str]:
    """Runs to the end with so many kills; what ended each process."""
    ends: list[str] = []
    while True:
        before = len(lines(directory))
        process = started(directory, keys)
        while process.poll() is None and len(lines(directory)) <= before + 1:
            time.sleep(0.05)
        if len(ends) < kills and process.poll() is None:
            number = draw.choice([signal.SIGKILL, signal.SIGTERM])
            time.sleep(draw.uniform(0.0, 1.5))
            process.send_signal(number)
            ends.append(number.name)
        status = process.wait()
        if status == 0:
            return ends
        if status not in (75, -signal.SIGKILL):
            raise RuntimeError(f"status {status}: {Path(f'{directory}.log').read_text()[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        keys = ["data.wandb_project=null", "training.log_frequency=1", f"training.total_steps={given.steps}"]
        alone, disturbed = Path(place, "alone"), Path(place, "disturbed")
        begun = time.monotonic()
        status = started(alone, keys).wait()
        if status:
            raise RuntimeError(f"status {status}: {Path(f'{alone}.log').read_text()[-3000:]}")
        print(f"left alone: {time.monotonic() - begun:.0f} s", flush=True)
        ends = killed(disturbed, keys, given.kills, random.Random(given.seed))
        expected, seen = by_step(alone), by_step(disturbed)
        different = [step for step in expected if expected[step] != seen.get(step)]
        print(f"{len(ends)} kills ({', '.join(ends)}); {len(expected)} lines, {len(different)} of them differ")
        for step in different[:3]:
            print(step, expected[step], seen.get(step))
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
