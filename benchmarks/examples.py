"""The step of each program in examples/, sharded against unchanged, in turns: `python benchmarks/examples.py`.

One process, 8 virtual CPU devices. Medians of 20 steps; the ratio is the median of the ratios of neighboring steps.
"""

import importlib.util
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/sharded.diff"))
STEPS, WARMUP = 20, 5


DIFFS = ("sharded", "shard_map")


def patched(text: str, diff: str) -> str:
    """A text after a unified diff, whose lines and places have to fit exactly, as with `patch --fuzz=0`.

    >>> print(patched("a\\nb\\nc", "--- a/x\\n+++ b/x\\n@@ -2,2 +2,3 @@\\n b\\n+new\\n c"))
    a
    b
    new
    c
    """
    old = text.split("\n")
    new: list[str] = []
    done = 0  # lines of the old text
    for start, hunk in re.findall(r"^@@ -(\d+).*?@@.*\n((?:[ +-].*\n?)+)", diff, re.MULTILINE):
        lines = hunk.removesuffix("\n").split("\n")
        before = [line[1:] for line in lines if line[0] != "+"]
        first = int(start) - 1
        if old[first : first + len(before)] != before:
            raise ValueError(f"the diff does not fit at line {start}")
        new += old[done:first] + [line[1:] for line in lines if line[0] != "-"]
        done = first + len(before)
    return "\n".join(new + old[done:])


def load(name: str, diffs: int, folder: Path) -> ModuleType:
    """The program of an example, or what its first diffs make of it, as a module."""
    text = (EXAMPLES / name / "train.py").read_text()
    for diff_name in DIFFS[:diffs]:
        text = patched(text, (EXAMPLES / name / f"{diff_name}.diff").read_text())
    path = folder / f"{name}_{('plain', *DIFFS)[diffs]}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    import jax

    print(f"{'example':24}{'plain, ms':>12}{'sharded, ms':>14}{'ratio':>8}{'state, bytes per device':>30}")
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            programs = [load(name, sharded, Path(folder)) for sharded in (False, True)]
            states = [program.to_devices(program.create_state()) for program in programs]
            times: list[list[float]] = [[], []]
            for step in range(WARMUP + STEPS):
                for i, program in enumerate(programs):
                    batch = jax.block_until_ready(program.batch(step))
                    start = time.perf_counter()
                    states[i], *_ = jax.block_until_ready(program.train_step(states[i], *batch))
                    times[i].append(time.perf_counter() - start)
            plain, sharded = ([1e3 * t for t in column[WARMUP:]] for column in times)
            ratio = median(b / a for a, b in zip(plain, sharded, strict=True))
            held = [
                sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state)) for state in states
            ]
            print(
                f"{name:24}{median(plain):12.2f}{median(sharded):14.2f}{ratio:8.2f}{f'{held[0]:,} -> {held[1]:,}':>30}",
                flush=True,
            )


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["NPROC"] = "16"
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_cpu_enable_concurrency_optimized_scheduler=false"
    )
    sys.path.insert(0, str(EXAMPLES.parent))
    main()
