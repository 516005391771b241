"""Memory, traffic and time of any JAX program on TPUs that need not be there: `zero.plan`."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from zero.base.errors import UnknownTopology
from zero.costs import hlo
from zero.costs import topology as topologies
from zero.costs.absent_devices import argument_names, compile_on_cpus, lower_for
from zero.costs.compiler import Compiler, KeptProgram, source_frames
from zero.costs.crash_message import printed_if_this_process_dies
from zero.costs.formula import PREFIX, gpus
from zero.costs.holders import Holder, holders_of
from zero.costs.kernel_cycles import asked_for_kernel_cycles, check_kernel_cycles, unknown_kernels
from zero.costs.kernels import NOTED_FLOPS
from zero.costs.live_arrays import read_live_arrays
from zero.costs.planned_program import PlannedProgram
from zero.costs.predict import CORE, Timeline, predict
from zero.costs.rates import Works
from zero.costs.source_lines import SourceLines
from zero.files import storage
from zero.hosts.speeds import GIB, SPEEDS, Speed

_CALLBACK = re.compile(r'custom_call_target="[^"]*(?:callback|xla_ffi)')
FRAMES = 20  # of each operation, so that the user's line is among those of libraries
UNKNOWN_OF_GPUS = (
    "memory by a compiler for GPUs: the peak is that of XLA's buffers on CPUs, where some of bfloat16 are float32",
    "more of the time than a lower bound: products at the GPU's published peak, or all bytes sent if these take longer",
)
SHOWN = 8  # lines of each list that `print` shows


@dataclass(frozen=True)
class CollectiveCost:
    """All collectives of a kind in one step of a device.

    Attributes:
      kind: as XLA names it, such as "all-gather".
      runs: how many start.
      bytes: that a device sends.
      seconds: in which they occupy the network or a SparseCore.
      exposed_seconds: in which the device does nothing but wait for them.
    """

    kind: str
    runs: int
    bytes: int
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Plan:
    """What one step of a program costs each device, by the TPU compiler.

    Attributes:
      name: of the function.
      topology: as it was asked for.
      device_kind: as jax names it.
      devices: how many run the program.
      peak_bytes: of the memory of a device; with `fits` false what the compiler asked for.
      available_bytes: of the memory of a device, by the compiler.
      holders: what holds the peak, largest first.
      collectives: by kind, the most bytes first.
      flops: of matrix products on a device, recomputed ones included.
      seconds: None if the program does not fit; with `is_bound` at least so many.
      exposed_seconds: in which a device does nothing but wait for other devices.
      host_exposed_seconds: in which it waits for copies to or from its host's memory.
      guessed_seconds: of instructions without cycles, such as Pallas kernels: that of the bytes that they touch, or of
        the operations in a kernel's `cost_estimate` if it is longer.
      unknowns: what the plan does not know, a sentence each.
      compile_seconds: how long the compiler took.
      programs: compiled programs with their runs per step; of one that does not fit none.
      is_bound: for GPUs, for which there is no compiler: memory is that of XLA's buffers on CPUs.

    Plans are added and multiplied as their programs run in a step:

    >>> micro_batch = Plan("gradients", "v5e-16", "TPU v5 lite", 16, 2**30, 2**34, (), (), 4e12, 0.25, 0, 0, 0, (), 9.0)
    >>> update = dataclasses.replace(micro_batch, name="update", flops=0, seconds=0.5)
    >>> step = 4 * micro_batch + update
    >>> step.name, step.seconds, step.fits
    ('4 x gradients + update', 1.5, True)
    """

    name: str
    topology: str
    device_kind: str
    devices: int
    peak_bytes: int
    available_bytes: int
    holders: tuple[Holder, ...]
    collectives: tuple[CollectiveCost, ...]
    flops: float
    seconds: float | None
    exposed_seconds: float
    host_exposed_seconds: float
    guessed_seconds: float
    unknowns: tuple[str, ...]
    compile_seconds: float
    programs: tuple[tuple[PlannedProgram, int], ...] = field(default=(), repr=False)
    is_bound: bool = False

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory of a device."""
        return self.seconds is not None and self.peak_bytes <= self.available_bytes

    @property
    def utilization(self) -> float | None:
        """The share of a device's peak that matrix products reach, recomputed ones included."""
        if not self.seconds:
            return None
        return self.flops / self.seconds / SPEEDS[self.device_kind].flops

    def mfu(self, model_flops: float) -> float | None:
        """The share of the peak of all devices that a model needs.

        Args:
          model_flops: operations of one step on all devices, without recomputation; 6 x parameters x tokens for a
            dense transformer (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B).
        """
        if not self.seconds:
            return None
        return model_flops / (self.seconds * self.devices * SPEEDS[self.device_kind].flops)

    def dollars(self, steps: int, dollars_per_device_hour: float) -> float | None:
        """The price of a run, without evaluations and restarts."""
        if self.seconds is None:
            return None
        return steps * self.seconds / 3600 * self.devices * dollars_per_device_hour

    def __add__(self, other: Plan) -> Plan:
        """The plan of a step that runs both programs, one after the other."""
        if (self.topology, self.devices) != (other.topology, other.devices):
            raise ValueError(f"expected plans for the same devices, got {self.topology} and {other.topology}")
        higher = max(self, other, key=lambda plan: plan.peak_bytes)
        by_kind: defaultdict[str, list[CollectiveCost]] = defaultdict(list)
        for cost in (*self.collectives, *other.collectives):
            by_kind[cost.kind].append(cost)
        seconds = None
        if self.seconds is not None and other.seconds is not None:
            seconds = self.seconds + other.seconds
        return dataclasses.replace(
            higher,
            name=f"{self.name} + {other.name}",
            collectives=_sorted(_sum(costs) for costs in by_kind.values()),
            flops=self.flops + other.flops,
            seconds=seconds,
            exposed_seconds=self.exposed_seconds + other.exposed_seconds,
            host_exposed_seconds=self.host_exposed_seconds + other.host_exposed_seconds,
            guessed_seconds=self.guessed_seconds + other.guessed_seconds,
            unknowns=tuple(dict.fromkeys((*self.unknowns, *other.unknowns))),
            compile_seconds=self.compile_seconds + other.compile_seconds,
            programs=(*self.programs, *other.programs),
        )

    def __rmul__(self, times: int) -> Plan:
        """The plan of a step that runs the program several times, such as `8 * micro_batch + update`."""
        return dataclasses.replace(
            self,
            name=f"{times} x {self.name}",
            collectives=tuple(
                CollectiveCost(c.kind, times * c.runs, times * c.bytes, times * c.seconds, times * c.exposed_seconds)
                for c in self.collectives
            ),
            flops=times * self.flops,
            seconds=None if self.seconds is None else times * self.seconds,
            exposed_seconds=times * self.exposed_seconds,
            host_exposed_seconds=times * self.host_exposed_seconds,
            guessed_seconds=times * self.guessed_seconds,
            programs=tuple((program, times * runs) for program, runs in self.programs),
        )

    def compare(self, other: Plan) -> str:
        """What is different in another plan: bytes, seconds, collectives, and what holds the peak."""
        lines = [f"{self.name} on {self.topology} -> {other.name} on {other.topology}"]
        lines.append(_change("peak", self.peak_bytes / GIB, other.peak_bytes / GIB, "GiB"))
        if self.seconds is not None and other.seconds is not None:
            lines.append(_change("step", self.seconds, other.seconds, "s"))
            lines.append(_change("exposed", self.exposed_seconds, other.exposed_seconds, "s"))
        before = {cost.kind: cost.bytes / 1e9 for cost in self.collectives}
        after = {cost.kind: cost.bytes / 1e9 for cost in other.collectives}
        for kind in dict.fromkeys((*before, *after)):
            lines.append(_change(kind, before.get(kind, 0.0), after.get(kind, 0.0), "GB"))
        held = {holder.name: holder.bytes for holder in self.holders}
        holds = {holder.name: holder.bytes for holder in other.holders}
        moved = {name: holds.get(name, 0) - held.get(name, 0) for name in dict.fromkeys((*held, *holds))}
        for name, size in sorted(moved.items(), key=lambda item: -abs(item[1]))[:SHOWN]:
            if size:
                lines.append(_change(name, held.get(name, 0) / GIB, holds.get(name, 0) / GIB, "GiB"))
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a page: the schedule on a time axis, the longest waits and instructions, memory over the schedule.

        The file needs no server and no network. A picture has at most some thousand blocks: shorter instructions that
        follow each other are drawn together.
        """
        from zero.costs.plan_page import page  # Imported here because only this needs jinja2.

        holders = [(holder.name, holder.bytes) for holder in self.holders]
        title = f"{self.name} on {self.topology}"
        text = page(title, str(self).splitlines(), self.programs, holders, self.available_bytes)
        storage.write(Path(path), text.encode())

    def __str__(self) -> str:
        peak = f"{self.peak_bytes / GIB:.2f} of {self.available_bytes / GIB:.2f} GiB"
        lines = [f"{self.name} on {self.topology}: {self.devices} devices, {self.device_kind}"]
        if self.fits:
            lines.append(f"peak      {peak} per device")
        else:
            lines.append(f"peak      {peak} per device: does not fit. The largest arrays:")
        lines += [f"  {holder.bytes / GIB:8.3f} GiB  {holder.name}" for holder in self.holders[:SHOWN]]
        if self.seconds is not None and self.is_bound:
            lines.append(f"step      at least {self.seconds:#.4g} s")
        elif self.seconds is not None:
            share = 0.0 if self.utilization is None else self.utilization
            lines.append(
                f"step      {self.seconds:#.4g} s; matrix units at {share:.1%} of their peak (recomputation included)"
            )
            lines.append(f"exposed   {self.exposed_seconds:#.3g} s waiting for other devices")
            if self.host_exposed_seconds:
                lines.append(f"          {self.host_exposed_seconds:#.3g} s waiting for the host's memory")
        for cost in self.collectives:
            line = f"  {cost.kind}: {cost.runs} per step, {cost.bytes / 1e9:#.3g} GB sent"
            if not self.is_bound:
                line += f", {cost.seconds:#.3g} s, {cost.exposed_seconds:#.3g} s exposed"
            lines.append(line)
        if self.seconds and self.guessed_seconds:
            lines.append(
                f"a guess   {self.guessed_seconds / self.seconds:.1%} of the step, by the bytes that it touches and, "
                "of kernels, the operations that they note"
            )
        lines += [f"unknown   {sentence}" for sentence in self.unknowns]
        return "\n".join(lines)


def plan(
    fn: Any,
    *args: Any,
    topology: str,
    compiler_options: Mapping[str, bool | int] | None = None,
    exact: bool = False,
    **kwargs: Any,
) -> Plan:
    """Memory, traffic and seconds per step of a program on TPUs that need not be attached; bounds of them on GPUs.

    The program is compiled by the TPU compiler in this process, which takes from seconds to minutes, and never runs.
    The compiler is the extra `plan`: `pip install '.[plan]'`, on x86-64 Linux.

    Args:
      fn: a function made by `jax.pmap`, with collectives over its axis; or by `jax.jit`, with shardings of a mesh made
        from `zero.topology`, or a `jax.shard_map` over such a mesh. A mesh of `jax.devices()` is replaced by one of the
        topology if it has as many CPUs, which the environment variable JAX_NUM_CPU_DEVICES creates.
      args: arrays or `jax.ShapeDtypeStruct`. Those of a pmapped function have a leading axis of all devices of the
        topology, of all hosts together. Only shapes, dtypes and shardings are read.
      topology: a slice, such as "v5e-16", "v4-32", "v3:2x2", or "2xv5e-16" for two slices. Of GPUs, such as
        "gpu:h100x8", there are only a lower bound of the seconds and the memory that XLA takes on CPUs, of which this
        process needs as many.
      compiler_options: of XLA, beside those in LIBTPU_INIT_ARGS.
      exact: also counts Pallas kernels by the compiler's estimate of their instructions, with each of their branches
        taken and grids with scalar prefetch run once, and not only by the bytes that they touch and the operations
        that they note. For v5e, v5p and v6e, in a process that has not used the compiler before; the compiler ends the
        process if it cannot estimate a program. zero's own kernels and splash attention count by their products in any
        case.
      kwargs: arguments of `fn` by name, likewise.

    Raises:
      UnknownTopology: there is no such slice, or no compiler.
      ValueError: a leading axis is not as long as the topology has devices, or a mesh has another number of them.
      TypeError: `fn` is not a function.
      UserError: with `exact`, this process has used the compiler before, or it has no estimates for the topology.

    >>> step = jax.pmap(lambda x: jax.lax.psum(x, "i"), "i")
    >>> x = jax.ShapeDtypeStruct((8, 1024, 1024), "float32")
    >>> print(plan(step, x, topology="v5e-8"))  # doctest: +ELLIPSIS
    <lambda> on v5e-8: 8 devices, TPU v5 lite
    peak      0.0... of 15.75 GiB per device
    ...
      all-reduce: 1 per step, 0.00734 GB sent, ...

    Several programs of a step: `8 * zero.plan(micro_batch, ...) + zero.plan(update, ...)`.
    """
    named = fn if hasattr(fn, "__name__") else inspect.unwrap(fn)  # a wrapper of Haliax has no name of its own
    name = getattr(named, "__name__", type(fn).__name__)
    with asked_for_kernel_cycles(topology) if exact else nullcontext():
        if topology.startswith(PREFIX):
            return _bound(name, topology, fn, args, kwargs)
        present = topologies.topology(topology)
    with source_frames(FRAMES):
        lowered, devices, notes = lower_for(present, fn, args, kwargs)
    compiler = Compiler(devices, compiler_options)
    with ThreadPoolExecutor(1) as outside:  # of the mesh that `jax.set_mesh` has set in this thread
        available = outside.submit(topologies.available_bytes, present).result()
    began = time.monotonic()
    arguments = argument_names(fn, args, kwargs)
    try:
        with printed_if_this_process_dies(_last_words(name, topology, exact)):
            compiled = compiler.compile_lowered(lowered)
    except jax.errors.JaxRuntimeError as error:
        needed, available = topologies.out_of_memory(error)
        return Plan(
            name,
            topology,
            devices[0].device_kind,
            len(devices),
            needed,
            available,
            () if compiler.refused is None else holders_of(compiler.refused, arguments),
            collectives=(),
            flops=0.0,
            seconds=None,
            exposed_seconds=0.0,
            host_exposed_seconds=0.0,
            guessed_seconds=0.0,
            unknowns=("seconds and traffic of a program that does not fit", *notes),
            compile_seconds=time.monotonic() - began,
        )
    seconds = time.monotonic() - began
    if exact:
        check_kernel_cycles(hlo.computations(compiled.text)[0], SPEEDS[devices[0].device_kind])
    return _plan_of(compiled, name, topology, devices, available, arguments, notes, seconds)


def _bound(name: str, topology: str, fn: Any, args: Any, kwargs: Any) -> Plan:
    """What is known of a program on GPUs."""
    devices = gpus(topology)
    began = time.monotonic()
    compiled = compile_on_cpus(len(devices), fn, args, kwargs)
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    bodies, entry = hlo.computations(compiled.as_text())
    flops, sent = _flops(bodies, entry), _sent(bodies, entry)
    speed = SPEEDS[devices[0].device_kind]
    return Plan(
        name,
        topology,
        devices[0].device_kind,
        len(devices),
        held + memory.temp_size_in_bytes,
        topologies.available_bytes(devices),
        holders=(),
        collectives=sent,
        flops=flops,
        seconds=max(flops / speed.flops, sum(cost.bytes for cost in sent) / speed.network),
        exposed_seconds=0.0,
        host_exposed_seconds=0.0,
        guessed_seconds=0.0,
        unknowns=UNKNOWN_OF_GPUS,
        compile_seconds=time.monotonic() - began,
        is_bound=True,
    )


def _last_words(name: str, asked: str, exact: bool) -> str:
    """What a crash of the compiler should tell."""
    if exact:
        return (
            f"zero.plan: this process ended while the TPU compiler estimated the kernels of {name} for {asked}, which "
            "it cannot do for every program (its messages are above): plan without exact=True"
        )
    return (
        f"zero.plan: this process ended while the TPU compiler compiled {name} for {asked}: a fault of the compiler, "
        "whose messages are above, or a lack of memory. Plan in a process of its own (python -m zero.commands.check "
        f"FILE {name} ARGUMENTS --topology {asked}), with fewer layers or rows, or with another version of libtpu "
        f"(this is {version('libtpu')})"
    )


def _plan_of(
    compiled: KeptProgram,
    name: str,
    asked: str,
    devices: Sequence[Any],
    available: int,
    arguments: Sequence[str],
    notes: Sequence[str],
    compile_seconds: float,
) -> Plan:
    """The plan that a compiled program's text and reports make."""
    bodies, entry = hlo.computations(compiled.text)
    # A program without products may have no cycles at all.
    prediction = predict(compiled.text, devices, unknown_trips=1)
    prediction = prediction or predict(compiled.text, devices, is_whole=False, unknown_trips=1)
    if prediction is None or prediction.timeline is None:
        raise UnknownTopology(f"topology={asked}: the compiler writes no cycles for {devices[0].device_kind}")
    live = read_live_arrays(compiled.buffers, compiled.live_ranges, bodies)
    peak = compiled.assigned_bytes or compiled.memory.peak_memory_in_bytes
    lines = SourceLines(compiled.text)
    program = PlannedProgram(name, prediction.timeline, lines, live, peak)
    return Plan(
        name,
        asked,
        devices[0].device_kind,
        len(devices),
        peak,
        available,
        holders_of(compiled, arguments),
        _collectives(prediction.timeline),
        _flops(bodies, entry),
        prediction.seconds,
        prediction.exposed_seconds,
        prediction.host_exposed_seconds,
        sum(times * event.seconds for event, times in prediction.timeline.runs() if event.is_guess),
        (*_unknowns(bodies, lines, SPEEDS[devices[0].device_kind]), *notes),
        compile_seconds,
        programs=((program, 1),),
    )


