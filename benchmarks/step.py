"""One training step of one GPT: stages 0 to 3 against plain pmap, GSPMD and, where torch is installed, FSDP2.

    python benchmarks/step.py [--shape default|optimizer] [--rounds 20]

Everything runs in one process, in turns, so that a noisy machine is noisy for all: each round times one step of every
program, and what is printed is the median of the ratios to a peer in the same round. Bytes are the compiler's, for one
device. The same model, rematerialisation, dtypes, clipping and AdamW everywhere.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "32")  # more devices than cores: zero/runtime/hosts/startup.py

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero.models.gpt import GPT, GPTConfig
from zero.partition.collectives import Axis
from zero.partition.layout import LeafLayout
from zero.partition.state import pmap_devices
from zero.training.programs import make_programs
from zero.training.schedules import LearningRate
from zero.training.step import Batch, ShardedGPT, adamw, decayed, next_tokens, state_layout

DEVICES = 8
RATE = LearningRate(3e-3, 3e-4, 50, 500)


class Shape(NamedTuple):
    config: GPTConfig
    context: int
    sequences: int  # of the global batch
    why: str


SHAPES = {
    # conf/config.yaml
    "default": Shape(GPTConfig(192, 256, 6, 256, 0.0, 4), 256, 8, "the default job"),
    # 12.7M parameters for 256 tokens: the update costs as much as the gradient, and plain pmap makes it 8 times
    "optimizer": Shape(GPTConfig(256, 256, 8, 32, 0.0, 16), 32, 8, "optimizer-bound"),
}


class Program(NamedTuple):
    step: Callable[[Any, Any], tuple[Any, jax.Array]]  # state, batch -> state, loss
    state: Any
    batch: Any
    bytes: int


def sharded(shape: Shape, stage: int, dtype: str, tokens: np.ndarray) -> Program:
    """This project's step."""
    model = ShardedGPT(shape.config, Axis("zero", (1, DEVICES)), stage, dtype)
    programs = make_programs(model, adamw(0.1), learning_rate=RATE, seed=0, micro_batches=1, max_gradient_norm=1.0)
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    state = programs.start(programs.init(np.stack([key] * DEVICES)))
    rows = len(tokens) // DEVICES
    batch = Batch(tokens.reshape(DEVICES, rows, -1), rows * np.arange(DEVICES, dtype=np.int32))
    step = programs.step.lower(state, batch).compile()

    def run(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return Program(run, state, batch, compiled_bytes(step))


def loss_of(model: GPT, dtype: str, params: Any, tokens: jax.Array) -> jax.Array:
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    losses = jnp.asarray(model.apply({"params": params}, tokens, next_tokens(tokens)))
    return losses[:, :-1].mean()


def plain_optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, b2=0.95, weight_decay=0.1, mask=decayed))


def plain_pmap(shape: Shape, dtype: str, tokens: np.ndarray) -> Program:
    """Data parallelism as anyone would write it: everything on every device, gradients through `pmean`."""
    model, tx = GPT(shape.config, dtype), plain_optimizer()

    @partial(jax.pmap, axis_name="batch")
    def init(_: jax.Array) -> tuple[Any, Any]:
        params = model.init(jax.random.key(0), jnp.zeros((1, 2), int), None, method="hidden")["params"]
        return params, tx.init(params)

    @partial(jax.pmap, axis_name="batch", donate_argnums=0, out_axes=(0, None))
    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(partial(loss_of, model, dtype))(params, tokens)
        loss, grads = lax.pmean((loss, grads), "batch")
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state, batch = init(jnp.zeros(DEVICES)), tokens.reshape(DEVICES, -1, tokens.shape[-1])
    compiled = step.lower(state, batch).compile()
    return Program(compiled, state, batch, compiled_bytes(compiled))


