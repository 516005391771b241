"""The best learning rate at several widths, in the standard parametrization and in the maximal update one.

    python benchmarks/transfer.py [--widths 64 128 256 512] [--steps 250] [--seeds 0]
    python benchmarks/transfer.py --table [--keep docs/sources/transfer.jsonl]

First form: trains a byte-level GPT (2 layers, heads of 32, RMSNorm without gains, context 64) on the corpus of the
default job with AdamW on one CPU device. For each parametrization and width it tries learning rates that are powers of
2, from the best of the width before, until the best has two worse ones on either side. A finished training is kept in
`--directory` and not repeated, so the command may be interrupted and repeated. Second form: the table of the
finished trainings, of which docs/draw_transfer.py makes the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from zero.corpus.format.shards import RowFormat
from zero.corpus.preparing.prepare_if_missing import prepare_if_missing
from zero.corpus.reading.loader import Batching, Loader, RowOrder
from zero.corpus.text.tokenizers import load_tokenizer
from zero.models.config import GPTConfig
from zero.models.parametrization import multipliers_of
from zero.partition.collectives.axis import Axis
from zero.training.batch import Batch
from zero.training.optimizers.optimizer import make_optimizer
from zero.training.parts import StepOptions
from zero.training.programs import make_programs
from zero.training.schedules import LearningRate
from zero.training.sharded_gpt import ShardedGPT

PARAMETRIZATIONS = ("standard", "mup")
BASE_WIDTH, HEAD, STACK, CONTEXT = 64, 32, 2, 64
INDEX = [f"data/index/stdlib_{split}.index" for split in ("train", "validation")]
ROWS, ROW_TOKENS, DECAY = 2, 256, 0.1  # 2 rows of 256 tokens are 8 sequences of 64
VALIDATION_BATCHES = 64
FIRST = -7  # the exponent of the first learning rate that is tried
MARGIN = 2  # worse rates on either side of the best


def config_of(parametrization: str, width: int) -> GPTConfig:
    base = {"mup_base_width": BASE_WIDTH} if parametrization == "mup" else {}
    options: dict[str, Any] = {"norm": "rms", "norm_gains": False, "tied": False, **base}
    return GPTConfig(width, 256, width // HEAD, CONTEXT, 0.0, STACK, parametrization=parametrization, **options)


def train(parametrization: str, width: int, rate: float, steps: int, seed: int) -> float:
    """The validation loss after training, nats per byte; infinity where it diverged."""
    size = config_of(parametrization, width)
    model = ShardedGPT(size, Axis("zero", (1, 1)), 0, remat="none")
    train_rows, validation_rows = (
        Loader(index, Batching(ROWS), RowFormat(ROW_TOKENS, 256), RowOrder(seed, is_training))
        for index, is_training in zip(INDEX, (True, False), strict=True)
    )
    axes = model.axes
    optimizer = make_optimizer("adamw", DECAY, axes=axes, multipliers=multipliers_of(size, axes))
    options = StepOptions(LearningRate(rate, rate / 10, steps // 10, steps), seed)
    programs = make_programs(model, optimizer, options, jax.devices()[:1])
    state = programs.start(programs.init(np.asarray(jax.random.key_data(jax.random.key(seed)))[None]))
    for batch, _ in zip(train_rows.batches(None), range(steps), strict=False):
        state, _ = programs.step(state, Batch(batch.tokens.reshape(1, -1, CONTEXT), np.zeros(1, np.int32)))
    batches = zip(validation_rows.batches(None), range(VALIDATION_BATCHES), strict=False)
    sums = [programs.evaluate(state.params, batch.tokens.reshape(1, -1, CONTEXT)) for batch, _ in batches]
    loss = sum(float(s) for s, *_ in sums) / sum(int(n) for _, n, _ in sums)
    return loss if math.isfinite(loss) else math.inf


def kept(directory: Path, steps: int, seeds: list[int]) -> dict[tuple[str, int], dict[int, float]]:
    """For each parametrization and width the mean loss by the exponent of the rate, where all seeds are finished."""
    losses: dict[tuple[str, int], dict[int, list[float]]] = {}
    for path in directory.glob("*.json"):
        r = json.loads(path.read_text())
        if r["steps"] == steps and r["seed"] in seeds:
            by_rate = losses.setdefault((r["parametrization"], r["width"]), {})
            by_rate.setdefault(r["exponent"], []).append(math.inf if r["loss"] is None else r["loss"])
    return {
        key: {exponent: mean(found) for exponent, found in sorted(by_rate.items()) if len(found) == len(seeds)}
        for key, by_rate in losses.items()
    }


def best(by_rate: dict[int, float]) -> int:
    return min(by_rate, key=lambda exponent: by_rate[exponent])


def next_exponent(by_rate: dict[int, float], first: int) -> int | None:
    """The rate to try next: neighbors of the best one, then theirs; None where nothing is left."""
    if not by_rate:
        return first
    middle = best(by_rate)
    wanted = (middle + side * distance for distance in range(1, MARGIN + 1) for side in (1, -1))
    return next((exponent for exponent in wanted if exponent not in by_rate), None)


def run(directory: Path, widths: list[int], steps: int, seeds: list[int]) -> None:
    for width in widths:
        for parametrization in PARAMETRIZATIONS:
            before = [w for w in widths if w < width]
            first = best(kept(directory, steps, seeds)[parametrization, before[-1]]) if before else FIRST
            while True:
                by_rate = kept(directory, steps, seeds).get((parametrization, width), {})
                if (exponent := next_exponent(by_rate, first)) is None:
                    break
                for seed in seeds:
                    path = directory / f"{parametrization}-{width}-{exponent}-{steps}-{seed}.json"
                    if path.exists():
                        continue
                    began = time.monotonic()
                    loss = train(parametrization, width, 2.0**exponent, steps, seed)
                    about = {"parametrization": parametrization, "width": width, "exponent": exponent, "steps": steps}
                    finite = loss if math.isfinite(loss) else None
                    path.write_text(json.dumps(about | {"seed": seed, "loss": finite}) + "\n")
                    print(f"{path.name}: {loss:.4f} in {time.monotonic() - began:.0f} s", flush=True)


def table(found: dict[tuple[str, int], dict[int, float]]) -> Iterator[str]:
    for parametrization in PARAMETRIZATIONS:
        widths = sorted(width for name, width in found if name == parametrization)
        for width in widths:
            by_rate = found[parametrization, width]
            losses = "  ".join(f"2^{exponent}: {loss:.4f}" for exponent, loss in by_rate.items())
            yield f"{parametrization:8s} width {width:4d}  best 2^{best(by_rate)}  {losses}"
        if len(widths) > 1:
            ends = [best(found[parametrization, width]) for width in (widths[0], widths[-1])]
            lowest = [min(found[parametrization, width].values()) for width in widths]
            falls = all(wider < narrower for narrower, wider in pairwise(lowest))
            verdict = "always" if falls else "not always"
            yield f"{parametrization:8s} the best rate moves by {ends[1] - ends[0]:+d} steps; wider is {verdict} better"


def keep(found: dict[tuple[str, int], dict[int, float]], path: Path) -> None:
    """Writes what the picture of docs/draw_transfer.py shows; a rate at which training diverged is left out."""
    lines = []
    for (parametrization, width), by_rate in sorted(found.items()):
        finite = {exponent: round(loss, 4) for exponent, loss in by_rate.items() if math.isfinite(loss)}
        line = {"parametrization": parametrization, "width": width}
        lines.append(json.dumps(line | {"exponents": list(finite), "losses": list(finite.values())}))
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/transfer"))
    parser.add_argument("--keep", type=Path, help="writes the numbers of the picture to this file")
    parser.add_argument("--table", action="store_true", help="trains nothing")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    if not options.table:
        prepare_if_missing("stdlib", INDEX, load_tokenizer("bytes"), ROW_TOKENS)
        run(options.directory, sorted(options.widths), options.steps, options.seeds)
    found = kept(options.directory, options.steps, options.seeds)
    print("\n".join(table(found)))
    if options.keep:
        keep(found, options.keep)


if __name__ == "__main__":
    main()
