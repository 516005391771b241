"""Runs the training step on the devices, with one compiled program per sequence length."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from zero.base.keys import key, positive
from zero.corpus.reading.loader import HostBatch
from zero.hosts.interruptible_compilation import CACHE_HIT, compile_unless_stopped, recorded_events
from zero.job.step_costs import predicted_time
from zero.partition.global_arrays import pmap_devices
from zero.run.out_of_memory import named_out_of_memory
from zero.run.run import Run
from zero.training.batch import Batch
from zero.training.flops import model_flops
from zero.training.host_rows import HostRows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepProgramKeys:
    """The keys of section `profile` about the speed of a step."""

    step_time: float | None = key(
        None,
        positive(),
        "Seconds per step that mode=plan predicts, for predicted_speed; null: predicted from the program, on one "
        "host with TPUs.",
    )
    peak_flops: float | None = key(
        None,
        positive(),
        "Peak operations per second of one device, for MFU; null: the published bfloat16 peak, if known.",
    )


class CompiledStep(NamedTuple):
    """The compiled step for one sequence length.

    Attributes:
      flops: the model's operations per device.
      predicted: seconds per step; None if they are unknown.
    """

    program: Callable[..., Any]
    flops: int
    predicted: float | None


class StepPrograms:
    """The compiled steps of a run, keyed by the shape of a device's rows.

    Args:
      keys: includes the planned time of a step.
      in_flight: steps dispatched before the host waits for the metrics of the oldest.
    """

    def __init__(self, keys: StepProgramKeys, in_flight: int) -> None:
        self._planned_seconds = keys.step_time
        self._in_flight = in_flight
        self._by_shape: dict[tuple[int, ...], CompiledStep] = {}

    def run(self, run: Run, step: int, batch: HostBatch) -> Batch | None:
        """Starts one update on the devices, and reads the metrics of the previous one.

        Returns:
          The sequences of this host's devices; None if a stop request arrived during compilation, and nothing was
          started.
        """
        sequences = run.data.context.cut(batch.tokens, step - 1)  # rows, or pieces of them
        length = run.data.context.at(step - 1)
        per_device = split_batch(sequences, run.host_rows)
        per_device = per_device._replace(extra=run.extra(per_device.tokens, batch.extra))
        compiled = self._by_shape.get(per_device.tokens.shape)
        if compiled is not None:
            run.state, metrics = compiled.program(run.state, per_device, run.frozen)
            position = run.start.at(step)
            tokens = position.tokens_of_step * position.schedule.steps_per_batch
            run.metrics.add(metrics, self._in_flight, tokens, compiled.flops, compiled.predicted)
        else:
            with run.clock.phase("compilation"):
                compiled = self._first_step(run, length, per_device)
            if compiled is None:
                return None
            self._by_shape[per_device.tokens.shape] = compiled
        run.count(step, batch)
        return per_device

    def _first_step(self, run: Run, length: int, per_device: Batch) -> CompiledStep | None:
        """Compiles and runs the first step of this length, waits for it, and times it separately."""
        began = time.monotonic()
        arguments = (run.state, per_device, run.frozen)
        program: Callable[..., Any] | None = run.job.programs.step
        count = per_device.tokens.shape[1]
        size = f"the training step with {count} sequences of {length:,} tokens per device"
        with recorded_events() as events, named_out_of_memory(size, run.job.state_bytes):
            if jax.process_count() == 1:
                program = compile_unless_stopped(run.requests.signals, program, *arguments)
            if program is None:
                return None
            run.state, metrics = program(*arguments)
            run.metrics.add(metrics, leave=0)
        seconds = time.monotonic() - began
        age = run.clock.age
        if self._by_shape:
            run.metrics.leave_untimed()
        else:
            run.metrics.leave_untimed(seconds_to_first_step=age)
        log.info(
            "first step with %d sequences of %d tokens per device: %.1f s after the start; it took %.1f s and was %s",
            count,
            length,
            age,
            seconds,
            "read from the cache" if CACHE_HIT in events else "compiled",
        )
        rows = run.start.schedule.rows_at(run.position.step)
        is_planned = length == run.data.context.full and rows == run.start.schedule.rows
        return CompiledStep(program, self._flops(run, per_device), self.predicted_seconds(run, program, is_planned))

    def _flops(self, run: Run, per_device: Batch) -> int:
        """The model's operations per step and device; 0 if no metric needs them, since a trace takes 0.1 s."""
        if not run.metrics.counts_flops:
            return 0
        rows = per_device.tokens.shape[1]
        length = run.job.model.positions_in(per_device.tokens[0])
        is_frozen = run.job.model.tuning is not None
        return model_flops(run.job.model.config, rows, length, frozen=is_frozen) // run.axis.row_group

    def predicted_seconds(self, run: Run, program: Any, is_planned: bool) -> float | None:
        """Seconds per step, from a plan with rows of this shape, or from the compiler's cycles; None if unknown."""
        if is_planned and self._planned_seconds is not None:
            return self._planned_seconds
        if jax.process_count() > 1 or jax.default_backend() != "tpu":
            return None
        prediction = predicted_time(program, run.job.storage, pmap_devices())
        return None if prediction is None else prediction.seconds


def split_batch(sequences: np.ndarray, host_rows: HostRows) -> Batch:
    """This host's sequences `(R, T)` as `(devices, R / groups, T)`, the same for all devices of a group."""
    tokens = host_rows.split(sequences)
    first_rows = tokens.shape[1] * np.asarray(host_rows.group_of_device)
    return Batch(tokens, first_rows.astype(np.int32))