def gspmd(shape: Shape, dtype: str, tokens: np.ndarray) -> Program:
    """FSDP by the compiler: `jit` with a NamedSharding a leaf, split where our layout splits it."""
    model, tx = GPT(shape.config, dtype), plain_optimizer()
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
    ours = ShardedGPT(shape.config, Axis("zero", (1, DEVICES)), 3, dtype)

    def init() -> tuple[Any, Any]:
        params = model.init(jax.random.key(0), jnp.zeros((1, 2), int), None, method="hidden")["params"]
        return params, tx.init(params)

    by_shape = {leaf.shape: sharding(leaf, mesh) for leaf in state_layout(ours, adamw(0.1)).leaves}
    shardings = jax.tree.map(lambda x: by_shape[x.shape], jax.eval_shape(init))
    state = jax.jit(init, out_shardings=shardings)()
    batch = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("fsdp")))

    @partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(partial(loss_of, model, dtype))(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    compiled = step.lower(state, batch).compile()
    return Program(compiled, state, batch, compiled_bytes(compiled))


def sharding(leaf: LeafLayout, mesh: Mesh) -> NamedSharding:
    split = {split.dim for split in leaf.splits if not split.padding}
    return NamedSharding(mesh, PartitionSpec(*("fsdp" if dim in split else None for dim in range(len(leaf.shape)))))


def compiled_bytes(compiled: Any) -> int:
    """Arguments, temporaries and results that are not aliased, on one device."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def measure(shape: Shape, dtype: str, rounds: int) -> dict[str, float]:
    """Prints the table of one shape; returns the tokens a second of each program."""
    tokens = np.random.default_rng(0).integers(0, shape.config.vocab_size, (shape.sequences, shape.context), np.int32)
    programs = {
        "plain pmap": plain_pmap(shape, dtype, tokens),
        "GSPMD (jit)": gspmd(shape, dtype, tokens),
        **{f"zero stage {stage}": sharded(shape, stage, dtype, tokens) for stage in range(4)},
    }
    states = {name: program.state for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    losses = {}
    for round_ in range(rounds + 2):
        for name in random.sample(list(programs), len(programs)):  # nobody always follows the same neighbour
            program = programs[name]
            started = time.perf_counter()
            states[name], loss = program.step(states[name], program.batch)
            jax.block_until_ready((states[name], loss))
            if round_ >= 2:
                seconds[name].append(time.perf_counter() - started)
            losses[name] = float(loss)
    parameters = sum(np.prod(leaf.shape) for leaf in ShardedGPT(shape.config, Axis("z", (1, 1)), 0).layout.leaves)
    print(
        f"\n{shape.why}: {parameters / 1e6:.2f}M parameters, {shape.sequences} sequences of {shape.context} tokens, "
        f"{dtype}, {DEVICES} CPU devices on {os.cpu_count()} cores, {rounds} rounds"
    )
    print(
        f"{'program':<14} {'tokens/s':>9} {'vs pmap':>8} {'vs GSPMD':>9} {'MB/device':>10} {'vs GSPMD':>9} {'loss':>8}"
    )
    speeds = {name: tokens.size / statistics.median(seconds[name]) for name in programs}
    for name, program in programs.items():
        ratio = {
            peer: statistics.median(b / a for a, b in zip(seconds[name], seconds[peer], strict=True))
            for peer in ("plain pmap", "GSPMD (jit)")
        }
        print(
            f"{name:<14} {speeds[name]:>9,.0f} {ratio['plain pmap']:>8.3f} {ratio['GSPMD (jit)']:>9.3f} "
            f"{program.bytes / 1e6:>10.1f} {program.bytes / programs['GSPMD (jit)'].bytes:>9.3f} {losses[name]:>8.4f}"
        )
    return speeds


def compare_with_fsdp2(shape: Shape, rounds: int, speeds: dict[str, float]) -> None:
    """Adds PyTorch's FSDP2 to the table, and our speeds as ratios to it."""
    config = shape.config
    sizes = [config.embedding_dim, config.vocab_size, config.num_head, config.N, shape.context, shape.sequences]
    command = [sys.executable, str(Path(__file__).parent / "fsdp2.py"), *map(str, sizes), str(rounds)]
    rows = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(rows, end="")
    fsdp2 = float(rows.split()[2].replace(",", ""))
    ours = (f"stage {stage} {speeds[f'zero stage {stage}'] / fsdp2:.3f}" for stage in range(4))
    print("vs FSDP2:", *ours, sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="one of them; both by default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of compute")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    assert len(pmap_devices()) == DEVICES
    for name in [arguments.shape] if arguments.shape else SHAPES:
        speeds = measure(SHAPES[name], arguments.dtype, arguments.rounds)
        if arguments.dtype != "float32":
            print("FSDP2: measured in float32 only")
        elif find_spec("torch"):
            compare_with_fsdp2(SHAPES[name], arguments.rounds, speeds)
        else:
            print("FSDP2: torch is not installed")


if __name__ == "__main__":
    main()
