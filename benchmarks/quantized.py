"""The same training with moments and weights held in fewer bytes: validation loss, and the cost of the update.

    python benchmarks/quantized.py [--size bytes] [--steps 3000] [--seeds 0 1 2] [--forms NAME ...] [--factor 1]
    python benchmarks/quantized.py --table [--keep docs/sources/quantized.jsonl]
    python benchmarks/quantized.py --speed

First form: trains the model of the default job (`--size small`: 2 layers of width 64, context 64) on one CPU device for
each form and seed, and prints the validation losses relative to float32 with the same seed. A finished training is kept
in `--directory` and not repeated, so the command may be interrupted and repeated. `--factor` multiplies the learning
rate. Second form: the table of the finished trainings, and their curves. Third form: a float32 and an int8 update of a
million parameters in 100 leaves, in turns, and the bytes that each reads and writes by the compilers for CPU and TPU.

Forms: zero's own, alternatives (scales per block of 256, as in arXiv 2110.02861; three bytes per weight), and naive
ones. Forms that zero lacks are simulated: float32 arrays are rounded to the values that the form can hold.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zero.corpus.format.shards import RowFormat
from zero.corpus.preparing.prepare_if_missing import prepare_if_missing
from zero.corpus.reading.loader import Batching, Loader, RowOrder
from zero.corpus.text.tokenizers import load_tokenizer
from zero.costs.topology import find_devices, prepare_environment
from zero.job.sizes import load_sizes
from zero.models.config import GPTConfig
from zero.models.gpt import parameter_axes
from zero.partition import quantized
from zero.partition.collectives.axis import Axis
from zero.partition.quantized import rounded_updates
from zero.training.batch import Batch
from zero.training.optimizers import optimizer
from zero.training.optimizers.optimizer import adamw, decayed
from zero.training.parts import StepOptions
from zero.training.programs import make_programs
from zero.training.schedules import LearningRate
from zero.training.sharded_gpt import ShardedGPT

SMALL = GPTConfig(embedding_dim=64, vocab_size=256, num_head=2, block_size=64, dropout=0.0, N=2)
AXES = parameter_axes(SMALL)
IS_MATRIX = decayed(AXES)
INDEX = [f"data/index/stdlib_{split}.index" for split in ("train", "validation")]
ROWS, ROW_TOKENS, BLOCK = 8, 256, 256
PEAK, WARMUP, DECAY = 3e-3, 20, 0.1
CURVE = 50  # points of a curve
Round = Callable[[jax.Array, jax.Array], jax.Array]  # a moment and its key


class Form(NamedTuple):
    """How state is held: the optimizer without a learning rate, the dtype of the weights, how updates are rounded."""

    tx: optax.GradientTransformation
    master_dtype: Any = jnp.float32
    rounding: Callable[..., Any] = rounded_updates


def nearest(x: jax.Array, grid: jax.Array, key: jax.Array) -> jax.Array:
    above = jnp.clip(jnp.searchsorted(grid, x), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    return jnp.where(x - low > high - x, high, low)


def stochastic(x: jax.Array, grid: jax.Array, key: jax.Array) -> jax.Array:
    above = jnp.clip(jnp.searchsorted(grid, x), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    return jnp.where(jax.random.uniform(key, x.shape) < (x - low) / (high - low), high, low)


def signed(levels: np.ndarray) -> np.ndarray:
    return np.concatenate([-levels[::-1], [0], levels])


def dynamic(bits: int) -> np.ndarray:
    """The levels above 0: seven decades, each of twice as many equal steps as the one below (arXiv 2110.02861, 1.3)."""
    decades = [
        10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2 for i in range(7) for edges in [_edges(2 ** (i + bits - 7))]
    ]
    return np.concatenate([*decades, [1.0]])


def _edges(steps: int) -> np.ndarray:
    return np.linspace(0.1, 1, steps + 1)


# Positive levels for the mean, which has a sign, and for the mean square.
CODES = {
    "linear": (np.arange(1, 128) / 127, np.arange(1, 256) / 255),
    "logarithmic": (2.0 ** (-16 * np.arange(127) / 127)[::-1], 2.0 ** (-32 * np.arange(255) / 255)[::-1]),
    "dynamic": (dynamic(7), dynamic(8)),
}


def rounded_adam(code: str, rounding: Any, *, block: int | None = BLOCK, root: bool = False) -> Form:
    """AdamW whose moments are rounded to a code with a scale for each block, or for each tensor."""
    grids = [jnp.asarray(grid, jnp.float32) for grid in (signed(CODES[code][0]), np.append(0, CODES[code][1]))]

    def on_grid(x: jax.Array, grid: jax.Array, key: jax.Array, has_root: bool) -> jax.Array:
        flat = x.reshape(-1)
        width = block or x.size
        rows = jnp.pad(flat, (0, -x.size % width)).reshape(-1, width)
        scale = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
        unit = rows / jnp.where(scale > 0, scale, 1)
        held = jnp.square(rounding(jnp.sqrt(unit), grid, key)) if has_root else rounding(unit, grid, key)
        return (held * scale).reshape(-1)[: x.size].reshape(x.shape)

    inner = optax.scale_by_adam(0.9, 0.95)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = inner.update(updates, state, params)
        keys = iter(jax.random.split(jax.random.fold_in(jax.random.key(0), state.count), 999))
        held = [
            jax.tree.map(
                lambda x, is_matrix, i=i: on_grid(x, grids[i], next(keys), bool(root and i)) if is_matrix else x,
                moments,
                IS_MATRIX(moments),
            )
            for i, moments in enumerate((state.mu, state.nu))
        ]
        return updates, state._replace(mu=held[0], nu=held[1])

    return Form(
        optax.chain(optax.GradientTransformation(inner.init, update), optax.add_decayed_weights(DECAY, IS_MATRIX))
    )


def corrected(updates: Any, params: Any, step: jax.Array) -> Any:
    """Weights on the grid of bfloat16 and 8 bits more: what a bfloat16 weight and a byte beside it hold."""

    def one(u: jax.Array, p: jax.Array, is_matrix: bool) -> jax.Array:
        if not is_matrix:
            return u
        bits = jax.lax.bitcast_convert_type(p + u, jnp.uint32) + np.uint32(0x80)
        return jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFFFF00), jnp.float32) - p

    return jax.tree.map(one, updates, params, IS_MATRIX(params))


def forms() -> dict[str, Callable[[], Form]]:
    def plain(updates: Any, params: Any, step: jax.Array) -> Any:
        return updates

    float32, int8 = adamw(DECAY, axes=AXES), adamw(DECAY, axes=AXES, state_dtype=jnp.int8)
    blocks = {
        f"int8 blocks, {code}{', root' if root else ''}, {rounding.__name__}": partial(
            rounded_adam, code, rounding, root=root
        )
        for code in CODES
        for root in (False, True)
        for rounding in (nearest, stochastic)
    }
    return {
        "float32": lambda: Form(float32),
        "bfloat16 moments": lambda: Form(adamw(DECAY, axes=AXES, state_dtype=jnp.bfloat16)),
        "int8": lambda: Form(int8),
        "int8, bfloat16 weights": lambda: Form(int8, jnp.bfloat16),
        "int8, 3-byte weights": lambda: Form(int8, jnp.float32, corrected),
        "float32, bfloat16 weights": lambda: Form(float32, jnp.bfloat16),
        "float32, bfloat16 weights to nearest": lambda: Form(float32, jnp.bfloat16, plain),
        "int8, bfloat16 weights to nearest": lambda: Form(int8, jnp.bfloat16, plain),
        "int8 per tensor, linear, nearest": partial(rounded_adam, "linear", nearest, block=None),
        **blocks,
    }


def train(form: Form, size: GPTConfig, steps: int, seed: int, factor: float) -> dict[str, Any]:
    """Trains on one device; the curve is of validation losses in nats per token."""
    axis = Axis("zero", (1, 1))
    model = ShardedGPT(size, axis, 0, remat="none", master_dtype=form.master_dtype)
    context = size.block_size
    train_rows, validation_rows = (
        Loader(index, Batching(ROWS), RowFormat(ROW_TOKENS, 256), RowOrder(seed, is_training))
        for index, is_training in zip(INDEX, (True, False), strict=True)
    )
    validation = [batch.tokens for batch, _ in zip(validation_rows.batches(None), range(16), strict=False)]
    with mock.patch.object(optimizer, "rounded_updates", form.rounding):
        rate = LearningRate(factor * PEAK, factor * PEAK / 10, WARMUP, steps)
        options = StepOptions(rate, seed, max_gradient_norm=1.0)
        programs = make_programs(model, form.tx, options, jax.devices()[:1])
        state = programs.start(programs.init(np.asarray(jax.random.key_data(jax.random.key(seed)))[None]))
        curve = []
        for step, batch in zip(range(1, steps + 1), train_rows.batches(None), strict=False):
            rows = batch.tokens.reshape(1, -1, context)
            state, metrics = programs.step(state, Batch(rows, np.zeros(1, np.int32)))
            if step % max(steps // CURVE, 1) == 0 or step == steps:
                last = validation if step == steps else validation[:4]
                sums = [programs.evaluate(state.params, tokens.reshape(1, -1, context)) for tokens in last]
                curve.append((step, sum(float(s) for s, *_ in sums) / sum(int(n) for _, n, _ in sums)))
    return {"loss": curve[-1][1], "curve": curve, "skipped": int(metrics["skipped_steps"])}


def results(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(directory.glob("*.json")):
        yield json.loads(path.read_text())


def table(directory: Path) -> Iterator[str]:
    """For each size, number of steps and learning rate a line per form: its mean loss, and to float32 of equal seed."""
    found = list(results(directory))
    for key in sorted({(r["size"], r["steps"], r["factor"]) for r in found}, key=str):
        chosen = [r for r in found if (r["size"], r["steps"], r["factor"]) == key]
        base = {r["seed"]: r["loss"] for r in chosen if r["form"] == "float32"}
        yield f"{key[0]}, {key[1]} steps, learning rate {key[2] * PEAK:g}"
        for form in forms():
            pairs = [
                (r["loss"], r["loss"] / base[r["seed"]] - 1) for r in chosen if r["form"] == form and r["seed"] in base
            ]
            if pairs:
                losses, ratios = zip(*pairs, strict=True)
                each = " ".join(f"{ratio:+.2%}" for ratio in ratios)
                yield f"  {form:40s} {mean(losses):.4f}  {mean(ratios):+.2%}  (by seed: {each})"


def keep(directory: Path, path: Path) -> None:
    """Writes what the picture of docs/draw_quantized.py shows: the curves, to four digits after the point."""
    lines = []
    for result in results(directory):
        steps, losses = zip(*result["curve"], strict=True)
        line = {"form": result["form"], "seed": result["seed"], "steps": steps}
        lines.append(json.dumps(line | {"losses": [round(loss, 4) for loss in losses]}))
    path.write_text("\n".join(lines) + "\n")


def speed(rounds: int = 15) -> str:
    """Seconds of an update of a million parameters in 100 leaves, compiled, on one device."""
    rng = np.random.default_rng(0)
    params = {f"{i:02}": jnp.asarray(rng.normal(size=(100, 100)), jnp.float32) for i in range(100)}
    kinds = {"float32": optax.adamw(1e-3), "int8": quantized.adamw(1e-3)}
    ready = {name: (jax.jit(tx.update, donate_argnums=1), tx.init(params)) for name, tx in kinds.items()}
    states = {name: state for name, (_, state) in ready.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 2):
        for name, (update, _) in ready.items():
            began = time.perf_counter()
            updates, states[name] = update(params, states[name], params)
            jax.block_until_ready((updates, states[name]))
            seconds[name].append(time.perf_counter() - began)
    times = {name: each[2:] for name, each in seconds.items()}  # the first ones compile and warm up
    ratio = median(a / b for a, b in zip(times["int8"], times["float32"], strict=True))
    shown = ", ".join(f"{name} {1000 * median(each):.2f} ms" for name, each in times.items())
    lines = [f"{shown}; int8 to float32 {ratio:.2f}, the median of {rounds} pairs"]
    for compiler, device in (("CPU", jax.devices()[0]), ("TPU v3", find_devices("v3-8")[0])):
        shown = ", ".join(f"{name} {bytes_accessed(tx, params, device) / 1e6:.1f} MB" for name, tx in kinds.items())
        lines.append(f"accessed by update and addition, by the compiler for {compiler}: {shown}")
    return "\n".join(lines)


def bytes_accessed(tx: optax.GradientTransformation, params: Any, device: Any) -> float:
    """Bytes of a compiled update of the parameters: gradients, state and parameters read, the latter two written."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def on_device(tree: Any) -> Any:
        sharding = jax.sharding.SingleDeviceSharding(device)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    state = jax.eval_shape(tx.init, params)
    program = jax.jit(update, donate_argnums=(1, 2)).lower(*map(on_device, (params, state, params))).compile()
    cost: Any = program.cost_analysis()
    return float(cost["bytes accessed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="bytes")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--forms", nargs="+", default=list(forms()), choices=list(forms()), metavar="NAME")
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--directory", type=Path, default=Path("runs/quantized"))
    parser.add_argument("--keep", type=Path, help="writes the curves of the picture to this file")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    if options.speed:
        prepare_environment("v3-8")
        print(speed())
        return
    options.directory.mkdir(parents=True, exist_ok=True)
    if not options.table:
        prepare_if_missing("stdlib", INDEX, load_tokenizer("bytes"), ROW_TOKENS)
        size = SMALL if options.size == "small" else load_sizes()[options.size]
        for seed in options.seeds:
            for name in options.forms:
                file_name = f"{options.size}-{options.steps}-{options.factor:g}-{seed}-{name.replace(' ', '_')}.json"
                path = options.directory / file_name
                if path.exists():
                    continue
                began = time.monotonic()
                result = train(forms()[name](), size, options.steps, seed, options.factor)
                about = {
                    "form": name,
                    "size": options.size,
                    "steps": options.steps,
                    "seed": seed,
                    "factor": options.factor,
                }
                path.write_text(json.dumps(about | result) + "\n")
                print(f"{file_name}: {result['loss']:.4f} in {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(table(options.directory)))
    if options.keep:
        keep(options.directory, options.keep)


if __name__ == "__main__":
    main()
