"""The costs of a compiled training step, which is one program or several: bytes, traffic and predicted time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from zero.costs.between_slices import bytes_between_slices
from zero.costs.compiler import Compiler
from zero.costs.hlo import Collective, collectives
from zero.costs.predict import Prediction, TimedPart, predict
from zero.hosts.speeds import SPEEDS
from zero.partition.host_blocks import IN_FLIGHT
from zero.training.state_storage import OnDevices
from zero.training.streamed_update import LoweredStep, StreamedStep


@dataclass(frozen=True)
class StepCosts:
    """Of one device.

    Attributes:
      peak: bytes of the device; of a step of several programs an upper bound.
      host_bytes: in host memory, of state and activations.
      sent: the collectives of a step.
      sent_between: bytes to other slices.
      predicted: None if the compiler wrote no cycles.
    """

    peak: int
    host_bytes: int
    sent: list[Collective]
    sent_between: float
    predicted: Prediction | None


def compile_programs(compiler: Compiler, step: Any, *arguments: Any, whole: bool = True) -> Any:
    """A training step, compiled; of several programs the step with compiled programs, which are whole.

    Raises:
      jax.errors.JaxRuntimeError: from the compiler, if a program does not fit.
    """
    lowered = compiler.lower(step, *arguments)
    if isinstance(lowered, LoweredStep):
        return lowered.compiled_by(compiler.compile_lowered)
    return compiler.compile_lowered(lowered, whole)


def costs_of(
    step: Any, storage: OnDevices, state_bytes: int, devices: Sequence[Any], available: float = math.inf
) -> StepCosts:
    """The costs of a compiled step.

    Args:
      step: what `Programs.step.lower(...).compile()` gives.
      storage: where the state is between steps.
      state_bytes: bytes of a device between steps.
      devices: on which the step runs.
      available: bytes of a device's memory, if the compiler refused a step that needs more.
    """
    platform = devices[0].platform
    sent: list[Collective] = []
    sent_between = 0.0
    for program, times in calls_of(step):
        text = program.as_text()
        sent += times * collectives(text)
        sent_between += times * bytes_between_slices(text)
    predicted = predicted_time(step, storage, devices)
    if not isinstance(step, StreamedStep):
        memory = step.memory_analysis()
        peak = device_peak(memory, platform, available)
        return StepCosts(peak, memory.host_temp_size_in_bytes, sent, sent_between, predicted)
    on_host = storage.host_bytes
    if step.keeps_on_host:
        on_host += _kept_bytes(step)
    return StepCosts(_streamed_peak(step, storage, state_bytes, platform), on_host, sent, sent_between, predicted)


def calls_of(step: Any) -> list[tuple[Any, int]]:
    """The compiled programs of a step, and how often it calls each."""
    return step.calls() if isinstance(step, StreamedStep) else [(step, 1)]


def predicted_time(step: Any, storage: OnDevices, devices: Sequence[Any]) -> Prediction | None:
    """The predicted time of a compiled step; None if the compiler wrote no cycles.

    Of several programs it is the sum of theirs, and what is longer: a span, or the way of another one's state, and of
    its input if that lies on the host, between device and host in either direction.
    """
    if not isinstance(step, StreamedStep):
        return predict(step.as_text(), devices, is_whole=getattr(step, "is_whole", True))
    spans = len(step.firsts)
    parts: defaultdict[TimedPart, float] = defaultdict(float)
    seconds = exposed_seconds = exposed_bytes = waits = 0.0
    moved = {step.programs.forward: 0.0, step.programs.backward: storage.host_bytes / spans}
    if step.keeps_on_host:
        moved = {program: size + _kept_bytes(step) / spans for program, size in moved.items()}
    speed = SPEEDS.get(devices[0].device_kind)
    if speed is None:
        return None
    link = speed.host / speed.devices  # bytes per second of a device
    for program, times in step.calls():
        prediction = predict(program.as_text(), devices)
        if prediction is None:
            return None
        waits += times * max(0.0, moved.get(program, 0.0) / link - prediction.seconds)
        seconds += times * prediction.seconds
        exposed_seconds += times * prediction.exposed_seconds
        exposed_bytes += times * prediction.exposed_bytes
        for part, spent in prediction.by_part.items():
            parts[part] += times * spent
    parts[TimedPart("waiting for the host", "update")] += waits
    each_way = spans * moved[step.programs.backward]
    return Prediction(
        seconds + waits,
        dict(parts),
        exposed_seconds,
        exposed_bytes,
        host_link_bytes=2 * each_way,
        host_link_seconds=each_way / link,
        host_exposed_seconds=waits,
    )


def device_peak(analysis: Any, platform: str, available: float = math.inf) -> int:
    """Bytes of a device at the peak of a compiled program, from its `memory_analysis()`.

    The TPU compiler's figure is for the fuller memory, the device's or the host's. Other compilers leave
    temporaries out of theirs. The sum of all arrays is an upper bound for both, and so are the `available` bytes of a
    device for a program that this compiler has accepted.
    """
    arrays = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    bound: int = arrays + analysis.temp_size_in_bytes
    if platform != "tpu":
        return bound
    peak: int = analysis.peak_memory_in_bytes
    if not analysis.host_temp_size_in_bytes:
        return peak
    return int(min(peak, bound, available))


def _kept_bytes(step: StreamedStep) -> int:
    """Bytes of a device's inputs of all spans."""
    size: int = step.programs.embed.memory_analysis().output_size_in_bytes
    return len(step.firsts) * size


def _streamed_peak(step: StreamedStep, storage: OnDevices, state_bytes: int, platform: str) -> int:
    """Assumes that everything alive at some time between two programs is alive during both."""
    spans = len(step.firsts)
    kept = _kept_bytes(step)
    if step.keeps_on_host:
        kept = kept * min(spans, 1 + IN_FLIGHT) // spans
    embed = step.programs.embed.memory_analysis()
    alive = state_bytes + kept + storage.moving_bytes + step.programs.score.memory_analysis().output_size_in_bytes
    alive += embed.output_size_in_bytes + embed.argument_size_in_bytes  # the last layer's output, and the rows
    peaks = []
    for program, _ in step.calls():
        memory = program.memory_analysis()
        peaks.append(alive - memory.argument_size_in_bytes + device_peak(memory, platform))
    return max(peaks)


def traced(step: Any, arguments: Any) -> list[tuple[Any, int]]:
    """The jaxprs of a step with these arguments, or shapes of them, and how often each runs."""
    if isinstance(step, StreamedStep):
        return [
            (jax.make_jaxpr(call.program)(*call.arguments).jaxpr, call.times) for call in step.called_with(*arguments)
        ]
    return [(jax.make_jaxpr(step)(*arguments).jaxpr, 1)]
