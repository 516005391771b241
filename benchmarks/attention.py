"""Attention block by block against attention with the whole matrix of scores: time and compiled bytes.

    python benchmarks/attention.py [--contexts 512 1024 ...] [--blocks 128 256 512] [--rows 1] [--documents 5]
    python benchmarks/attention.py --context-shards 8 [--contexts 2048 ...]
    python benchmarks/attention.py --topology v3-32 --size 1_1b --contexts 8192 [--forms dense] [--context-shards 8]

First form: forward and backward pass of only one layer's attention, float32 on CPU, 6 heads of 64, with ALiBi: dense,
blockwise, blockwise in a window of 1,024 (local), and that of one vector-quantized unit of a model of the same width
(vq: one head, keys of 128, values of 768, 512 codes, blocks of 512). The programs are compiled first and take turns;
medians of paired ratios are printed. Dense is skipped if it would need more than 4 GiB. With --documents, each also
for rows of that many isolated documents. Second form: the same with 8 heads on virtual devices, each with its own
rows, or all with parts of the same rows, by ring attention or by exchanging heads (Ulysses). Third form:
a whole training step by the TPU compiler, without a TPU: stage 3, bfloat16 compute, one row per core, or per context
group of --context-shards cores, clipping and skipping on.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from zero.costs.hlo import collectives
from zero.models.attention.blockwise import BLOCK, blockwise_attention
from zero.models.attention.dense import dense_attention
from zero.models.attention.kernel import kernel_of
from zero.models.attention.scores import Form, Terms
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gated_unit import Heads, assign_codes, empty_memory
from zero.models.gated_unit import attend as attend_by_codes
from zero.partition.collectives.axis import Axis
from zero.partition.collectives.context_group import ContextGroup, Ulysses
from zero.partition.collectives.ordering import in_order
from zero.partition.virtual_devices import use_cpu_devices

HEADS, HEAD_DIM = 6, 64
WINDOW = 1024
UNIT: dict[str, Any] = {"embedding_dim": HEADS * HEAD_DIM, "vocab_size": 1, "block_size": 1, "dropout": 0.0, "N": 1}
DENSE_LIMIT = 4 * 2**30


def compiled(
    attention: Callable[..., jax.Array], rows: int, context: int, documents: int, window: int = 0
) -> tuple[Any, Any]:
    """Output and gradients of one layer's attention, and arguments."""
    q, k, v, weights = jax.random.normal(jax.random.key(0), (4, rows, context, HEADS, HEAD_DIM))
    starts = None
    if documents:
        length = -(-context // documents)
        starts = jnp.broadcast_to(jnp.arange(context) // length * length, (rows, context))

    form = Form(has_alibi=True, window=window)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array | None) -> jax.Array:
        return (attention(q, k, v, form=form, terms=Terms(starts_BT=starts)) * weights).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(q, k, v, starts).compile(), (q, k, v, starts)


def compiled_vq(rows: int, context: int) -> tuple[Any, Any]:
    """The same of one unit: queries, keys before they are rounded, and values."""
    config = GPTConfig(**UNIT, **FAMILIES["vq"])
    k, v, block = config.key_width, 2 * config.embedding_dim, config.vq_block
    keys = jax.random.split(jax.random.key(0), 4)
    q, key = jax.random.normal(keys[0], (2, rows, context, k))
    values, weights = jax.random.normal(keys[1], (2, rows, context, v))
    sums, r = jax.random.normal(keys[2], (config.codes, k)), jax.random.normal(keys[3], (2 * block, k))

    def loss(q: jax.Array, key: jax.Array, values: jax.Array, sums: jax.Array, r: jax.Array) -> jax.Array:
        rounded, codes = assign_codes(key, jnp.ones(len(sums)), sums)
        heads = Heads(q, q, rounded, codes, values)
        memory = empty_memory(config, (rows,), block, jnp.float32)
        return (attend_by_codes(heads, r, jax.lax.stop_gradient(sums), memory)[0] * weights).sum()

    arguments = (q / k**0.5, key, values, sums, r)
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arguments).compile(), arguments