def _collectives(timeline: Timeline) -> tuple[CollectiveCost, ...]:
    by_kind: defaultdict[str, list[CollectiveCost]] = defaultdict(list)
    for event, times in timeline.runs():
        started = event.waits_for or event.instruction
        kind = hlo.kind_of(started)
        if kind is None:
            continue
        if event.waits_for is not None:
            by_kind[kind].append(CollectiveCost(kind, 0, 0, 0.0, times * event.seconds))
        elif event.lane != CORE:
            sent = round(times * hlo.bytes_sent(started))
            by_kind[kind].append(CollectiveCost(kind, times, sent, times * event.seconds, 0.0))
    return _sorted(_sum(costs) for costs in by_kind.values())


def _sent(bodies: hlo.Bodies, entry: str) -> tuple[CollectiveCost, ...]:
    """The collectives of one run, without their time."""
    by_kind: defaultdict[str, list[CollectiveCost]] = defaultdict(list)
    for name, runs in hlo.runs_of(bodies, entry, unknown_trips=1).items():
        for instruction in bodies[name]:
            kind = hlo.kind_of(instruction)
            if kind is not None:
                sent = round(runs * hlo.bytes_sent(instruction))
                by_kind[kind].append(CollectiveCost(kind, runs, sent, 0.0, 0.0))
    return _sorted(_sum(costs) for costs in by_kind.values())


