"""Trains two recipes beside the formulas of their sources, with the optimizers of these, and compares every loss.

    python benchmarks/recipe_losses.py --out DIRECTORY                            # all rows, 300 steps each
    python benchmarks/recipe_losses.py --out DIRECTORY --only "gpt-neo-125m, full size"

zero's step runs sharded on two virtual CPU devices: stage 3, at full size 1. The formula beside it (recipe_formulas.py)
shares nothing with zero but the first weights and the rows. Models are narrow, or have short rows of bytes and the
recipe's width, with two layers ("full width") or with all ("full size"); all other values are the recipe's, without
dropout, whose masks are random. Narrow models and those of full size have a warmup of 30 steps and end after 300, so
that the weights move; those of full width train the first 300 steps of the recipe's own schedule. The corpus is the
standard library of the running Python, as bytes.

The source has no splits of unused codes. Where they are on here, the formula has them too, in directions drawn from
the same key, or is left without them, which shows what they change.

Losses and states are written to DIRECTORY every 25 calls of the step: a repetition trains what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).parents[1]))

import zero
from benchmarks.recipe_formulas import (
    GPT_NEO,
    SOURCES,
    VQ,
    Schedule,
    Source,
    Tree,
    with_splits,
)
from zero.commands.cli import compose
from zero.job.job import Job, make_job, place_model, steps_per_row
from zero.models import codebook
from zero.models.config import GPTConfig
from zero.run.step_programs import split_batch
from zero.training.host_rows import HostRows

STEPS, DEVICES = 300, 2
COMMON = [
    "data.corpus=null",
    "data.last_target=true",
    "training.gradient_accumulation_steps=1",
    "training.batch_size=8",
    "data.tokenizer=bytes",
    "data.index_path_train=none.index",
    "data.index_path_validation=none.index",
    "training.sample_tokens=0",
    "zero.remat=none",
]
SHORT = (f"training.total_steps={STEPS}", "training.warmup_steps=30")
NO_DROPOUT = "residual_dropout: 0.0, distance_dropout: 0.0, layer_dropout: 0.0"


class Comparison(NamedTuple):
    """What is trained beside what.

    Attributes:
      recipe: its name.
      keys: of zero.
      splits, source_splits: whether unused codes are split off others, here and in the formula.
    """

    recipe: str
    keys: tuple[str, ...]
    splits: bool = True
    source_splits: bool = True


NARROW_GPT_NEO = (
    *SHORT,
    "data.max_context=64",
    "model.override={embedding_dim: 96, num_head: 3, N: 2, vocab_size: 257, vocab_chunks: 1, block_size: 64, "
    "windows: [0, 16], z_loss: 1.0e-4}",
)
# With whole weights on each device, as hundreds of gathers of single layers would wait for each other on busy cores.
FULL = ("training.batch_size=2", "zero.stage=1")
WIDE_GPT_NEO = (
    *FULL,
    "data.max_context=32",
    "model.override={N: 2, vocab_size: 257, vocab_chunks: 1, block_size: 32, windows: [0, 8], z_loss: 1.0e-4}",
)
FULL_GPT_NEO = (
    *SHORT,
    *FULL,
    "data.max_context=16",
    "model.override={vocab_size: 257, vocab_chunks: 1, windows: [0, 4], z_loss: 1.0e-4}",
)
NARROW_VQ = (
    *SHORT,
    "data.max_context=128",
    "model.override={embedding_dim: 64, distance_width: 64, key_width: 16, codes: 32, vq_block: 16, N: 1, "
    f"update_tokens: 32, block_size: 128, {NO_DROPOUT}}}",
    "training.evaluation_frequency=20",
)
WIDE_VQ = (
    *FULL,
    "data.max_context=64",
    f"model.override={{N: 2, vq_block: 8, update_tokens: 16, block_size: 64, {NO_DROPOUT}}}",
    "training.evaluation_frequency=20",
)
FULL_VQ = (
    *SHORT,
    *FULL,
    "data.max_context=32",
    f"model.override={{vq_block: 4, update_tokens: 8, block_size: 32, {NO_DROPOUT}}}",
    "training.evaluation_frequency=20",
)
COMPARISONS = {
    GPT_NEO: Comparison(GPT_NEO, NARROW_GPT_NEO),
    f"{GPT_NEO}, full width": Comparison(GPT_NEO, WIDE_GPT_NEO),
    f"{GPT_NEO}, full size": Comparison(GPT_NEO, FULL_GPT_NEO),
    VQ: Comparison(VQ, NARROW_VQ),
    f"{VQ}, no splits": Comparison(VQ, NARROW_VQ, splits=False, source_splits=False),
    f"{VQ}, splits here alone": Comparison(VQ, NARROW_VQ, source_splits=False),
    f"{VQ}, full width": Comparison(VQ, WIDE_VQ),
    f"{VQ}, full size": Comparison(VQ, FULL_VQ),
    f"{VQ}, full size, no splits": Comparison(VQ, FULL_VQ, splits=False, source_splits=False),
}


def corpus(tokens: int) -> np.ndarray:
    """Bytes of the standard library, int32."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= tokens:
            break
    return np.frombuffer(bytes(found[:tokens]), np.uint8).astype(np.int32)


def batches(count: int, rows: int, length: int) -> Iterator[np.ndarray]:
    """Rows of `length + 1` tokens, the same in each call."""
    text = corpus(2_000_000)
    rng = np.random.default_rng(0)
    for _ in range(count):
        starts = rng.integers(0, len(text) - length - 1, rows)
        yield np.stack([text[start : start + length + 1] for start in starts])


