"""Compiles the programs of a training run for a slice that need not exist, and reads their costs."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zero.costs import formula
from zero.costs.compiler import Compiler, KeptProgram, compiler_options
from zero.costs.hlo import Collective, across_hosts, bytes_by_kind, computations, hidden_share
from zero.costs.holders import holders_of
from zero.costs.live_arrays import read_live_arrays
from zero.costs.plan_page import page
from zero.costs.planned_program import PlannedProgram
from zero.costs.predict import Prediction
from zero.costs.rates import RATES
from zero.costs.source_lines import SourceLines
from zero.costs.topology import available_bytes, find_devices, out_of_memory, slices_of
from zero.hosts.speeds import GIB, SPEEDS, Speed, host_memory
from zero.hosts.xla_options import without_groups
from zero.inference.generate import bucket
from zero.job.devices import DeviceKeys, chips_of_slice
from zero.job.job import Job, make_job, place_model
from zero.job.step_costs import StepCosts, compile_programs, costs_of, device_peak, traced
from zero.partition.layout import make_grouped_layout
from zero.partition.memory import memory_of
from zero.planning.config import Plan, Request
from zero.training.activations import activation_bytes, forward_bytes, host_bytes, kinds_on_host
from zero.training.batch import Batch
from zero.training.flops import flops_by_operands, model_flops
from zero.training.programs import Inference, make_inference

Row = dict[str, Any]  # of plan.json
# Keys of section `zero` that are also columns of a row: how state and sequences are placed on the devices.
PLACEMENT_KEYS = ("tensor_shards", "context_shards", "expert_shards", "replicas", "phases", "overlap_gathers")
# Bytes and seconds per step on the link between a device and its host, named as in `Prediction`.
LINK_KEYS = ("host_link_bytes", "host_link_seconds", "host_exposed_seconds")
# Of a device's memory: programs between two steps are compiled if they take more by a formula, which is at most 1.4 %
# below the compiler's peaks (benchmarks/measured/planning.md).
TIGHT = 0.9
# Of a device's memory: the compiler refuses a program before it writes a schedule, unless only its machine code does
# not fit, which takes a quarter of a percent (benchmarks/measured/planning.md).
DECIDED = 0.98
SCHEDULE = "schedule_page"  # of a row: goes to a file of its own
PAUSES = ("evaluation", "sampling", "statistics")  # programs that run between two steps


def job_of(request: Request, devices: list[Any]) -> Job:
    """The job of a request on these devices. Nothing is compiled yet."""
    return make_job(request.config, place_model(request.config, request.size, devices, request.rows))


def compiler_of(request: Request, devices: list[Any]) -> Compiler:
    """The compiler of a request's programs, which are kept in `distributed.compilation_cache`."""
    directory = request.config.distributed.compilation_cache
    kept = None if directory is None else Path(directory).expanduser() / "plans"
    return Compiler(devices, options_of(request.config.zero, devices), kept)


def options_of(zero: DeviceKeys, devices: list[Any]) -> dict[str, Any] | None:
    """The compiler options that a training run sets for its process; None if the devices are no TPUs."""
    options = compiler_options(devices, zero.overlap_gathers)
    if options is None or not zero.overlap_gathers or zero.in_groups:
        return options
    return {**options, **without_groups(devices[0].device_kind, chips_of_slice(devices))}


def outline(request: Request) -> Row:
    """The columns of a row before compilation: tokens per step, and a lower bound on the seconds."""
    devices = find_devices(request.config.plan.topology)
    job = job_of(request, devices)
    arguments = step_arguments(job, request.rows, row_tokens(request))
    bound = _operations(request, job, arguments, [], devices)["seconds_lower_bound"]
    peak = bytes_by_formula(request, job)["peak_bytes"]
    return {"tokens": _tokens(request, job), "seconds": None, "seconds_lower_bound": bound, "peak_bytes": peak}


def peak_by_formula(request: Request) -> int:
    """Bytes per device at the peak of a step, as estimated without compiling it."""
    job = job_of(request, find_devices(request.config.plan.topology))
    return bytes_by_formula(request, job)["peak_bytes"]


