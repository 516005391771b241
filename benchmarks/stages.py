"""The numbers and the picture of docs/explanation/stages.md: memory per core and bytes sent, stage by stage.

    python -m benchmarks.stages

Memory is arithmetic on the shapes of the 1.1B model on 32 cores (`zero.memory`), beside the peaks of the TPU compiler.
Bytes sent are counted in the compiled CPU program of the default job's model. Nothing is run. A minute on two cores.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from benchmarks.collectives import DEVICES
from docs.picture_of_numbers import themed
from zero.costs.hlo import collectives
from zero.job.sizes import load_sizes
from zero.models.gpt import parameter_axes
from zero.partition.collectives.axis import Axis
from zero.partition.memory import memory
from zero.partition.virtual_devices import use_cpu_devices
from zero.report.picture_style import COLORS, GRAY, STYLE
from zero.training.batch import Batch
from zero.training.optimizers.optimizer import adamw
from zero.training.parts import StepOptions
from zero.training.programs import make_programs
from zero.training.schedules import LearningRate
from zero.training.sharded_gpt import ShardedGPT
from zero.training.step import state_layout

ROOT = Path(__file__).parent.parent
SIZES = load_sizes()
GIB = 2**30
CORES = 32
HBM = 15.48  # GiB that the compiler has of a v3 core's 16
# GiB, printed by `mode=plan plan.exact=true plan.topology=v3-32 model.size=1_1b zero.remat=full plan.search=stages`.
PEAK = (16.84, 4.96, 3.11, 1.17)


def memory_by_stage() -> dict[str, list[float]]:
    """GiB per core of the 1.1B model in bfloat16, by part and by stage; the rest is what remains of the peak."""
    shapes = ShardedGPT(SIZES["1_1b"], Axis("zero", (1, CORES)), 3).sharded_layout.shapes()
    stacked = [name for name in SIZES["1_1b"].stacked if name in shapes]
    tx = adamw(0.1, axes=parameter_axes(SIZES["1_1b"]))
    rows = memory(shapes, tx, CORES, stacked=stacked, compute_dtypes=[jnp.bfloat16]).rows
    return {
        "state: float32 weights, moments": [(row.parameters + row.state) / GIB for row in rows],
        "whole weights, bfloat16": [row.gathered / GIB for row in rows],
        "gradients": [row.gradients / GIB for row in rows],
        "activations and the rest": [peak - row.total / GIB for row, peak in zip(rows, PEAK, strict=True)],
    }


def draw(parts: dict[str, list[float]], path: Path) -> None:
    """Four stacked bars and the limit."""
    plt.rcParams.update(STYLE | {"svg.hashsalt": "stages", "axes.grid.axis": "x"})
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    left = [0.0] * 4
    for (name, gib), color in zip(parts.items(), (*COLORS[:3], GRAY), strict=True):
        axes.barh(range(4), gib, left=left, label=name, color=color)
        left = [a + b for a, b in zip(left, gib, strict=True)]
    for stage, total in enumerate(left):
        axes.text(total + 0.1, stage, f"{total:.2f}", va="center")
    axes.axvline(HBM, color="black", linestyle="--", linewidth=1, label=f"a v3 core: {HBM} GiB")
    axes.set(
        title=f"Memory of a step, 1.1 billion parameters on {CORES} cores",
        xticks=range(0, 19, 2),
        yticks=range(4),
        yticklabels=[f"stage {stage}" for stage in range(4)],
        xlim=(0, 18.5),
        xlabel="GiB per core",
    )
    axes.invert_yaxis()
    axes.legend(loc="center", bbox_to_anchor=(0.6, 0.42))
    figure.savefig(path, metadata={"Date": None})
    path.write_text(themed(path.read_text()))


def megabytes_sent(stage: int, micro_batches: int) -> float:
    """Bytes that one device sends in a step of the default job's model in float32."""
    model = ShardedGPT(SIZES["bytes"], Axis("zero", (1, DEVICES)), stage)
    tx = adamw(0.1, axes=model.axes)
    rate = LearningRate(3e-3, 3e-4, 50, 500)
    programs = make_programs(model, tx, StepOptions(rate, micro_batches=micro_batches, max_gradient_norm=1.0))
    batch = jax.eval_shape(lambda: Batch(jnp.zeros((micro_batches, model.config.block_size), jnp.int32), jnp.int32(0)))
    stacked = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((DEVICES, *x.shape), x.dtype), (state_layout(model, tx).shard_shapes(), batch)
    )
    compiled = programs.step.lower(*stacked).compile()
    return sum(collective.sent for collective in collectives(compiled.as_text())) / 1e6


def main() -> None:
    use_cpu_devices(DEVICES)
    parts = memory_by_stage()
    print(f"GiB per core, 1_1b on {CORES} cores\n{'stage':<40}" + "".join(f"{stage:>8}" for stage in range(4)))
    for name, gib in parts.items():
        print(f"{name:<40}" + "".join(f"{x:>8.3f}" for x in gib))
    draw(parts, ROOT / "docs/pictures/stages.svg")

    layout = ShardedGPT(SIZES["bytes"], Axis("zero", (1, DEVICES)), 3).sharded_layout
    psi = layout.whole().bytes_per_device() / 1e6 * (DEVICES - 1) / DEVICES
    print(f"\nMB sent per step by each of {DEVICES} devices, and as multiples of Psi (N - 1) / N = {psi:.2f} MB")
    print("stage  1 micro-batch    4 micro-batches")
    for stage in range(4):
        one, four = megabytes_sent(stage, 1), megabytes_sent(stage, 4)
        print(f"{stage:>5}  {one:>6.2f} ({one / psi:>5.2f})  {four:>7.2f} ({four / psi:>5.2f})", flush=True)


if __name__ == "__main__":
    main()