class Training(NamedTuple):
    """A recipe to train, and where it starts."""

    job: Job
    size: GPTConfig
    seed: int
    rows: int
    length: int
    steps_per_row: int
    schedule: Schedule

    def batches(self) -> Iterator[np.ndarray]:
        return batches(STEPS // self.steps_per_row, self.rows, self.length)

    def first(self) -> tuple[Any, Tree, Tree]:
        """The state on devices, whole weights, and the codebook."""
        state = self.job.programs.fresh(np.full(DEVICES, 0, np.uint32))
        model = self.job.model
        params = zero.to_host(state.params, model.layout, model.axis)
        book = jax.tree.map(lambda x: np.asarray(x)[0], state.averages.get("codebook"))
        return state, params, book


def training(comparison: Comparison) -> Training:
    config, size = compose([f"+recipe={comparison.recipe}", *COMMON, *comparison.keys])
    rows, length = config.training.batch_size, config.data.max_context
    schedule = Schedule(config.training.total_steps, config.training.warmup_steps)
    return Training(
        make_job(config, place_model(config, size)),
        size,
        config.seed,
        rows,
        length,
        steps_per_row(config.data, size),
        schedule,
    )


class Trainer(NamedTuple):
    """How one side trains.

    Attributes:
      start: makes the first state, a tree of arrays.
      step: from the state, the rows of a call and the steps before it to the next state and the losses of its steps.
    """

    start: Callable[[], Tree]
    step: Callable[[Tree, np.ndarray, int], tuple[Tree, list[float]]]


def trainer_of_zero(of: Training) -> Trainer:
    """In float32; the state is sharded over all devices."""

    def step(state: Any, tokens: np.ndarray, done: int) -> tuple[Any, list[float]]:
        state, metrics = of.job.programs.step(state, split_batch(tokens, HostRows.here(of.job.model.axis)))
        return state, np.asarray(metrics["loss"]).reshape(-1).tolist()

    return Trainer(lambda: of.first()[0], step)


def trainer_of_source(of: Training, source: Source, splits: bool) -> Trainer:
    loss = source.loss(of.size)
    length = of.length // of.steps_per_row

    def start() -> Tree:
        _, params, book = of.first()
        return params, book, jax.tree.map(np.zeros_like, (params, params))

    @partial(jax.jit, donate_argnums=0)
    def update(state: Tree, memory: Tree, position: jax.Array, tokens: jax.Array, number: jax.Array) -> Any:
        params, book, moments = state
        memory = lax.stop_gradient(memory)
        arguments = (book, memory, position, tokens[:, :-1], tokens[:, 1:])
        (_, (value, book, memory)), grads = jax.value_and_grad(loss, has_aux=True)(params, *arguments)
        params, moments = source.optimizer.update(params, grads, moments, number.astype(jnp.float32), of.schedule)
        if splits and book is not None:
            book = with_splits(book, jax.random.fold_in(jax.random.key(of.seed), number - 1))
        return (params, book, moments), memory, value

    def step(state: Tree, tokens: np.ndarray, done: int) -> tuple[Tree, list[float]]:
        memory = source.empty_memory(of.size, of.rows)
        losses = []
        for part in range(of.steps_per_row):
            first = part * length
            own = tokens[:, first : first + length + 1]
            state, memory, value = update(state, memory, jnp.int32(first), own, jnp.int32(done + part + 1))
            losses.append(float(value))
        return state, losses

    return Trainer(start, step)


SAVE_EVERY = 25


def trained(path: Path, trainer: Trainer, of: Training) -> list[float]:
    """The losses of a file; those that it lacks are computed, from the state beside it if there is one."""
    losses: list[float] = json.loads(path.read_text()) if path.exists() else []
    if len(losses) == STEPS:
        return losses
    state = trainer.start()
    saved = path.with_suffix(".npz")
    if losses:
        with np.load(saved) as arrays:
            state = jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in arrays.files])
    calls_done = len(losses) // of.steps_per_row
    for call, tokens in enumerate(of.batches()):
        if call < calls_done:
            continue
        state, values = trainer.step(state, tokens, call * of.steps_per_row)
        losses += values
        if (call + 1) % SAVE_EVERY == 0 and len(losses) < STEPS:
            write_state(saved, state)
            path.write_text(json.dumps(losses))
    path.write_text(json.dumps(losses))
    saved.unlink(missing_ok=True)
    return losses


def write_state(path: Path, state: Tree) -> None:
    aside = path.with_suffix(".new.npz")
    np.savez(aside, *map(np.asarray, jax.tree.leaves(state)))
    aside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the losses")
    parser.add_argument("--only", nargs="*", choices=COMPARISONS, default=list(COMPARISONS), help="names of the rows")
    options = parser.parse_args()
    zero.use_cpu_devices(DEVICES)
    options.out.mkdir(parents=True, exist_ok=True)
    print("| recipe | first loss | mean of the last ten, zero | source | largest difference | in step |")
    print("|---|---|---|---|---|---|")
    for name in options.only:
        comparison = COMPARISONS[name]
        of = training(comparison)
        beside = trainer_of_source(of, SOURCES[comparison.recipe], comparison.source_splits)
        theirs = trained(options.out / f"{name}, source.json", beside, of)
        unused = codebook._UNUSED if comparison.splits else 0.0  # no code has fewer keys than none
        with patch.object(codebook, "_UNUSED", unused):
            ours = trained(options.out / f"{name}, zero.json", trainer_of_zero(of), of)
        apart = np.abs(np.asarray(ours) - np.asarray(theirs))
        last = [np.mean(losses[-10:]) for losses in (ours, theirs)]
        print(
            f"| {name} | {ours[0]:.4f} | {last[0]:.4f} | {last[1]:.4f} | {apart.max():.1e} | {apart.argmax() + 1} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