def bytes_by_formula(request: Request, job: Job) -> dict[str, int]:
    """Bytes per device: gathered weights and gradients, exactly, and the peak with an estimate of the activations."""
    model = job.model
    zero = request.config.zero
    sharded = model.base.sharded_layout
    in_groups = make_grouped_layout(sharded.shapes(), sharded.shards, **model.base.layout_options)
    by_stage = memory_of(in_groups, job.tx, [model.compute_dtype]).rows[zero.stage]
    gradients = by_stage.gradients
    if model.tuning is not None or zero.stage >= 2:
        trained = sum(math.prod(leaf.shard_shape) for leaf in model.sharded_layout.leaves)
        gradients = 0 if zero.fused_update else trained * jnp.dtype(zero.gradient_dtype).itemsize
    rows = request.rows // request.config.training.gradient_accumulation_steps
    activations = activation_bytes(model, rows, request.config.data.max_context)
    peak = job.state_bytes + by_stage.gathered + gradients + activations + job.storage.moving_bytes
    return {"gathered_bytes": by_stage.gathered, "gradient_bytes": gradients, "peak_bytes": peak}


def compile_step(request: Request) -> Row:
    """The costs of a training run: bytes and operations per device, operations, traffic and seconds per step.

    Compiles the step and, if that fits, the evaluation, the sampling and the statistics between steps.
    """
    config = request.config
    training = request.config.training
    zero = request.config.zero
    devices = find_devices(config.plan.topology)
    job = job_of(request, devices)
    model = job.model
    sharded = job.model.base.sharded_layout
    state_bytes = job.state_bytes
    available = available_bytes(devices)
    arguments = step_arguments(job, request.rows, row_tokens(request))
    started = time.monotonic()
    sent: list[Collective] | None = None  # of a step that fits
    sent_between: float | None = None  # bytes from a device to other slices
    predicted: Prediction | None = None
    from_schedule = False
    on_host: int | None = None  # bytes of one device
    most_on_host: int | None = None  # likewise, if the compiler refused a step that needs more
    peaks: dict[str, int | None] = dict.fromkeys(PAUSES)
    schedule: str | None = None  # a page
    by_formula = bytes_by_formula(request, job)
    compiler = compiler_of(request, devices)
    is_estimate = isinstance(devices[0], formula.Gpu)
    if is_estimate:
        rows = request.rows // training.gradient_accumulation_steps
        on_host = host_bytes(model, rows, config.data.max_context) + job.storage.host_bytes
        peak = by_formula["peak_bytes"]
        sent = []
        for jaxpr, times in traced(job.programs.step, arguments):
            sent += times * list(formula.collectives_of(jaxpr, len(devices)))
    elif state_bytes > available:  # the step needs more than this, and is not compiled
        peak = state_bytes
    else:
        try:
            compiled = compiled_unless_decided(compiler, config.plan.exact, available, job.programs.step, *arguments)
        except jax.errors.JaxRuntimeError as error:
            refused = refused_on_host(error)
            if refused is None:
                peak, available = out_of_memory(error)
            else:
                peak = by_formula["peak_bytes"]
                on_host, most_on_host = refused
        else:
            costs = costs_of(compiled, job.storage, state_bytes, devices, available)
            peak = costs.peak
            on_host = costs.host_bytes
            sent = costs.sent
            sent_between = costs.sent_between
            predicted = costs.predicted
            from_schedule = not getattr(compiled, "is_whole", True)
            if config.plan.search == "none" and isinstance(compiled, KeptProgram):
                schedule = schedule_page(request, compiled, costs, available)
            if peak <= available:
                between = (
                    state_bytes
                    + by_formula["gathered_bytes"]
                    + forward_bytes(model, request.rows, config.data.max_context)
                )
                is_tight = between > TIGHT * available
                peaks |= _pause_peaks(request, job, compiler, arguments, peak, available, is_tight=is_tight)
    seconds = time.monotonic() - started

    parameters = sum(math.prod(leaf.shape) for leaf in sharded.leaves)
    hosts = len({device.process_index for device in devices})
    one_host_bytes = None if on_host is None else on_host * len(devices) // hosts
    host_available = host_memory(devices)
    if most_on_host is not None:
        host_available = most_on_host * len(devices) // hosts
    fits_host = one_host_bytes is None or host_available is None or one_host_bytes <= host_available
    # The state without padding and copies.
    logical = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in job.layout.leaves)
    row = {
        "devices": len(devices),
        "hosts": hosts,
        "slices": slices_of(devices),
        "parameters": parameters,
        "model": asdict(request.size),
        "stage": zero.stage,
        "micro_batch": request.micro_batch,
        "accumulation": training.gradient_accumulation_steps,
        "remat": model.remat,
        "offload": zero.offload,
        "on_host": list(kinds_on_host(model)),
        "chunks_at_once": model.chunks_at_once,
        "context": config.data.max_context,
        "compute_dtype": jnp.dtype(model.compute_dtype).name,
        "product_dtype": zero.product_dtype,
        "gradient_dtype": zero.gradient_dtype,
        "master_dtype": zero.master_dtype,
        "state_dtype": config.optimizer.state_dtype,
        "clipping": training.max_gradient_norm is not None,
        "skipping": training.skips_bad_steps,
        "fused_update": zero.fused_update,
        **{key: getattr(zero, key) for key in PLACEMENT_KEYS},
        "replicas": zero.replicas or slices_of(devices),
        "grid": list(model.axis.shape),
        "placements": job.placements,
        "fits": sent is not None and max([peak, *filter(None, peaks.values())]) <= available and fits_host,
        "state_bytes": state_bytes,
        "state_bytes_per_parameter": logical / parameters,
        "gradient_bytes": by_formula["gradient_bytes"],
        "gathered_bytes": by_formula["gathered_bytes"],
        "peak_bytes": peak,
        **{f"{name}_peak_bytes": n for name, n in peaks.items()},
        "available_bytes": available,
        "host_bytes": on_host,
        "bytes_of_one_host": one_host_bytes,
        "host_available_bytes": host_available,
        **_traffic(sent, devices),
        "bytes_between_slices": sent_between,
        **_operations(request, job, arguments, sent or [], devices),
        "tokens": _tokens(request, job),
        "compile_seconds": seconds,
        "is_estimate": is_estimate,
        "from_schedule": from_schedule,
        SCHEDULE: schedule,
    }
    if is_estimate:
        row["gathers_hidden"] = None
    return row | time_and_cost(config.plan, row, predicted, SPEEDS.get(devices[0].device_kind))


