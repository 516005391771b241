"""What a training step needs on a TPU core, asked of the TPU's own compiler; no TPU is needed.

    python benchmarks/tpu_memory.py [--size 1_1b] [--topology v3:4x4] [--micro-batch 4] [--stages 0 1 2 3]

Compiles the very step that training runs (zero/training/programs.py) for a slice and prints its peak, arguments and
results included. Needs libtpu, which `./prepareTPUVM.sh --test` brings. About a minute a stage on two cores.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from zero.partition.collectives import Axis
from zero.runtime.configuration import load_sizes
from zero.training.programs import make_programs
from zero.training.schedules import LearningRate
from zero.training.step import Batch, ShardedGPT, adamw, state_layout

GIB = 2**30


def compile_step(model: ShardedGPT, devices: list[Any], micro_batch: int, context: int) -> Any:
    """The compiled step of this model on these devices, which need not exist."""
    tx = adamw(0.1)
    programs = make_programs(
        model,
        tx,
        learning_rate=LearningRate(3e-4, 3e-5, 1000, 100_000),
        seed=0,
        micro_batches=1,
        max_gradient_norm=1.0,
        devices=devices,
    )
    state = state_layout(model, tx).shard_shapes()
    batch = jax.eval_shape(lambda: Batch(jnp.zeros((micro_batch, context), jnp.int32), jnp.int32(0)))
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(devices), *x.shape), x.dtype), (state, batch))
    return programs.step.lower(*stacked).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1_1b", help="an entry of conf/model_config.yaml")
    parser.add_argument("--topology", default="v3:4x4", help="v3:4x4 is a v3-32, v3:2x2 a v3-8")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences a core")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    arguments = parser.parse_args()
    config = load_sizes(Path(__file__).parent.parent / "conf/model_config.yaml")[arguments.size]
    devices = topologies.get_topology_desc(topology_name=arguments.topology, platform="tpu").devices
    print(f"{arguments.size} on {len(devices)} cores ({arguments.topology}), {arguments.micro_batch} sequences a core")
    print(f"{'stage':>5} {'state GiB':>10} {'peak GiB':>10} {'compile s':>10}")
    for stage in arguments.stages:
        model = ShardedGPT(config, Axis("zero", (1, len(devices))), stage, jnp.bfloat16)
        state_bytes = state_layout(model, adamw(0.1)).bytes_per_device()
        started = time.monotonic()
        try:
            compiled = compile_step(model, devices, arguments.micro_batch, arguments.context)
            peak = f"{compiled.memory_analysis().peak_memory_in_bytes / GIB:.3f}"
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            peak = "does not fit: " + str(error).split("RESOURCE_EXHAUSTED:")[-1].strip().splitlines()[0]
        seconds = time.monotonic() - started
        print(f"{stage:>5} {state_bytes / GIB:>10.3f} {peak:>10} {seconds:>10.0f}", flush=True)


if __name__ == "__main__":
    main()
