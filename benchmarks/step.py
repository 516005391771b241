"""One training step of one GPT: stages 0 to 3 against plain pmap, GSPMD and, where it is installed, torch.

    python benchmarks/step.py [--shape default|optimizer] [--devices 8] [--remat none|full] [--rounds 20]
                              [--plain-order]

The programs take turns, so that noise affects all alike: each round times one step of every program, and the table has
the median of the ratios to a peer in the same round. All of JAX runs in one process; torch runs in another one with all
cores, and FSDP2 in two, after the table. Bytes are the compiler's, for one device. The same model, rematerialization,
dtypes, clipping and AdamW everywhere.

With --plain-order each stage is only compared with itself without `zero.in_order`, which may abort on a busy machine
(docs/decisions/virtual-devices.md).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero.hosts.startup import start
from zero.models.config import GPTConfig
from zero.models.gpt import GPT
from zero.partition.collectives.axis import Axis
from zero.partition.global_arrays import pmap_devices
from zero.partition.layout import LeafLayout
from zero.training.batch import Batch, next_tokens
from zero.training.optimizers.optimizer import adamw, decayed
from zero.training.parts import StepOptions
from zero.training.programs import make_programs
from zero.training.schedules import LearningRate
from zero.training.sharded_gpt import ShardedGPT
from zero.training.step import state_layout

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
    step: Callable[[Any, Any], tuple[Any, Any]]  # state, batch -> state, loss
    state: Any
    batch: Any
    bytes: float


def sharded(shape: Shape, stage: int, dtype: str, remat: str, tokens: np.ndarray) -> Program:
    """This project's step."""
    devices = jax.device_count()
    model = ShardedGPT(shape.config, Axis("zero", (1, devices)), stage, dtype, remat=remat)
    programs = make_programs(model, adamw(0.1, axes=model.axes), StepOptions(RATE, max_gradient_norm=1.0))
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    state = programs.start(programs.init(np.stack([key] * devices)))
    rows = len(tokens) // devices
    batch = Batch(tokens.reshape(devices, rows, -1), rows * np.arange(devices, dtype=np.int32))
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


def plain_pmap(shape: Shape, dtype: str, remat: str, tokens: np.ndarray) -> Program:
    """Data parallelism as anyone would write it: everything on every device, gradients through `pmean`."""
    model, tx, devices = GPT(shape.config, dtype, remat=remat), plain_optimizer(), jax.device_count()

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

    state, batch = init(jnp.zeros(devices)), tokens.reshape(devices, -1, tokens.shape[-1])
    compiled = step.lower(state, batch).compile()
    return Program(compiled, state, batch, compiled_bytes(compiled))


def gspmd(shape: Shape, dtype: str, remat: str, tokens: np.ndarray) -> Program:
    """FSDP by the compiler: `jit` with a NamedSharding per leaf, split where our layout splits it.

    As its users write it, what every module returns is pinned to the batch dimension, and the table of the vocabulary,
    whose rows are looked up, is gathered whole; else XLA moves activations to where the weights are.
    """
    model, tx = GPT(shape.config, dtype, remat=remat), plain_optimizer()
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
    by_row, whole = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("fsdp",), ()))
    zero_model = ShardedGPT(shape.config, Axis("zero", (1, jax.device_count())), 3, dtype)

    def pin(method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        def one(x: Any) -> Any:
            is_activation = isinstance(x, jax.Array) and x.ndim >= 2 and x.shape[0] == shape.sequences
            return lax.with_sharding_constraint(x, by_row) if is_activation else x

        return jax.tree.map(one, method(*args, **kwargs))

    def loss_of_pinned(params: Any, tokens: jax.Array) -> jax.Array:
        params = {**params, "vocabulary": lax.with_sharding_constraint(params["vocabulary"], whole)}
        with nn.intercept_methods(pin):
            return loss_of(model, dtype, params, tokens)

    def init() -> tuple[Any, Any]:
        params = model.init(jax.random.key(0), jnp.zeros((1, 2), int), None, method="hidden")["params"]
        return params, tx.init(params)

    zero_tx = adamw(0.1, axes=zero_model.axes)
    by_shape = {leaf.shape: sharding(leaf, mesh) for leaf in state_layout(zero_model, zero_tx).leaves}
    shardings = jax.tree.map(lambda x: by_shape[x.shape], jax.eval_shape(init))
    state = jax.jit(init, out_shardings=shardings)()
    batch = jax.device_put(tokens, by_row)

    @partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of_pinned)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    compiled = step.lower(state, batch).compile()
    return Program(compiled, state, batch, compiled_bytes(compiled))


def sharding(leaf: LeafLayout, mesh: Mesh) -> NamedSharding:
    split = {split.dim for split in leaf.splits if not split.padding}
    return NamedSharding(mesh, PartitionSpec(*("fsdp" if dim in split else None for dim in range(len(leaf.shape)))))


def torch_gpt(shape: Shape, remat: str, kind: str, rounds: int) -> list[str]:
    """The command of PyTorch's side, `one` or `fsdp2`."""
    config = shape.config
    sizes = [config.embedding_dim, config.vocab_size, config.num_head, config.N, shape.context, shape.sequences]
    return [sys.executable, str(Path(__file__).parent / "torch_gpt.py"), kind, remat, *map(str, sizes), str(rounds)]