def refused_on_host(error: Exception) -> tuple[int, int] | None:
    """Bytes that a device's program needs in the memory of its host, and the most that the TPU compiler accepts.

    None if the error has another cause.

    >>> refused_on_host(RuntimeError("Ran out of memory in memory space host. Used 133.50G of 128.00G host."))
    (143344533504, 137438953472)
    >>> refused_on_host(RuntimeError("Used 1.50T of 128.00G host."))
    (1649267441664, 137438953472)
    """
    found = re.search(r"Used ([\d.]+)([GT]) of ([\d.]+)([GT]) host", str(error))
    if found is None:
        return None
    units = {"G": GIB, "T": 1024 * GIB}
    return int(float(found[1]) * units[found[2]]), int(float(found[3]) * units[found[4]])


def schedule_page(request: Request, compiled: KeptProgram, costs: StepCosts, available: int) -> str | None:
    """The page of a step of one program on a time axis; None if the compiler gives it no time."""
    if costs.predicted is None or costs.predicted.timeline is None:
        return None
    bodies, _ = computations(compiled.text)
    live = read_live_arrays(compiled.buffers, compiled.live_ranges, bodies)
    program = PlannedProgram("step", costs.predicted.timeline, SourceLines(compiled.text), live, costs.peak)
    title = f"Step of {request.config.model.size} on {request.config.plan.topology}"
    peak = f"peak {costs.peak / GIB:.2f} of {available / GIB:.2f} GiB per device"
    step = f"step {costs.predicted.seconds:#.4g} s, {costs.predicted.exposed_seconds:#.3g} s waiting for other devices"
    holders = [(holder.name, holder.bytes) for holder in holders_of(compiled, ())]
    return page(title, [peak, step], [(program, 1)], holders, available)