def measure(rows: int, context: int, blocks: list[int], rounds: int, documents: int) -> Iterator[str]:
    """Rows of the table: a program, the median of its times, its compiled bytes, its time relative to the first."""
    programs = {f"blockwise {block}": partial(blockwise_attention, block=block) for block in blocks}
    programs["local"] = partial(blockwise_attention, block=blocks[0])
    # Measured: three arrays of float32 scores are alive at once.
    if 3 * 4 * rows * HEADS * context**2 <= DENSE_LIMIT:
        programs = {"dense": dense_attention, **programs}  # type: ignore[dict-item]
    ready = {
        name: compiled(attention, rows, context, 0, WINDOW if name == "local" else 0)
        for name, attention in programs.items()
    }
    ready["vq"] = compiled_vq(rows, context)
    if documents:
        for name, attention in programs.items():
            ready[f"{name}, {documents} documents"] = compiled(attention, rows, context, documents)
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds + 1):
        for name, (program, arguments) in ready.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds[name].append(time.perf_counter() - start)
    seconds = {name: times[1:] for name, times in seconds.items()}  # the first warms up
    for name, times in seconds.items():
        held = ready[name][0].memory_analysis().temp_size_in_bytes / 2**20
        ratio = "-"
        if "dense" in seconds:
            ratio = f"{median(mine / dense for mine, dense in zip(times, seconds['dense'], strict=True)):.2f}"
        yield f"| {context:,} | {name} | {1000 * median(times):.1f} | {ratio} | {held:.1f} |"


