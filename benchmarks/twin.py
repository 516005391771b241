"""The predicted time of zero's step beside a GSPMD twin: the same model, batch and slice, by the same TPU compiler.

    python benchmarks/twin.py                       # all rows; a compilation takes one to three minutes of CPU
    python benchmarks/twin.py --rows 1.1b-v4-32 --texts DIRECTORY

The twin is `jit` with a NamedSharding per leaf, split where zero splits it, as FSDP is written with GSPMD: activations
are pinned to the batch dimension, each layer is recomputed, weights are gathered in bfloat16, and attention is the same
kernel under `shard_map`. With tensor groups weights are split over both dimensions of a mesh, and activations too: by
heads and columns inside a layer, by positions between layers. It is compiled with the options of zero's overlap, and
without windowed einsums, which XLA would choose otherwise; with zero's VMEM for a fusion and with the compiler's own,
with zero's layouts (contiguous rows, rotary positions in a kernel) and without: the fastest of these programs counts.
Both are read by `zero/costs/predict.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero.commands.cli import composed
from zero.commands.modes import typed
from zero.costs.predict import Prediction, predict
from zero.costs.topology import find_devices, out_of_memory, prepare_environment
from zero.hosts.speeds import SPEEDS
from zero.hosts.xla_options import VMEM
from zero.job.job import Job, make_job, place_model
from zero.job.sizes import load_sizes
from zero.models import mixer, self_attention
from zero.models.attention.kernel import fused_rotation, kernel_attention
from zero.models.config import GPTConfig
from zero.models.elements import row_major
from zero.models.gpt import GPT
from zero.models.positions import rotary
from zero.partition.layout import LeafLayout
from zero.partition.model_parallel import ExpertParallel
from zero.planning.compile import options_of, step_arguments
from zero.training.batch import next_tokens
from zero.training.flops import model_flops
from zero.training.optimizers.optimizer import decayed

ROWS_SPEC = PartitionSpec(("fsdp", "expert"))  # of activations


class Row(NamedTuple):
    """A step: a size of conf/model_config.yaml, a slice, sequences per device, tokens per sequence.

    A row with experts has a capacity and expert groups of that many devices; `keys` are further keys of conf/.
    """

    size: str
    topology: str
    rows: int
    context: int
    capacity: float | None = None
    expert_shards: int = 1
    tensor_shards: int = 1
    optimizer: str = "adamw"
    keys: tuple[str, ...] = ()


DENSE_LM = Row(
    "dense_lm_137b",
    "v3-128",
    1,
    1024,
    tensor_shards=8,
    optimizer="adafactor",
    keys=("zero.gradient_dtype=bfloat16",),
)
ROWS = {
    f"1.1b-{topology}{more}": Row("1_1b", topology, rows, 1024)
    for topology in ("v3-32", "v4-32", "v5e-16")
    for rows, more in ((4, ""), (16, "-16"))
} | {
    "8b-v5e-16": Row("llama3_8b", "v5e-16", 2, 2048),
    "8b-v6e-8": Row("llama3_8b", "v6e-8", 1, 8192),
    "8b-v4-32": Row("llama3_8b", "v4-32", 2, 2048),
    "mistral-v5e-16": Row("mistral_7b", "v5e-16", 2, 2048),
    "mixtral-v4-64": Row("mixtral_8x7b", "v4-64", 2, 2048, capacity=1.25, expert_shards=8),
    "mixtral-v4-64-1": Row("mixtral_8x7b", "v4-64", 1, 2048, capacity=1.25, expert_shards=8),
    "137b-v3-128": DENSE_LM,
    "137b-v3-128-torus": DENSE_LM._replace(rows=2, tensor_shards=16, keys=(*DENSE_LM.keys, "zero.phases=torus")),
}
# Of a layer's matrices with tensor groups, (layers, in, out), by the name of their module.
TO_PARTS, FROM_PARTS = (None, "fsdp", "tensor"), (None, "tensor", "fsdp")
BY_MODULE = dict.fromkeys(("query", "key", "value", "mlp_in", "mlp_gate"), TO_PARTS)
BY_MODULE |= dict.fromkeys(("attention_out", "mlp_out"), FROM_PARTS)


class PinnedExperts(ExpertParallel):
    """Experts on one dimension of a mesh: GSPMD inserts the all-to-alls between what is pinned."""

    def __init__(self, mesh: Mesh) -> None:
        self.by_row, self.by_expert = (
            NamedSharding(mesh, spec) for spec in (ROWS_SPEC, PartitionSpec("fsdp", "expert"))
        )

    def to_experts(self, x_BECD: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(lax.with_sharding_constraint(x_BECD, self.by_row), self.by_expert)

    def from_experts(self, x_BECD: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(lax.with_sharding_constraint(x_BECD, self.by_expert), self.by_row)


def zero_step(job: Job, row: Row) -> Any:
    return job.programs.step.lower(*step_arguments(job, row.rows, row.context))


def gspmd_step(job: Job, row: Row, size: GPTConfig, devices: list[Any], has_layouts: bool) -> Any:
    """With zero's layouts on TPU (docs/decisions/attention.md), or with those that XLA chooses."""
    mesh = Mesh(np.asarray(devices).reshape(-1, row.expert_shards, row.tensor_shards), ("fsdp", "expert", "tensor"))
    batch = row.rows * len(devices) // row.tensor_shards
    model = GPT(
        size,
        jnp.bfloat16,
        remat="full",
        blockwise_from=job.model.blockwise_from,
        kernel=job.model.kernel,
        expert_group=PinnedExperts(mesh),
        drops=True,
    )
    optimizers = {
        "adamw": optax.adamw(1e-4, b2=0.95, weight_decay=0.1, mask=decayed),
        "adafactor": optax.adafactor(1e-4),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optimizers[row.optimizer])
    by_row, whole = NamedSharding(mesh, ROWS_SPEC), NamedSharding(mesh, PartitionSpec())
    in_parts = {size.mlp_width, size.num_head * size.head_width, size.key_heads * size.head_width}

    def sharding_of(x: jax.Array) -> NamedSharding:
        if row.tensor_shards == 1 or x.ndim != 3:
            return by_row
        return NamedSharding(
            mesh, PartitionSpec(*ROWS_SPEC, *((None, "tensor") if x.shape[2] in in_parts else ("tensor",)))
        )

    def pin(method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        def one(x: Any) -> Any:
            is_activation = isinstance(x, jax.Array) and x.ndim >= 2 and x.shape[0] == batch
            return lax.with_sharding_constraint(x, sharding_of(x)) if is_activation else x

        return jax.tree.map(one, method(*args, **kwargs))

    def attend(kernel: str, *qkv: jax.Array, form: Any, starts_BT: None) -> jax.Array:
        own = partial(kernel_attention, kernel, form=form)
        attended: jax.Array = jax.shard_map(own, mesh=mesh, in_specs=ROWS_SPEC, out_specs=ROWS_SPEC, check_vma=False)(
            *qkv
        )
        return attended

    def turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        specs = ROWS_SPEC, PartitionSpec(), PartitionSpec()  # the angles are the same in all rows
        turned: jax.Array = jax.shard_map(
            fused_rotation, mesh=mesh, in_specs=specs, out_specs=ROWS_SPEC, check_vma=False
        )(x, cos, sin)
        return turned

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        tables = {name: params[name] for name in ("vocabulary", "head") if name in params}
        params = {**params, **lax.with_sharding_constraint(tables, whole)}
        with nn.intercept_methods(pin):
            losses = jnp.asarray(model.apply({"params": params}, tokens, next_tokens(tokens)))
        return losses[:, :-1].mean()

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def sharded(leaf: LeafLayout) -> NamedSharding:
        split = {split.dim for split in leaf.splits if not split.padding}
        names: list[Any] = [mesh.axis_names if dim in split else None for dim in range(len(leaf.shape))]
        module = next((name for name in leaf.path if name in BY_MODULE), None)
        if row.tensor_shards > 1 and module is not None and len(leaf.shape) == 3:
            names = list(BY_MODULE[module])
        if len(leaf.shape) == 4 and "experts" in leaf.path:  # layers, experts, in, out
            names = [None, "expert", "fsdp", None]
        return NamedSharding(mesh, PartitionSpec(*names))

    params = job.model.layout.shapes()
    by_shape = {leaf.shape: sharded(leaf) for leaf in job.model.layout.leaves}
    state = params, jax.eval_shape(tx.init, params)
    shardings = jax.tree.map(lambda x: by_shape.get(x.shape, whole), state)
    self_attention.kernel_attention = attend  # type: ignore[assignment]
    rotary.fused_rotation = turn if has_layouts else rotary.rotate  # type: ignore[assignment]
    mixer.row_major = row_major if has_layouts else lambda x: x
    try:
        compiled = jax.jit(
            step, in_shardings=(shardings, by_row), out_shardings=(shardings, whole), donate_argnums=0
        ).lower(state, jax.ShapeDtypeStruct((batch, row.context), jnp.int32))
    finally:
        self_attention.kernel_attention = kernel_attention
        mixer.row_major = row_major
        rotary.fused_rotation = fused_rotation
    return compiled


def measure(name: str, row: Row, texts: Path | None) -> str:
    """A line of the table."""
    size, devices = replace(load_sizes()[row.size], expert_capacity=row.capacity), find_devices(row.topology)
    keys = [
        f"plan.topology={row.topology}",
        f"model.size={row.size}",
        f"data.max_context={row.context}",
        "zero.stage=3",
        f"zero.expert_shards={row.expert_shards}",
        f"zero.tensor_shards={row.tensor_shards}",
        f"optimizer={row.optimizer}",
        *row.keys,
    ]
    config: Any = typed(composed(["mode=plan", *keys]))
    job = make_job(config, place_model(config, size, devices, row.rows))
    options: dict[str, Any] = dict(options_of(config.zero, devices) or {})
    of_twin = options | {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
    without_vmem = {name: value for name, value in of_twin.items() if name != VMEM}
    options_of_twin = [of_twin] if of_twin == without_vmem else [of_twin, without_vmem]
    ways: dict[str, list[tuple[Callable[[], Any], dict[str, Any]]]] = {
        "zero": [(partial(zero_step, job, row), options)],
        "GSPMD": [
            (partial(gspmd_step, job, row, size, devices, has_layouts), chosen)
            for has_layouts in (True, False)
            for chosen in options_of_twin
        ],
    }
    flops = model_flops(size, row.rows, row.context) / SPEEDS[devices[0].device_kind].flops / row.tensor_shards
    cells, seconds = [], {}
    for program, choices in ways.items():
        fitting = []
        for lower, chosen in choices:
            try:
                fitting.append(measured(lower().compile(chosen), devices))
            except jax.errors.JaxRuntimeError as error:
                needed, available = out_of_memory(error)
        if not fitting:
            cells.append(f"does not fit | | | {needed / 2**30:.2f} of {available / 2**30:.2f}")
            continue
        found, peak, text = min(fitting, key=lambda one: one[0].seconds)
        if texts is not None:
            (texts / f"{name}-{program}.txt").write_text(text)
        seconds[program] = found.seconds
        cells.append(f"{found.seconds:.3f} | {flops / found.seconds:.1%} | {found.exposed_seconds:.3f} | {peak:.2f}")
    ratio = f"{seconds['GSPMD'] / seconds['zero']:.2f}" if len(seconds) == len(ways) else ""
    return f"| {name} | {row.rows} x {row.context:,} | {job.model.remat} | {' | '.join(cells)} | {ratio} |"


def measured(compiled: Any, devices: list[Any]) -> tuple[Prediction, float, str]:
    """The prediction of a program, its peak in GiB, and its text."""
    text = compiled.as_text()
    found = predict(text, devices)
    assert found is not None
    return found, compiled.memory_analysis().peak_memory_in_bytes / 2**30, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--texts", type=Path, help="directory for the texts of compiled programs")
    arguments = parser.parse_args()
    prepare_environment("v3-8")
    columns = "s | MFU | exposed, s | peak, GiB"
    print(f"| row | sequences per device | stored by zero | zero: {columns} | GSPMD: {columns} | GSPMD / zero |")
    print("|" + "---|" * 12, flush=True)
    for name in arguments.rows:
        print(measure(name, ROWS[name], arguments.texts), flush=True)


if __name__ == "__main__":
    main()
