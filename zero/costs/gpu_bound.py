"""What can be said of a program on GPUs that are not there, without a compiler for them.

Memory is that of the buffers of XLA's compiler for CPUs. Seconds are a lower bound by published peaks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from zero.base.errors import UnknownTopology
from zero.costs import hlo
from zero.costs.absent_devices import lower_on_cpus
from zero.costs.formula import Gpu
from zero.hosts.speeds import SPEEDS

UNKNOWNS = (
    "memory by a compiler for GPUs: the peak is that of XLA's buffers on CPUs, where some of bfloat16 are float32",
    "more of the time than a lower bound: products at the GPU's published peak, or all bytes sent if these take longer",
)
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_SHAPE = re.compile(r"\[([\d,]*)\]")


class GpuBound(NamedTuple):
    """Of one step of a device.

    Attributes:
      peak_bytes: of memory.
      flops: of matrix products, recomputed ones included.
      collectives: by kind, how many start and the bytes that a device sends.
      seconds: at least.
    """

    peak_bytes: int
    flops: float
    collectives: dict[str, tuple[int, int]]
    seconds: float


def bound_on_gpus(gpus: Sequence[Gpu], fn: Any, args: Any, kwargs: Any) -> GpuBound:
    """Compiles a program for as many CPUs as there are GPUs.

    Raises:
      UnknownTopology: this process has fewer CPU devices.
      NotPlannable: the program is for another number of devices.
    """
    cpus = jax.devices("cpu")
    if len(cpus) < len(gpus):
        raise UnknownTopology(
            f"a program for {len(gpus)} GPUs is compiled for as many CPU devices, and this process has {len(cpus)}: "
            f"start it with JAX_NUM_CPU_DEVICES={len(gpus)} in its environment"
        )
    compiled = lower_on_cpus(cpus[: len(gpus)], fn, args, kwargs).compile()
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    flops = 0.0
    collectives: dict[str, tuple[int, int]] = {}
    bodies, entry = hlo.computations(compiled.as_text())
    for name, runs in hlo.runs_of(bodies, entry, unknown_trips=1).items():
        results = {instruction.name: instruction.result for instruction in bodies[name]}
        for instruction in bodies[name]:
            flops += runs * _flops(instruction, results)
            kind = hlo.kind_of(instruction)
            if kind is not None:
                before, sent = collectives.get(kind, (0, 0))
                collectives[kind] = before + runs, sent + round(runs * hlo.bytes_sent(instruction))
    speed = SPEEDS[gpus[0].device_kind]
    seconds = max(flops / speed.flops, sum(sent for _, sent in collectives.values()) / speed.network)
    return GpuBound(held + memory.temp_size_in_bytes, flops, collectives, seconds)


def _flops(instruction: hlo.Instruction, results: Mapping[str, str]) -> float:
    """Operations of a matrix product; 0 of any other instruction."""
    contracted = _CONTRACTED.search(instruction.rest)
    if instruction.op != "dot" or contracted is None:
        return 0.0
    left = _dims(results[instruction.operands[0]])
    summed = math.prod(left[int(dim)] for dim in contracted[1].split(",") if dim)
    return 2.0 * math.prod(_dims(instruction.result)) * summed


def _dims(shape: str) -> list[int]:
    found = _SHAPE.search(shape)
    assert found is not None, shape
    return [int(size) for size in found[1].split(",") if size]