def _sum(costs: Sequence[CollectiveCost]) -> CollectiveCost:
    return CollectiveCost(
        costs[0].kind,
        sum(cost.runs for cost in costs),
        sum(cost.bytes for cost in costs),
        sum(cost.seconds for cost in costs),
        sum(cost.exposed_seconds for cost in costs),
    )


def _sorted(costs: Iterable[CollectiveCost]) -> tuple[CollectiveCost, ...]:
    return tuple(sorted(costs, key=lambda cost: -cost.bytes))


def _flops(bodies: hlo.Bodies, entry: str) -> float:
    """Operations of the matrix products of one run, and of the kernels that note theirs."""
    works = Works(bodies)
    total = 0.0
    fused = {called for body in bodies.values() for x in body if x.op == "fusion" for called in x.called}
    for name, runs in hlo.runs_of(bodies, entry, unknown_trips=1).items():
        if name in fused:
            continue
        results = {instruction.name: instruction.result for instruction in bodies[name]}
        for instruction in bodies[name]:
            if instruction.op in ("fusion", "convolution", "dot"):
                total += runs * sum(works.of(instruction, results).flops.values())
            elif match := NOTED_FLOPS.search(instruction.rest):
                total += runs * int(match[1])
    return total


def _unknowns(bodies: hlo.Bodies, lines: SourceLines, speed: Speed) -> tuple[str, ...]:
    found = []
    loops = dict.fromkeys(lines.of(loop) or loop.name for loop in hlo.loops_that_data_end(bodies))
    found += [f"how often a loop runs that its data end, {line}: one run is counted" for line in loops]
    instructions = [instruction for body in bodies.values() for instruction in body]
    if any(_CALLBACK.search(instruction.rest) for instruction in instructions if instruction.op == "custom-call"):
        found.append("callbacks to Python: their time on the host is not counted")
    kernels = unknown_kernels(bodies, speed)
    if any(kernel.cycles is not None for kernel in kernels):
        found.append("which branches of Pallas kernels run, and how often loops that data end: all count, and one run")
    if any(NOTED_FLOPS.search(kernel.rest) is None for kernel in kernels):
        found.append("operations of kernels without a cost_estimate: the matrix units' share counts none of them")
    return tuple(found)


def _change(name: str, before: float, after: float, unit: str) -> str:
    """One line of a comparison.

    >>> _change("peak", 2.0, 1.5, "GiB")
    'peak: 2 -> 1.5 GiB (-25.0%)'
    """
    share = f" ({after / before - 1:+.1%})" if before else ""
    return f"{name}: {before:.4g} -> {after:.4g} {unit}{share}"