@contextmanager
def torch_process(shape: Shape, remat: str) -> Iterator[Program]:
    """PyTorch in a process of its own that has all cores: a line in, a step, its loss back."""
    command = torch_gpt(shape, remat, "one", 0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        requests, answers = process.stdin, process.stdout
        assert requests and answers

        def step(state: None, batch: None) -> tuple[None, float]:
            print(file=requests, flush=True)
            return None, float(answers.readline())

        yield Program(step, None, None, math.nan)
        requests.close()


def compiled_bytes(compiled: Any) -> int:
    """Arguments, temporaries and results that are not aliased, on one device."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def measure(shape: Shape, dtype: str, remat: str, rounds: int) -> dict[str, float]:
    """Prints the table of one shape; returns the tokens per second of each program."""
    tokens = np.random.default_rng(0).integers(0, shape.config.vocab_size, (shape.sequences, shape.context), np.int32)
    programs = {
        "plain pmap": plain_pmap(shape, dtype, remat, tokens),
        "GSPMD (jit)": gspmd(shape, dtype, remat, tokens),
        **{f"zero stage {stage}": sharded(shape, stage, dtype, remat, tokens) for stage in range(4)},
    }
    with ExitStack() as stack:
        if has_torch(dtype):
            programs["torch"] = stack.enter_context(torch_process(shape, remat))
        seconds, losses = time_in_turns(programs, rounds)
    parameters = sum(np.prod(leaf.shape) for leaf in ShardedGPT(shape.config, Axis("z", (1, 1)), 0).layout.leaves)
    print(
        f"\n{shape.why}: {parameters / 1e6:.2f}M parameters, {shape.sequences} sequences of {shape.context} tokens, "
        f"{dtype}, remat {remat}, {jax.device_count()} CPU devices on {os.cpu_count()} cores, {rounds} rounds"
    )
    peers = ("plain pmap", "GSPMD (jit)", "torch")
    print(
        f"{'program':<14} {'tokens/s':>9} {'vs pmap':>8} {'vs GSPMD':>9} {'vs torch':>9} {'MB/device':>10} "
        f"{'vs GSPMD':>9} {'loss':>8}"
    )
    speeds = {name: tokens.size / statistics.median(seconds[name]) for name in programs}
    for name, program in programs.items():
        pmap, jit, torch = (
            statistics.median(b / a for a, b in zip(seconds[name], seconds[peer], strict=True))
            if peer in seconds
            else math.nan
            for peer in peers
        )
        print(
            f"{name:<14} {speeds[name]:>9,.0f} {pmap:>8.3f} {jit:>9.3f} {torch:>9.3f} "
            f"{program.bytes / 1e6:>10.1f} {program.bytes / programs['GSPMD (jit)'].bytes:>9.3f} {losses[name]:>8.4f}"
        )
    return speeds


def compare_orders(shape: Shape, dtype: str, remat: str, rounds: int) -> None:
    """Prints what `zero.in_order` costs: speed of each stage with it as a ratio to the same stage without."""
    tokens = np.random.default_rng(0).integers(0, shape.config.vocab_size, (shape.sequences, shape.context), np.int32)
    ordered = {f"stage {stage}": sharded(shape, stage, dtype, remat, tokens) for stage in range(4)}
    with patch("zero.training.programs.in_order", lambda fn: fn):
        plain = {f"stage {stage}, plain": sharded(shape, stage, dtype, remat, tokens) for stage in range(4)}
    seconds, losses = time_in_turns({**ordered, **plain}, rounds)
    print(f"\n{shape.why}, {rounds} rounds: speed with in_order against without, bytes per device likewise")
    for name, program in ordered.items():
        other = f"{name}, plain"
        assert losses[name] == losses[other]
        ratio = statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True))
        print(f"{name}  {ratio:.3f}  {program.bytes / plain[other].bytes:.3f}")


def has_torch(dtype: str) -> bool:
    """Whether torch is installed; its model is float32 only."""
    return dtype == "float32" and find_spec("torch") is not None


def time_in_turns(programs: dict[str, Program], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each program's step in every round, and its last loss."""
    states = {name: program.state for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    losses = {}
    for round_ in range(rounds + 2):
        for name in random.sample(list(programs), len(programs)):  # nobody always follows the same neighbor
            program = programs[name]
            started = time.perf_counter()
            states[name], loss = program.step(states[name], program.batch)
            jax.block_until_ready((states[name], loss))
            if round_ >= 2:
                seconds[name].append(time.perf_counter() - started)
            losses[name] = float(loss)
    return seconds, losses


def compare_with_fsdp2(shape: Shape, remat: str, rounds: int, speeds: dict[str, float]) -> None:
    """Adds PyTorch's FSDP2 to the table, and our speeds as ratios to it."""
    command = torch_gpt(shape, remat, "fsdp2", rounds)
    rows = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(rows, end="")
    fsdp2 = float(rows.split()[2].replace(",", ""))
    zero_model = (f"stage {stage} {speeds[f'zero stage {stage}'] / fsdp2:.3f}" for stage in range(4))
    print("vs FSDP2:", *zero_model, sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="one of them; both by default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of compute")
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices")
    parser.add_argument("--remat", choices=("none", "full"), default="none", help="as zero.remat; auto is none on CPU")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--plain-order", action="store_true", help="what zero.in_order costs, and nothing else")
    arguments = parser.parse_args()
    start(arguments.devices, None, None, None, None, 30.0, None, None, overlap_gathers=True)
    assert len(pmap_devices()) == arguments.devices
    for name in [arguments.shape] if arguments.shape else SHAPES:
        if arguments.plain_order:
            compare_orders(SHAPES[name], arguments.dtype, arguments.remat, arguments.rounds)
            continue
        speeds = measure(SHAPES[name], arguments.dtype, arguments.remat, arguments.rounds)
        if has_torch(arguments.dtype):
            compare_with_fsdp2(SHAPES[name], arguments.remat, arguments.rounds, speeds)
        else:
            print("torch: not installed, or not float32")


if __name__ == "__main__":
    main()
