"""The same training with products in 16 and in 8 bits: validation losses beside each other.

    python benchmarks/product_losses.py [--forms bfloat16 int8 ...] [--seeds 0 1 2] [--steps 3000]
    python benchmarks/product_losses.py --hard

First form: trains the model of the default job with its optimizer on the sources of Python's own library, on one device
with bfloat16 activations, for each form and seed, and prints the validation loss and its ratio to bfloat16 of the same
seed. `--hard`: a Llama of the same size at five times the learning rate, where one channel in 64 of the input of each
product of attention and MLP is 30 times as large at the start. Forms: those of `zero.product_dtype`.
--record appends each result to a file of JSON lines.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.partition.collectives.axis import Axis
from zero.training.batch import Batch
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.programs import make_programs
from zero.training.schedules import LearningRate
from zero.training.sharded_gpt import ShardedGPT

_SHAPE: dict[str, Any] = {"embedding_dim": 192, "vocab_size": 256, "num_head": 6, "block_size": 256, "dropout": 0.0}
DEFAULT = GPTConfig(**_SHAPE, N=4, alibi_attn=True, vocab_chunks=1)
HARD = GPTConfig(**_SHAPE, **FAMILIES["llama"] | {"mlp_dim": 512, "N": 4, "vocab_chunks": 1})
ROWS, PEAK, WARMUP = 8, 3e-3, 20  # of the default job
EVERY, OUTLIER = 64, 30.0  # channels with one outlier, and how large it is
FORMS = ("bfloat16", "int8", "int8_all", "float8")


def sources() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of Python's library for training, and every twentieth file for validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) + sorted(
        Path(sysconfig.get_paths()["stdlib"]).glob("[a-rt-z]*/*.py")
    )
    texts = [file.read_bytes() for file in files]
    parts = b"".join(text for i, text in enumerate(texts) if i % 20), b"".join(texts[::20])
    return np.frombuffer(parts[0], np.uint8), np.frombuffer(parts[1], np.uint8)


def rows_of(text: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """Batches of rows from random places."""
    random = np.random.default_rng(seed)
    while True:
        first = random.integers(0, len(text) - 256, ROWS)
        yield text[first[:, None] + np.arange(256)].astype(np.int32)[None]


def with_outliers(params: Any) -> Any:
    """The parameters, with a few large elements of the scales of all norms within layers."""

    def one(path: Any, x: jax.Array) -> jax.Array:
        names = [key.key for key in path]
        if names[-1] != "scale" or names[0] != "blocks":
            return x
        return x * jnp.where(jnp.arange(x.shape[-1]) % EVERY == 0, OUTLIER, 1).reshape((1,) * (x.ndim - 1) + (-1,))

    return jax.tree_util.tree_map_with_path(one, params)


def train(form: str, steps: int, seeds: list[int], hard: bool) -> Iterator[dict[str, Any]]:
    text, validation_text = sources()
    validation = [batch for batch, _ in zip(rows_of(validation_text, 0), range(64), strict=False)]
    peak = PEAK * (5 if hard else 1)
    axis = Axis("zero", (1, 1))
    model = ShardedGPT(HARD if hard else DEFAULT, axis, 0, jnp.bfloat16, remat="none", product_dtype=form)
    options = StepOptions(LearningRate(peak, peak / 10, min(WARMUP, steps - 1), steps), 0, max_gradient_norm=1.0)
    programs = make_programs(model, adamw(0.1, axes=model.axes), options, jax.devices()[:1])
    for seed in seeds:
        began = time.monotonic()
        params = programs.init(np.asarray(jax.random.key_data(jax.random.key(seed)))[None])
        state = programs.start(with_outliers(params) if hard else params)
        curve = []
        for step, rows in zip(range(1, steps + 1), rows_of(text, seed), strict=False):
            state, metrics = programs.step(state, Batch(rows, np.zeros(1, np.int32)))
            if step % max(steps // 30, 1) == 0 or step == steps:
                last = validation if step == steps else validation[:16]
                sums = [programs.evaluate(state.params, rows) for rows in last]
                loss = sum(float(one[0]) for one in sums) / sum(int(one[1]) for one in sums)
                curve.append((step, round(loss, 5)))
        skipped = int(metrics["skipped_steps"])
        about: dict[str, Any] = {"form": form, "hard": hard, "steps": steps, "seed": seed, "loss": curve[-1][1]}
        yield about | {"skipped": skipped, "seconds": round(time.monotonic() - began, 1), "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--hard", action="store_true")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    losses: dict[str, list[float]] = {}
    for form in options.forms:
        for result in train(form, options.steps, options.seeds, options.hard):
            losses.setdefault(form, []).append(result["loss"])
            if options.record:
                with options.record.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            print(f"{form} seed {result['seed']}: {result['loss']:.4f}, {result['seconds']} s", flush=True)
        first = losses[options.forms[0]]
        ratios = [loss / base - 1 for loss, base in zip(losses[form], first, strict=True)]
        print(f"{form:12s} {mean(losses[form]):.4f}  {mean(ratios):+.2%}  {' '.join(f'{r:+.2%}' for r in ratios)}")


if __name__ == "__main__":
    main()