def compiled_unless_decided(compiler: Compiler, exact: bool, available: int, program: Any, *arguments: Any) -> Any:
    """A program as its compiler has scheduled it, or the whole one if its machine code may not fit beside arrays."""
    if exact or compiler.devices[0].device_kind not in RATES:
        return compile_programs(compiler, program, *arguments)
    compiled = compile_programs(compiler, program, *arguments, whole=False)
    is_scheduled = isinstance(compiled, KeptProgram) and not compiled.is_whole
    if is_scheduled and compiled.memory.peak_memory_in_bytes > DECIDED * available:
        return compile_programs(compiler, program, *arguments)
    return compiled


def _tokens(request: Request, job: Job) -> int:
    """Tokens of all devices in one step."""
    axis = job.model.axis
    return axis.size // axis.row_group * request.rows * request.config.data.max_context


def _bytes(shapes: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def highest_peak(row: Row) -> int:
    """The highest peak per device in bytes, in a step or in a program between two steps."""
    peaks = [row["peak_bytes"]]
    for name in PAUSES:
        if row[f"{name}_peak_bytes"] is not None:
            peaks.append(row[f"{name}_peak_bytes"])
    return max(peaks)


def row_tokens(request: Request) -> int:
    """Tokens per row: one more than positions if it contains the target of the last one."""
    data = request.config.data
    return data.max_context + bool(data.last_target)


def step_arguments(job: Job, rows: int, context: int) -> Any:
    """Shapes of the step's arguments on all devices, for `rows` sequences of `context` tokens per device."""
    state = job.storage.shapes()
    batch = jax.eval_shape(lambda: Batch(jnp.zeros((rows, context), jnp.int32), jnp.int32(0)))
    batch = batch._replace(extra=job.objective.extra(rows, context - job.model.last_target))
    return _on_devices((state, batch, job.model.frozen_shapes()), job)


def evaluation_arguments(job: Job, request: Request) -> Any:
    """Shapes of the arguments of an evaluation during training on all devices, in one call."""
    context = row_tokens(request)
    tokens = jax.ShapeDtypeStruct((request.rows, context), jnp.int32)
    extra = job.objective.extra(request.rows, context - job.model.last_target)
    return _on_devices((job.model.weight_shapes(), tokens, extra), job)


def sampling_arguments(job: Job, inference: Inference, count: int) -> tuple[Any, ...]:
    """Shapes of the arguments that extend one text per device, starting from one token, by `count` tokens."""
    text = jax.ShapeDtypeStruct((1, bucket(1 + count)), jnp.int32)
    length = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))[None])
    params, text, length, key = _on_devices((job.model.weight_shapes(), text, length, key), job)
    state = inference.prefill.lower(params, text, length, bucket(1)).out_info
    return params, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), key, count


def _on_devices(shapes: Any, job: Job) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((job.model.axis.size, *x.shape), x.dtype), shapes)


def _pause_peaks(
    request: Request, job: Job, compiler: Compiler, step_arguments: Any, step_peak: int, available: int, is_tight: bool
) -> dict[str, int | None]:
    """Peaks of the programs that this run has between two steps, plus the part of the state that they do not take.

    Statistics need a copy of the trained weights, which also exists during the step before them. Evaluation and
    sampling compute parts of a forward pass beside the state, and need less than the step unless they have more rows
    than a micro-batch, so they are only compiled if memory is tight beside them.
    """
    state_bytes = job.state_bytes
    devices = compiler.devices

    def peak(program: Any, *arguments: Any, taken: int) -> int:
        rest = state_bytes - taken
        try:
            compiled = compiled_unless_decided(
                compiler, request.config.plan.exact, available - rest, program, *arguments
            )
            return rest + device_peak(compiled.memory_analysis(), devices[0].platform)
        except jax.errors.JaxRuntimeError as error:
            return rest + out_of_memory(error)[0]

    weight_bytes = _bytes(job.model.weight_shapes())
    peaks: dict[str, int | None] = {}
    if is_tight:
        peaks["evaluation"] = peak(job.programs.evaluate, *evaluation_arguments(job, request), taken=weight_bytes)
    sample_tokens = request.config.training.sample_tokens
    if sample_tokens and is_tight:
        inference = make_inference(job.model, devices=devices)
        arguments = sampling_arguments(job, inference, sample_tokens)
        peaks["sampling"] = peak(inference.extend, *arguments, taken=weight_bytes)
    if request.config.statistics.every is not None:
        state = job.storage.shapes()._replace(opt_state=())  # which is not read
        before = job.model.weights(state.params, state.averages)
        arguments = (_on_devices(before, job), _on_devices(state, job), *step_arguments[1:])
        after = peak(job.programs.statistics, *arguments, taken=state_bytes - job.storage.device_bytes + _bytes(state))
        peaks["statistics"] = max(step_peak + _bytes(before), after)
    return peaks


