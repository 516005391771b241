"""`mode=plan`: what a step needs and moves, asked of the compiler before anything is rented (tqdm)."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from zero.models.gpt import STACKED, GPTConfig
from zero.partition.memory import memory
from zero.runtime.build import Job, make_job
from zero.runtime.config.configuration import Config
from zero.runtime.errors import UserError
from zero.runtime.planning.hlo import collective_bytes
from zero.runtime.planning.topology import (
    GIB,
    SPEEDS,
    available_bytes,
    find_devices,
    out_of_memory,
    prepare_environment,
)
from zero.training.flops import matmul_flops
from zero.training.step import Batch

log = logging.getLogger(__name__)

PLAN_FILE = "plan.json"
COMPILER_LOG = "compiler.log"
HEADROOM = 0.05  # of the memory, which a search leaves for what a program does not know of
WIDTHS = (2048, 3072, 4096, 6144, 8192)  # of the models that a search for the largest tries, with heads of 256


@dataclass(frozen=True)
class Request:
    """A step to compile: a checked configuration on a slice.

    Attributes:
      config: its `training` and `zero` parts are those of the step; `data.max_context` is the context.
      size: the model.
      micro_batch: sequences a device and micro-batch.
    """

    config: Config
    size: GPTConfig
    micro_batch: int

    def but(self, micro_batch: int | None = None, **keys: Any) -> Request:
        """The same with other values: of `stage`, `remat`, `accumulation`, `context`."""
        config = copy.deepcopy(self.config)
        for key, value in keys.items():
            match key:
                case "accumulation":
                    config.training.gradient_accumulation_steps = value
                case "context":
                    config.data.max_context = value
                case _:
                    setattr(config.zero, key, value)
        return replace(self, config=config, micro_batch=micro_batch or self.micro_batch)


def plan(config: Config, size: GPTConfig, run_directory: Path) -> int:
    """Prints what a step needs on `plan.topology`, and writes it to plan.json beside what the compiler said.

    Returns:
      The exit status, 0.

    Raises:
      UserError: there is no such slice, or no compiler for it.
    """
    prepare_environment(config.plan.topology)
    is_largest = config.plan.search and bool(config.plan.largest)
    # Fresh processes: each starts jax for the topology, and a compiler that dies takes no other plan with it.
    pool = ProcessPoolExecutor(
        config.plan.processes or min(os.cpu_count() or 1, 4),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(str(run_directory / COMPILER_LOG), config.plan.topology, config.distributed.cpu_devices),
    )
    with pool:
        if is_largest:
            rows = _largest(pool, config)
        elif config.plan.search:
            rows = _search(pool, Request(config, size, config.plan.micro_batch))
        else:
            stages = [3] if config.zero.fused_update else [0, 1, 2, 3]
            requests = [Request(config, size, config.plan.micro_batch).but(stage=stage) for stage in stages]
            rows = _gather(pool.submit(compile_steps, [request]) for request in requests)
    if not rows:
        raise UserError(f"plan.topology={config.plan.topology}: not even the smallest model fits")
    headroom = 0.0 if is_largest else HEADROOM
    best = _best(rows, headroom) if config.plan.search else None
    result = {
        "topology": config.plan.topology,
        "devices": rows[0]["devices"],
        "parameters": (best or rows[0])["parameters"],
        "best": best and rows.index(best),
        "rows": rows,
    }
    (run_directory / PLAN_FILE).write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    if best is not None and is_largest:
        print(f"\nThe largest that fits, as an entry of conf/model_config.yaml: {best['model']}")
    elif best is not None:
        print(f"\nThe fastest that fits, with {HEADROOM:.0%} of the memory to spare:\n{_command(best, config)}")
    print(f"\n{run_directory / PLAN_FILE}")
    return 0


def _start(compiler_log: str, topology: str, cpu_devices: int) -> None:
    """Of a process that compiles: what libtpu writes to stderr goes to a file."""
    descriptor = os.open(compiler_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    if topology in ("local", "cpu"):
        jax.config.update("jax_num_cpu_devices", cpu_devices)


def compile_steps(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """One row for each request, up to the first that does not fit: of the others each needs more."""
    rows: list[dict[str, Any]] = []
    for request in requests:
        rows.append(compile_step(request))
        if not rows[-1]["fits"]:
            break
    return rows


def compile_step(request: Request) -> dict[str, Any]:
    """Compiles the step that training runs, and says what it needs; bytes, operations and seconds a device and step."""
    config, training, zero = request.config, request.config.training, request.config.zero
    devices = find_devices(config.plan.topology)
    job = make_job(config, request.size, devices)
    arguments = step_arguments(job, request.micro_batch * training.gradient_accumulation_steps, config.data.max_context)
    state = job.layout
    available = available_bytes(devices)
    flops = matmul_flops(jax.make_jaxpr(job.programs.step)(*arguments).jaxpr)
    started = time.monotonic()
    moved: dict[str, int] | None = None
    try:
        compiled = job.programs.step.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        peak, available = out_of_memory(error)
    else:
        peak = _peak(compiled.memory_analysis(), devices[0].platform)
        moved = collective_bytes(compiled.as_text())
    seconds = time.monotonic() - started

    sharded = job.model.sharded_layout
    formula = memory(
        sharded.shapes(),
        job.tx,
        sharded.shards,
        stacked=STACKED,
        compute_dtypes=[job.model.compute_dtype],
    ).rows[zero.stage]
    gradients = formula.gradients
    if zero.stage >= 2:
        gradients = 0 if zero.fused_update else gradients * jnp.dtype(zero.gradient_dtype).itemsize // 4
    speed = SPEEDS.get(devices[0].device_kind)
    bound = None
    if speed is not None:
        sent = sum((moved or {}).values())
        held = 2 * state.bytes_per_device()  # read and written once
        bound = max(flops / speed.flops, held / speed.memory, sent / speed.network)
    rows_a_device = request.micro_batch * training.gradient_accumulation_steps
    return {
        "devices": len(devices),
        "hosts": len({device.process_index for device in devices}),
        "parameters": sum(math.prod(leaf.shape) for leaf in sharded.leaves),
        "model": dataclasses.asdict(request.size),
        "stage": zero.stage,
        "micro_batch": request.micro_batch,
        "accumulation": training.gradient_accumulation_steps,
        "remat": job.model.remat,
        "context": config.data.max_context,
        "compute_dtype": jnp.dtype(job.model.compute_dtype).name,
        "gradient_dtype": zero.gradient_dtype,
        "clipping": training.max_gradient_norm is not None,
        "skipping": training.skip_bad_steps,
        "fused_update": zero.fused_update,
        "fits": peak <= available and moved is not None,
        "state_bytes": state.bytes_per_device(),
        "gradient_bytes": gradients,
        "gathered_bytes": formula.gathered,
        "peak_bytes": peak,
        "available_bytes": available,
        "collective_bytes": moved,
        "flops": flops,
        "seconds_lower_bound": bound,
        "tokens": len(devices) * rows_a_device * config.data.max_context,
        "compile_seconds": seconds,
    }


def _peak(analysis: Any, platform: str) -> int:
    if platform == "tpu":
        return analysis.peak_memory_in_bytes
    # Other compilers leave temporaries out of their peak; the sum is an upper bound.
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return held + analysis.temp_size_in_bytes


def step_arguments(job: Job, rows: int, context: int) -> Any:
    """Shapes of what the step takes on all devices, for `rows` sequences a device."""
    state = job.layout.shard_shapes()
    batch = jax.eval_shape(lambda: Batch(jnp.zeros((rows, context), jnp.int32), jnp.int32(0)))
    size = job.model.axis.size
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), (state, batch))


def _gather(jobs: Iterable[Future[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """All rows in the order of the jobs; a bar shows how many are done."""
    jobs = list(jobs)
    for _ in tqdm(as_completed(jobs), total=len(jobs), unit="plan", dynamic_ncols=True):
        pass
    return [row for job in jobs for row in job.result()]


def _search(pool: ProcessPoolExecutor, request: Request) -> list[dict[str, Any]]:
    grid, jobs = request.config.plan.grid, []
    contexts = grid.context or [request.config.data.max_context]
    for stage, accumulation, remat, context in itertools.product(grid.stage, grid.accumulation, grid.remat, contexts):
        other = request.but(stage=stage, accumulation=accumulation, remat=remat, context=context)
        jobs.append(pool.submit(compile_steps, [other.but(micro_batch) for micro_batch in sorted(grid.micro_batch)]))
    return _gather(jobs)


def _largest(pool: ProcessPoolExecutor, config: Config) -> list[dict[str, Any]]:
    context = max(config.plan.grid.context or [1024])
    sizes = (GPTConfig(width, 50304, width // 256, context, 0.0, 4, vocab_chunks=12) for width in WIDTHS)
    requests = (Request(config, size, config.plan.micro_batch).but(context=context) for size in sizes)
    return _gather([pool.submit(deepest, request) for request in requests])


def deepest(request: Request) -> list[dict[str, Any]]:
    """The row of the deepest model of this width that fits, if any does.

    Memory is all but linear in the number of layers. Two programs give the line, a third is where it ends, and from
    there it is a few steps at most.
    """
    tried: dict[int, dict[str, Any]] = {}

    def try_layers(layers: int) -> dict[str, Any]:
        if layers not in tried:
            tried[layers] = compile_step(replace(request, size=replace(request.size, N=layers)))
        return tried[layers]

    low, high = try_layers(4), try_layers(8)
    if not low["fits"]:
        return []
    a_layer = (high["peak_bytes"] - low["peak_bytes"]) / 4
    layers = 4 + int((low["available_bytes"] - low["peak_bytes"]) / a_layer)
    while not try_layers(layers)["fits"]:
        layers -= 1
    while layers + 1 not in tried and try_layers(layers + 1)["fits"]:
        layers += 1
    return [tried[layers]]


def _best(rows: list[dict[str, Any]], headroom: float) -> dict[str, Any] | None:
    """Of those that fit with headroom the one of the most parameters, then the fastest by the roofline."""
    fitting = [row for row in rows if row["fits"] and row["peak_bytes"] <= (1 - headroom) * row["available_bytes"]]

    def value(row: dict[str, Any]) -> tuple[float, ...]:
        seconds = row["seconds_lower_bound"] or 1.0
        return row["parameters"], row["tokens"] / seconds, -row["peak_bytes"]

    return max(fitting, key=value, default=None)


def table(result: dict[str, Any]) -> str:
    """What `plan` prints: a line a row, sizes in GiB a device, times and traffic a step."""
    cells = [[*_COLUMNS, ""]]
    for i, row in enumerate(result["rows"]):
        spare = (row["available_bytes"] - row["peak_bytes"]) / GIB
        verdict = f"fits, {spare:.2f} to spare" if row["fits"] else f"does not fit by {-spare:.2f}"
        mark = " <- best" if i == result["best"] else ""
        cells.append([*(show(row) for show in _COLUMNS.values()), verdict + mark])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(line[:-1], widths, strict=False)) for line in cells]
    head = (
        f"{result['topology']}: {result['devices']} devices of {result['rows'][0]['available_bytes'] / GIB:.2f} GiB; "
        f"{result['parameters']:,} parameters"
    )
    legend = "GiB a device; GB that a device sends, TFLOP that it computes a step; a step takes at least this long"
    return "\n".join([head, *(f"{line}  {cell[-1]}".rstrip() for line, cell in zip(lines, cells, strict=True)), legend])


def _gib(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key] / GIB:.3f}"


def _rest(row: dict[str, Any]) -> str:
    if not row["fits"]:
        return "-"
    named = sum(row[f"{name}_bytes"] for name in ("state", "gradient", "gathered"))
    return f"{(row['peak_bytes'] - named) / GIB:.3f}"


def _traffic(row: dict[str, Any]) -> str:
    kinds = row["collective_bytes"]
    return "-" if kinds is None else " ".join(f"{kind} {n / 1e9:.2f}" for kind, n in sorted(kinds.items()) if n > 1e6)


def _bound(row: dict[str, Any]) -> str:
    return "-" if row["seconds_lower_bound"] is None else f"{row['seconds_lower_bound']:.3f} s"


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "stage": lambda row: str(row["stage"]),
    "rows x steps": lambda row: f"{row['micro_batch']} x {row['accumulation']}",
    "context": lambda row: str(row["context"]),
    "remat": lambda row: row["remat"] + (", fused" if row["fused_update"] else ""),
    "parameters": lambda row: f"{row['parameters'] / 1e9:.3f}B",
    "state": _gib("state_bytes"),
    "gradients": _gib("gradient_bytes"),
    "gathered": _gib("gathered_bytes"),
    "activations": _rest,
    "peak": _gib("peak_bytes"),
    "traffic": _traffic,
    "TFLOP": lambda row: f"{row['flops'] / 1e12:.2f}",
    "at least": _bound,
    "tokens": lambda row: f"{row['tokens']:,}",
    "compiled in": lambda row: f"{row['compile_seconds']:.0f} s",
}


def _command(row: dict[str, Any], config: Config) -> str:
    """The command line that trains what a row has planned."""
    rows_a_host = row["micro_batch"] * row["accumulation"] * row["devices"] // row["hosts"]
    keys = {
        "model.size": config.model.size,
        "data.max_context": row["context"],
        "training.batch_size": rows_a_host,
        "training.gradient_accumulation_steps": row["accumulation"],
        "zero.stage": row["stage"],
        "zero.remat": row["remat"],
        "zero.gradient_dtype": row["gradient_dtype"],
    }
    return "python main_zero.py " + " ".join(f"{key}={value}" for key, value in keys.items())
