"""A run in progress on one host, as all of its features see it."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from zero.corpus.reading.loader import HostBatch
from zero.corpus.reading.prefetch import prefetch
from zero.hosts import agreement, watchdog
from zero.job.job import Job
from zero.partition.collectives.axis import Axis
from zero.partition.layout import PyTree
from zero.record.metrics_file import Line
from zero.run.data import Data
from zero.run.directory import RunDirectory
from zero.run.position import Position
from zero.run.requests import Requests
from zero.run.restore import TrainingPosition
from zero.run.step_metrics import StepMetrics, peak_memory
from zero.tracking.goodput import Goodput
from zero.tracking.metrics import Metric
from zero.training.batch import Rows
from zero.training.host_rows import HostRows
from zero.training.parts import TrainState

METRICS = (
    Metric(("step",), "steps so far, including skipped ones"),
    Metric(
        ("tokens_seen", "tokens_seen/NAME", "epochs/NAME"),
        "tokens of all rows so far at full length, including padding; tokens and epochs of each corpus of a mixture",
    ),
    Metric(("samples_checksum",), "checksum of all rows so far, in order"),
)


@dataclass(kw_only=True)
class Run:
    """The run as all features see it; nothing in it belongs to a single feature.

    Attributes:
      frozen: parameters that are not trained.
      last_step: the last step of the schedule, or of the data if it ends earlier.
      start: the position before the first step; all others derive from it. Steps that share a batch of rows follow one
        another without a pause.
      evaluation_frequency: steps between evaluations; the last step is also evaluated.
      config: the whole configuration, only to record it; features do not read keys from it.
    """

    job: Job
    data: Data
    directory: RunDirectory
    requests: Requests
    clock: Goodput
    metrics: StepMetrics
    state: TrainState
    frozen: PyTree
    position: TrainingPosition
    start: Position
    last_step: int
    evaluation_frequency: int
    config: dict[str, Any]
    _uncounted: tuple[int, int] = (0, 0)  # this host's skipped rows and checksum since the last line

    @property
    def axis(self) -> Axis:
        """The pmap axis."""
        return self.job.model.axis

    @cached_property
    def host_rows(self) -> HostRows:
        """The rows of a global batch that this host's devices compute."""
        return HostRows.here(self.axis)

    @property
    def weights(self) -> PyTree:
        """The part of the state that inference needs."""
        return self.job.model.weights(self.state.params, self.state.averages, self.frozen)

    @property
    def is_last(self) -> bool:
        """Whether no step follows; a run resumed with fewer steps may already be past its last one."""
        return self.position.step >= self.last_step

    @property
    def is_evaluation(self) -> bool:
        """Whether an evaluation follows the newest step."""
        return self.is_last or self.position.step % self.evaluation_frequency == 0

    def batches(self) -> Generator[tuple[int, HostBatch]]:
        """This host's rows of each batch, with the last step that uses them.

        Ends with the last step of the run, or when a stop request arrives while waiting for data.
        """
        watchdog.progress()
        stop = self.requests.signals if jax.process_count() == 1 else ()  # several hosts must agree first
        with closing(prefetch(self.data.training.batches(self.position.cursor), stop=stop)) as batches:
            steps = self.start.at(self.position.step).steps_to(self.last_step)
            yield from zip(steps, self.metrics.timed(batches), strict=False)

    def extra(self, tokens: Rows, loaded: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The objective's other inputs: `Batch.extra` of this host's devices.

        Args:
          tokens: rows of these devices, or equal pieces of rows.
          loaded: the loader's values, `(rows of the data, ...)`.
        """
        extra: dict[str, Any] = {}
        positions = self.job.model.positions_in(tokens[0])
        pieces = self.data.context.full // positions
        for entry in self.job.objective.reads:
            if entry.name not in loaded:
                continue
            values = loaded[entry.name].astype(entry.dtype, copy=False)
            if entry.of == "position":
                values = values.reshape(-1, positions, *entry.shape)
            else:
                values = np.repeat(values.reshape(-1, *entry.shape), pieces, axis=0)
            extra[entry.name] = self.host_rows.split(values)
        for column in self.data.columns.values():
            if column.compute is not None:
                extra |= column.compute(self.frozen, tokens)
        return extra

    def count(self, step: int, batch: HostBatch) -> None:
        """Advances the position past a dispatched step."""
        position = self.position
        position.step = step
        position.cursor = batch.cursor
        position.pending = None
        rows = len(batch.tokens)
        is_counted = self.host_rows.is_counted(rows)
        numbers = self.start.at(step).first_row + self.host_rows.numbers(rows)
        skipped, checksum = self._uncounted
        for number, row in zip(numbers[is_counted].tolist(), batch.tokens[is_counted], strict=True):
            checksum += zlib.crc32(row, zlib.crc32(number.to_bytes(8)))
        self._uncounted = skipped + int(batch.is_skipped[is_counted].sum()), checksum

    def read_line(self) -> Line:
        """The line of metrics for the steps since the last line; empty if there were none. All hosts call it.

        Raises:
          UserError: a background save has failed.
        """
        self.directory.checkpoints.check()
        self._sum_counters()
        if self.metrics.is_empty:
            return {}
        position = self.position
        context = self.data.context
        assert position.cursor is not None
        batches = position.cursor["batches"]
        line: dict[str, Any] = {
            "step": position.step,
            **self.metrics.read(),
            "sequence_length": context.at(position.step - 1),
            "tokens_seen": self.start.at(position.step).tokens,
            "samples_checksum": position.samples_checksum,
            **peak_memory(),
        }
        for corpus, rows_seen in self.data.training.rows_seen(batches).items():
            line[f"tokens_seen/{corpus}"] = rows_seen * self.start.row_tokens
        for corpus, epochs in self.data.training.epochs_seen(batches).items():
            line[f"epochs/{corpus}"] = epochs
        return line

    def _sum_counters(self) -> None:
        skipped, checksum = agreement.sum_over_hosts(*self._uncounted)
        self._uncounted = 0, 0
        self.position.skipped_rows += skipped
        self.position.samples_checksum = (self.position.samples_checksum + checksum) % 2**32