def _traffic(sent: list[Collective] | None, devices: list[Any]) -> Row:
    if sent is None:
        return dict.fromkeys(("collective_bytes", "collective_bytes_across_hosts", "gathers_hidden"))
    across = across_hosts(sent, [device.process_index for device in devices])
    return {
        "collective_bytes": bytes_by_kind(sent),
        "collective_bytes_across_hosts": sum(collective.sent for collective in across),
        "gathers_hidden": hidden_share(sent),
    }


def _operations(request: Request, job: Job, arguments: Any, sent: list[Collective], devices: list[Any]) -> Row:
    """Operations of a step, and a lower bound on its time from published peaks."""
    flops: Counter[Any] = Counter()
    for jaxpr, times in traced(job.programs.step, arguments):
        for operands, count in flops_by_operands(jaxpr).items():
            flops[operands] += times * count
    frozen = job.model.tuning is not None
    group_flops = model_flops(request.size, request.rows, request.config.data.max_context, frozen=frozen)
    speed = SPEEDS.get(devices[0].device_kind)
    bound = None
    if speed is not None:
        total = sum(collective.sent for collective in sent)
        alone = sum(collective.sent for collective in sent if not collective.is_hidden)
        touched = 2 * job.state_bytes  # read and written once
        products = sum(count / speed.products(operands) for operands, count in flops.items())
        bound = max(products + alone / speed.network, touched / speed.memory, total / speed.network)
        if not isinstance(devices[0], formula.Gpu):
            bound = max(bound, job.storage.host_bytes / (speed.host / speed.devices))
    return {
        "flops": flops.total(),
        "model_flops": group_flops // job.model.axis.row_group,
        "seconds_lower_bound": bound,
    }


def time_and_cost(plan: Plan, row: Row, predicted: Prediction | None, speed: Speed | None) -> Row:
    """Speed, days and price from the predicted time of a step or, without one, from the lower bound on it."""
    names = ("seconds", "tokens_per_second", "mfu", "exposed_bytes", "exposed_seconds", "breakdown")
    costs: Row = dict.fromkeys((*names, *LINK_KEYS))
    step_seconds = row["seconds_lower_bound"]
    if predicted is not None:
        step_seconds = predicted.seconds
        costs["seconds"] = predicted.seconds
        costs["tokens_per_second"] = row["tokens"] / predicted.seconds
        if speed is not None:
            costs["mfu"] = row["model_flops"] / (predicted.seconds * speed.flops)
        costs["exposed_bytes"] = predicted.exposed_bytes
        costs["exposed_seconds"] = predicted.exposed_seconds
        costs |= {key: getattr(predicted, key) for key in LINK_KEYS}
        costs["breakdown"] = [[*part, seconds] for part, seconds in predicted.by_part.items()]
    if step_seconds is not None:
        costs["run_tokens"] = run_tokens(plan, row["parameters"])
        hours = step_seconds * costs["run_tokens"] / row["tokens"] / 3600
        costs["days"] = hours / 24
        if plan.dollars_per_hour is not None:
            costs["dollars"] = hours * plan.dollars_per_hour
    return costs


def run_tokens(plan: Plan, parameters: int) -> int:
    """The number of tokens for which days and dollars are shown.

    By default 20 per parameter (Hoffmann et al., Training Compute-Optimal Large Language Models,
    arXiv 2203.15556, table 3).
    """
    if plan.tokens is not None:
        return plan.tokens
    return 20 * parameters