def measure_cut(rows: int, context: int, rounds: int, shards: int) -> Iterator[str]:
    """Rows of the table: how positions are cut over `shards` devices, each time with `rows` rows per device in all."""
    shape = (shards, rows, context, 8, HEAD_DIM)
    q, k, v, weights = jax.random.normal(jax.random.key(0), (4, *shape))
    group = ContextGroup(Axis("batch", (1, shards), context=shards))
    whole, ring, swap = Form(has_alibi=True), Form(has_alibi=True, row_group=group), Ulysses(group)

    def swapped(*qkv: jax.Array, form: Form) -> jax.Array:
        attended = blockwise_attention(*map(swap.to_heads, qkv), form=form._replace(row_group=swap.row_group))
        return swap.to_positions(attended)

    programs = {
        "own rows": (partial(blockwise_attention, form=whole), shape),
        "ring": (partial(blockwise_attention, form=ring), (shards, shards * rows, context // shards, *shape[3:])),
        "heads swapped": (partial(swapped, form=whole), (shards, shards * rows, context // shards, *shape[3:])),
    }
    ready: dict[str, Any] = {}
    for name, (attend, own_shape) in programs.items():
        arguments = [x.reshape(own_shape) for x in (q, k, v, weights)]

        def run(
            q: jax.Array, k: jax.Array, v: jax.Array, weights: jax.Array, attend: Callable[..., jax.Array] = attend
        ) -> Any:
            return jax.value_and_grad(lambda *qkv: (attend(*qkv) * weights).sum(), (0, 1, 2))(q, k, v)

        program = jax.pmap(in_order(run), axis_name="batch").lower(*arguments).compile()
        ready[name] = program, jax.pmap(lambda *xs: xs)(*arguments)
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds + 1):
        for name, (program, arguments) in ready.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        sent = sum(one.sent for one in collectives(ready[name][0].as_text())) / 2**20
        held = ready[name][0].memory_analysis().temp_size_in_bytes / 2**20
        ratio = median(mine / own for mine, own in zip(times[1:], seconds["own rows"][1:], strict=True))
        yield f"| {context:,} | {name} | {1000 * median(times[1:]):.1f} | {ratio:.2f} | {held:.1f} | {sent:.1f} |"


# By name `blockwise_from`. A kernel is for rotary positions: none of them has ALiBi.
FORMS: dict[str, int | None] = {"blockwise": 2, "dense": None, "kernel": 2}


def plan(
    topology: str, size: str, context: int, documents: int, forms: Sequence[str], context_shards: int, rotary: bool
) -> Iterator[str]:
    """Peak memory of a training step, which would take minutes on a TPU to find out."""
    from zero.costs.topology import find_devices, out_of_memory
    from zero.job.job import Job
    from zero.job.sizes import load_sizes
    from zero.planning.compile import step_arguments
    from zero.training.objectives.objective import LIKELIHOOD
    from zero.training.optimizers.optimizer import adamw
    from zero.training.parts import StepOptions
    from zero.training.programs import make_programs
    from zero.training.sharded_gpt import ShardedGPT
    from zero.training.state_storage import OnDevices
    from zero.training.step import state_layout

    devices = find_devices(topology)
    config: GPTConfig = dataclasses.replace(load_sizes()[size], block_size=context)
    if rotary:
        config = dataclasses.replace(config, alibi_attn=False, positions="rotary")
    kinds: list[tuple[str, int | None, int | None]] = [(name, FORMS[name], None) for name in forms]
    if config.layer == "gated_units":
        kinds = [("vq", None, None)]
    if documents:
        kinds += [(f"{name}, documents", blockwise_from, 0) for name, blockwise_from, _ in kinds]
    for name, blockwise_from, end_of_text in kinds:
        axis = Axis("zero", (1, len(devices)), context=context_shards)
        options: dict[str, Any] = {"blockwise_from": blockwise_from, "end_of_text": end_of_text}
        if name.startswith("kernel"):
            options["kernel"] = kernel_of("tpu", devices[0].device_kind)
        model = ShardedGPT(config, axis, 3, "bfloat16", **options)
        tx = adamw(0.1, axes=model.axes)
        step_options = StepOptions(lambda step: 1e-4 + 0 * step, max_gradient_norm=1.0)
        programs = make_programs(model, tx, step_options, devices)
        layout = state_layout(model, tx)
        job = Job(model, tx, programs, layout, LIKELIHOOD, layout.bytes_per_device(), OnDevices(layout, axis), {}, 1)
        start = time.perf_counter()
        try:
            program = programs.step.lower(*step_arguments(job, 1, context)).compile()
            analysis: Any = program.memory_analysis()
            peak = f"{analysis.peak_memory_in_bytes / 2**30:.2f}"
            sent = f"{sum(one.sent for one in collectives(program.as_text())) / 1e9:.1f}"
        except jax.errors.JaxRuntimeError as error:
            peak, sent = f"does not fit: {out_of_memory(error)[0] / 2**30:.2f}", "-"
        yield f"| {context:,} | {name} | {context_shards} | {peak} | {sent} | {time.perf_counter() - start:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--blocks", type=int, nargs="+", default=[BLOCK])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--documents", type=int, default=0, help="per row, kept apart")
    parser.add_argument("--topology", help="compile a training step for this slice instead, such as v3-32")
    parser.add_argument(
        "--forms", choices=tuple(FORMS), nargs="+", default=["blockwise", "dense"], help="with --topology"
    )
    parser.add_argument("--context-shards", type=int, default=1, help="devices of a context group")
    parser.add_argument("--rotary", action="store_true", help="positions in place of the size's own, with --topology")
    parser.add_argument(
        "--size", default="1_1b", help="an entry of conf/model_config.yaml or conf/models, with --topology"
    )
    arguments = parser.parse_args()
    if arguments.topology:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        print("| context | attention | context shards | peak, GiB per core | GB sent per core | seconds to compile |")
        print("|---|---|---|---|---|---|")
        for context in arguments.contexts:
            options = (arguments.documents, arguments.forms, arguments.context_shards, arguments.rotary)
            for row in plan(arguments.topology, arguments.size, context, *options):
                print(row, flush=True)
        return
    if arguments.context_shards > 1:
        use_cpu_devices(arguments.context_shards)
        print("| context | positions | ms | relative to own rows | MiB of temporaries | MiB sent |")
        print("|---|---|---|---|---|---|")
        for context in arguments.contexts:
            for row in measure_cut(arguments.rows, context, arguments.rounds, arguments.context_shards):
                print(row, flush=True)
        return
    print(f"{arguments.rows} rows, {jax.device_count()} CPU device on {os.cpu_count()} cores\n")
    print("| context | attention | ms | relative to dense | MiB of temporaries |\n|---|---|---|---|---|")
    for context in arguments.contexts:
        for row in measure(arguments.rows, context, arguments.blocks, arguments.rounds, arguments.documents):
            print(row, flush=True)


if __name__ == "__main__":
    main()
