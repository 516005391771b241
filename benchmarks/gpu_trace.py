"""Where the time of a training step on one GPU goes: seconds of its kernels by the operation that they compute.

    python benchmarks/gpu_trace.py [--rows qwen2.5-0.5b ...] [--keys "zero.remat=none"] [--record trace]

Each row of benchmarks/one_gpu.py is a short run with `profile.steps`, without CUDA graphs, whose kernels have no names.
The profiler names the instruction of each kernel, and the compiled program names the operation of each instruction.
RECORD-NAME.json holds all of it, RECORD-NAME.hlo.gz the program; the largest are printed.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.one_gpu import HOST_GIB, KEYS, MEMORY_SHARE, REPOSITORY, ROWS, Row

FIRST, LAST = 6, 8  # steps that are traced
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?metadata=\{[^}]*?op_name=\"([^\"]*)\"", re.MULTILINE)


def traced(row: Row, keys: str, directory: Path) -> None:
    """Runs the steps of a row into a directory: the trace in run/profile, the program in program."""
    command = [sys.executable, "main_zero.py", *KEYS.split(), f"hydra.run.dir={directory}/run"]
    command += [f"model.size={row.size}", f"data.max_context={row.context}", *row.keys.split(), *keys.split()]
    command += [f"training.batch_size={row.sequences}", "distributed.compilation_cache=null"]
    command += [f"profile.steps=[{FIRST},{LAST}]", f"training.total_steps={LAST + 1}", "training.warmup_steps=2"]
    flags = f"--xla_gpu_enable_command_buffer= --xla_dump_to={directory}/program --xla_dump_hlo_as_text"
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_SHARE,
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": HOST_GIB,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    }
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")


def operations(program: Path) -> dict[tuple[str, str], str]:
    """The operation of each instruction, by module and instruction, from the text of compiled programs."""
    names: dict[tuple[str, str], str] = {}
    for path in program.glob("*after_optimizations.txt"):
        module = path.name.split(".")[1]
        for instruction, operation in _INSTRUCTION.findall(path.read_text()):
            names[module, instruction] = operation
    return names


def kernels(profile: Path) -> list[dict[str, Any]]:
    """Each kernel of the GPU: its name, module, instruction, start and seconds."""
    import jax

    (trace,) = profile.rglob("*.xplane.pb")
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                found.append(
                    {
                        "kernel": event.name,
                        "stream": line.name,
                        "module": str(stats.get("hlo_module", "")),
                        "instruction": str(stats.get("hlo_op", "")),
                        "start": event.start_ns / 1e9,
                        "seconds": event.duration_ns / 1e9,
                    }
                )
    return found


def busy_seconds(found: list[dict[str, Any]]) -> float:
    """The time in which at least one kernel runs.

    >>> busy_seconds([{"start": 0.0, "seconds": 2.0}, {"start": 1.0, "seconds": 2.0}, {"start": 5.0, "seconds": 1.0}])
    4.0
    """
    total, end = 0.0, float("-inf")
    for kernel in sorted(found, key=lambda kernel: kernel["start"]):
        stop = kernel["start"] + kernel["seconds"]
        total += max(0.0, stop - max(end, kernel["start"]))
        end = max(end, stop)
    return total


def table(found: list[dict[str, Any]], names: dict[tuple[str, str], str]) -> list[dict[str, Any]]:
    """Seconds per step by instruction, the largest first."""
    steps = LAST - FIRST + 1
    seconds: collections.Counter[tuple[str, str, str]] = collections.Counter()
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for kernel in found:
        key = kernel["module"], kernel["instruction"], kernel["kernel"]
        seconds[key] += kernel["seconds"]
        counts[key] += 1
    return [
        {
            "seconds": total / steps,
            "runs": counts[module, instruction, kernel] / steps,
            "operation": names.get((module, instruction), ""),
            "instruction": instruction,
            "module": module,
            "kernel": kernel,
        }
        for (module, instruction, kernel), total in seconds.most_common()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["qwen2.5-0.5b"])
    parser.add_argument("--keys", default="", help="further keys of the runs")
    parser.add_argument("--record", default="trace", help="path that the names of the files begin with")
    parser.add_argument("--most", type=int, default=40, help="instructions that are printed")
    given = parser.parse_args()
    for name in given.rows:
        with tempfile.TemporaryDirectory() as directory:
            traced(ROWS[name], given.keys, Path(directory))
            found = kernels(Path(directory, "run", "profile"))
            program = Path(directory, "program")
            rows = table(found, operations(program))
            largest = max(program.glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
            Path(f"{given.record}-{name}.hlo.gz").write_bytes(gzip.compress(largest.read_bytes()))
        Path(f"{given.record}-{name}.json").write_text(json.dumps(rows))
        steps = LAST - FIRST + 1
        span = max(k["start"] + k["seconds"] for k in found) - min(k["start"] for k in found)
        print(f"{name}: {span / steps:.4f} s per step, {busy_seconds(found) / steps:.4f} s with a kernel")
        for row in rows[: given.most]:
            print(f"{row['seconds']:.5f} s {row['runs']:6.1f} x {row['operation'][-110:]} | {row['kernel'][:60]}")


if __name__ == "__main__":
    main()
