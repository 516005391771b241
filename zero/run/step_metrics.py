"""Metrics of the steps since the last logged line: losses, times, throughput and utilization."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import jax

from zero.models.codebook import METRICS as OF_CODEBOOKS
from zero.models.experts import METRICS as OF_EXPERTS
from zero.tracking.goodput import Goodput
from zero.tracking.metrics import Metric
from zero.training.objectives.objective import Mean
from zero.training.objectives.table import with_defaults

log = logging.getLogger(__name__)

METRICS = (
    Metric(("train/loss",), "mean over the steps since the previous line; nats per token"),
    Metric(("learning_rate", "sequence_length"), "of the newest step; the length in tokens"),
    Metric(("gradient_norm",), "of the newest step, before clipping"),
    Metric(("skipped_steps", "skipped_spikes"), "updates skipped so far, and how many of these were spikes"),
    Metric(("step_time",), "seconds per step, including the wait for data"),
    Metric(
        ("tokens_per_second", "tokens_per_second_per_device"),
        "tokens of a step's rows at full length, divided by `step_time`; the same per device",
    ),
    Metric(("mfu",), "model FLOPs utilization: share of the devices' published peak"),
    Metric(("data_wait", "device_wait"), "share of `step_time` that the host waits for data, and for the devices"),
    Metric(("predicted_speed",), "predicted time of a step divided by its measured time"),
    Metric(("seconds_to_first_step",), "from the start of the run; in the first line after a start"),
    Metric(("peak_memory",), "bytes on the first device of host 0, if its allocator reports them"),
    Metric(OF_EXPERTS, "share of tokens of the most and the least chosen expert, share of choices dropped, nats"),
    Metric(
        OF_CODEBOOKS,
        "codes of vector-quantized keys: entropy in nats, its exponential, share of rarely used codes, relative error "
        "of rounded keys",
    ),
)
SLOW = 0.7  # below this share of the predicted speed, warn where the time goes


def metrics_of_objectives() -> list[Metric]:
    """The metrics of all objectives, each with the objectives that report it."""
    objectives: dict[Mean, list[str]] = {}
    evaluated: dict[str, list[str]] = {}
    for name, objective in with_defaults().items():
        for metric in objective.metrics_of_steps:
            objectives.setdefault(metric, []).append(f"`{name}`")
        for metric in (metric for metric in objective.metrics if metric.evaluated):
            sentence = f"with `objective=` `{name}`, of evaluations alone: {metric.sentence}"
            evaluated.setdefault(sentence, []).append(f"validation/{metric.name}")
    of_steps = [
        Metric((metric.name,), f"with `objective=` {', '.join(names)}: {metric.sentence}")
        for metric, names in objectives.items()
    ]
    return of_steps + [Metric(tuple(names), sentence) for sentence, names in evaluated.items()]


class StepMetrics:
    """Collects the metrics of each step, and the time spent on steps and data, for one line of metrics.

    Args:
      devices: the number of devices over all hosts.
      peak_flops: published peak of one device in operations per second, or None if unknown.
      goodput: its phases "steps" and "data_wait" measure the time of steps.
      steps_per_call: steps per call of the program; metrics are then arrays `(steps_per_call,)`.
      objective_metrics: the objective's metrics.
    """

    def __init__(
        self,
        devices: int,
        peak_flops: float | None,
        goodput: Goodput,
        steps_per_call: int = 1,
        objective_metrics: tuple[Mean, ...] = (),
    ) -> None:
        self._objective_metrics = objective_metrics
        self._steps_per_call = steps_per_call
        self._devices = devices
        self._peak_flops = peak_flops
        self._goodput = goodput
        self._unread: deque[dict[str, jax.Array]] = deque()  # metrics of dispatched steps, oldest first
        self._newest: dict[str, float] = {}
        self._next_line: dict[str, float] = {}
        self._has_warned = False
        self.restart()

    def restart(self) -> None:
        """Begins a new line: later steps count for its mean loss and its times."""
        self._losses: list[float] = []
        self._objective_values: list[dict[str, float]] = []
        self._untimed = 0
        self._flops = 0
        self._tokens = 0
        self._before = self._goodput.seconds_so_far()
        self._predicted = 0.0
        self._waited_for_devices = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether there has been no step since the last line."""
        return not (self._unread or self._losses)

    @property
    def counts_flops(self) -> bool:
        """Whether lines report utilization."""
        return self._peak_flops is not None

    @property
    def skipped_in_a_row(self) -> int:
        """Updates skipped since the last applied one, as of the newest step that was read, if any."""
        return int(self._newest.get("skipped_in_a_row", 0))

    def leave_untimed(self, **once: float) -> None:
        """Excludes the newest call, which was compiled, from the throughput; `once` is logged in the next line."""
        self._untimed += self._steps_per_call
        self._next_line |= once

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, recording the time spent waiting for them."""
        while True:
            with self._goodput.phase("data_wait"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def add(
        self,
        metrics: dict[str, jax.Array],
        leave: int,
        tokens: int = 0,
        flops: int | None = None,
        predicted: float | None = None,
    ) -> None:
        """Adds the metrics of a dispatched call; waits for all but the newest `leave`.

        Args:
          tokens: tokens of this call's rows, for the throughput; 0 if the call is not timed.
          flops: the model's operations per device in this call, for the utilization; None if the call is not timed.
          predicted: predicted seconds of this call; None if unknown or not timed.
        """
        self._unread.append(metrics)
        self._tokens += tokens
        self._flops += flops or 0
        self._predicted += predicted or 0.0
        began = time.monotonic()
        self._read_down_to(leave)
        if flops is not None:
            self._waited_for_devices += time.monotonic() - began

    def wait(self) -> None:
        """Waits for all dispatched steps."""
        jax.block_until_ready(list(self._unread))  # a deque is not a pytree: it would not wait

    def _read_down_to(self, leave: int) -> None:
        """Reads the oldest steps in order, until only `leave` are left; waits for their devices."""
        while len(self._unread) > leave:
            metrics = jax.device_get(self._unread.popleft())
            for number in range(self._steps_per_call):
                self._newest = {name: x.reshape(-1)[number].item() for name, x in metrics.items()}
                self._losses.append(self._newest["loss"])
                self._objective_values.append(
                    {metric.name: self._newest[metric.name] for metric in self._objective_metrics}
                )

    def read(self) -> dict[str, float]:
        """One line of metrics: means of the loss and the objective's metrics, and the newest values of all others.

        Waits for all steps.
        """
        self._read_down_to(0)
        losses, self._losses = self._losses, []
        model_label = [name for name in (*OF_EXPERTS, *OF_CODEBOOKS) if name in self._newest]
        newest = ("learning_rate", "gradient_norm", "skipped_steps", "skipped_spikes", *model_label)
        line = {"train/loss": fmean(losses), **{name: self._newest[name] for name in newest}, **self._next_line}
        line |= self._means_of_objective()
        self._next_line = {}
        if steps := len(losses) - self._untimed:
            spent = self._goodput.seconds_so_far()
            seconds = {phase: spent[phase] - self._before[phase] for phase in spent}
            step_time = (seconds["steps"] + seconds["data_wait"]) / steps
            tokens_per_second = self._tokens / (step_time * steps)
            line |= {
                "step_time": step_time,
                "tokens_per_second": tokens_per_second,
                "tokens_per_second_per_device": tokens_per_second / self._devices,
                "data_wait": seconds["data_wait"] / (step_time * steps),
            }
            if self._predicted:
                line["device_wait"] = self._waited_for_devices / (step_time * steps)
                line["predicted_speed"] = self._predicted / (step_time * steps)
                self._warn_if_slow(line)
            if self._peak_flops is not None:
                line["mfu"] = self._flops / (step_time * steps * self._peak_flops)
        return line

    def _means_of_objective(self) -> dict[str, float]:
        """The objective's metrics over the steps of a line, each step weighted by its share of the terms."""
        means = {}
        for metric in self._objective_metrics:
            values = [step[metric.name] for step in self._objective_values]
            if not metric.over:
                means[metric.name] = fmean(values)
                continue
            shares = [step[metric.over] for step in self._objective_values]
            if any(shares):
                means[metric.name] = fmean(values, weights=shares)
        return means

    def _warn_if_slow(self, line: dict[str, float]) -> None:
        """Warns once, with the share of time by cause."""
        if line["predicted_speed"] < SLOW and not self._has_warned:
            self._has_warned = True
            log.warning(
                "steps take %.3f s, at %.0f%% of the predicted speed: the host waits %.0f%% of the time for data and "
                "%.0f%% for the devices; the rest is its own work",
                line["step_time"],
                *(100 * line[name] for name in ("predicted_speed", "data_wait", "device_wait")),
            )


def peak_memory() -> dict[str, int]:
    """The peak memory of the first local device in bytes, if its allocator reports it (not on CPU)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        return {}
    return {"peak_memory": int(stats["peak_bytes_in_use"])}
