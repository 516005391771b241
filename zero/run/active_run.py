"""A run in progress on one host: its parts, and how it is saved."""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from zero.checkpoints.emergency import EmergencyCheckpoints
from zero.checkpoints.manager import Checkpoints
from zero.config.schema import Config
from zero.corpus.reading.loader import HostBatch, Loader
from zero.corpus.reading.prefetch import prefetch
from zero.corpus.reading.synthetic import AnyLoader
from zero.corpus.text.tokenizers import Tokenizer
from zero.cycles.predict import predict
from zero.errors import Unavailable, UserError
from zero.hosts import agreement, signals, watchdog
from zero.hosts.interruptible_compilation import CACHE_HIT, compile_unless_stopped, recorded_events
from zero.hosts.startup import process_age
from zero.inference.harness_tasks import numbers_of, run_tasks
from zero.inference.scoring import Scorer
from zero.inference.trained_model import TrainedModel
from zero.job import Job
from zero.partition.checksums import examine
from zero.partition.collectives.axis import Axis
from zero.partition.global_arrays import from_global, pmap_devices, to_global
from zero.partition.layout import PyTree
from zero.run.profiling import Profiler
from zero.run.restore import TrainingPosition
from zero.run.statistics import StatisticsRecorder
from zero.run.step_metrics import StepMetrics, peak_memory
from zero.run.verification import Verifier
from zero.run_directory import mirror
from zero.tracking.goodput import Goodput, counts_as
from zero.tracking.metrics_file import Log
from zero.training.batch import Batch
from zero.training.flops import model_flops
from zero.training.parts import TrainState
from zero.training.programs import Inference, split_rows
from zero.training.schedules import SequenceLengths

log = logging.getLogger(__name__)


class Due(NamedTuple):
    """The actions after a step; the same on all hosts."""

    log: bool
    evaluate: bool
    save: bool
    protect: bool
    stop: bool


class CompiledStep(NamedTuple):
    """The step for sequences of one length."""

    program: Callable[..., Any]
    flops: int  # of the model per device
    predicted: float | None  # seconds


@dataclass
class ActiveRun:
    """A run in progress on this host; `zero.run.setup.open_run` makes it."""

    config: Config
    job: Job
    directory: Path
    tokenizer: Tokenizer
    inference: Inference
    context: SequenceLengths
    loader: AnyLoader
    validation: dict[str, Loader]  # by the names of the sets; a set without a name is ""
    checkpoints: Checkpoints
    emergency: EmergencyCheckpoints | None
    tracker: Log | None  # of host 0
    stop_requests: list[int]  # signals received so far
    any_host: agreement.AnyHost
    bar: tqdm
    goodput: Goodput
    metrics: StepMetrics
    profiler: Profiler
    verifier: Verifier
    statistics: StatisticsRecorder
    state: TrainState
    frozen: PyTree  # parameters that are not trained
    position: TrainingPosition
    last_step: int  # of the schedule, or of the data if that ends earlier
    in_flight: int  # steps that may be dispatched before the host waits for their metrics
    saved_at: float = field(default_factory=time.monotonic)  # start of the newest checkpoint
    reported_at: float = field(default_factory=time.monotonic)  # end of the newest report
    _is_save_due: bool = False  # by the clock
    _uncounted: tuple[int, int] = (0, 0)  # rows skipped and checksum of this host since the last line of metrics
    _steps: dict[int, CompiledStep] = field(default_factory=dict)  # by the length of a sequence

    @property
    def axis(self) -> Axis:
        """The pmap axis."""
        return self.job.model.axis

    @property
    def weights(self) -> PyTree:
        """The part of the state that inference needs."""
        return self.job.model.weights(self.state.params, self.state.averages, self.frozen)

    @property
    def has_evaluation(self) -> bool:
        """Whether an evaluation computes anything."""
        return bool(self.validation) or self.config.training.harness_frequency is not None

    def batches(self) -> Generator[tuple[int, HostBatch]]:
        """Each step with this host's rows, to the last step or until a stop request comes during a wait for data."""
        watchdog.progress()
        stop = self.stop_requests if jax.process_count() == 1 else ()  # several hosts have to agree first
        with closing(prefetch(self.loader.batches(self.position.cursor), stop=stop)) as batches:
            steps = range(self.position.step + 1, self.last_step + 1)
            yield from zip(steps, self.metrics.timed(batches), strict=False)

    def dispatch(self, step: int, batch: HostBatch) -> bool:
        """Starts one update on the devices and reads the metrics of the one before.

        Returns:
          False if a stop request came during compilation; then nothing was started.
        """
        sequences = self.context.cut(batch.tokens, step - 1)  # rows, or pieces of them
        per_device, length = split_batch(sequences, jax.process_index(), self.axis.row_group), sequences.shape[1]
        per_device = per_device._replace(reference=self.reference(per_device.tokens, batch.reference))
        self.profiler.before(step)
        if self.statistics.is_due(step):
            self.statistics.before(self.job.model.weights(self.state.params, self.state.averages))
        if length in self._steps:
            program, flops, predicted = self._steps[length]
            self.state, metrics = program(self.state, per_device, self.frozen)
            self.metrics.add(metrics, 0 if self.profiler.is_last(step) else self.in_flight, flops, predicted)
        elif not self._first_step(length, per_device):
            return False
        with self.goodput.phase("evaluation"):
            if self.profiler.is_last(step):
                self.profiler.stop()
            if self.statistics.is_due(step):
                self.statistics.after(self.state, per_device, self.frozen)
            if self.verifier.is_due(step):
                self.verifier.check(step, self.weights, per_device.tokens)
        self._count(step, batch)
        self.bar.update()
        return True

    def reference(self, tokens: np.ndarray | jax.Array, stored: np.ndarray | None) -> np.ndarray | jax.Array | None:
        """The log-probability of each row by the reference, `(devices, rows)`; None where the objective has none.

        Args:
          tokens: of this host's devices.
          stored: those that the loader gave; None where the reference is the frozen base of adapters.
        """
        if stored is not None:
            return split_rows(stored.reshape(-1), len(tokens), self.axis.row_group)
        found: jax.Array | None = None
        if self.job.objective.has_reference:
            found = self.job.programs.reference(self.frozen, tokens)
        return found

    @counts_as("compilation")
    def _first_step(self, length: int, per_device: Batch) -> bool:
        """Compiles and runs the first step of this sequence length; waits for it, and times it separately."""
        began = time.monotonic()
        with recorded_events() as events:
            program, arguments = self.job.programs.step, (self.state, per_device, self.frozen)
            if jax.process_count() == 1:
                program = compile_unless_stopped(self.stop_requests, program, *arguments)
                if program is None:
                    return False
            self.state, metrics = program(*arguments)
            self.metrics.add(metrics, leave=0)
        seconds, age = time.monotonic() - began, process_age()
        self.metrics.leave_untimed(**({} if self._steps else {"seconds_to_first_step": age}))
        flops = 0
        if self.metrics.counts_flops:  # by a trace of the model, which takes a tenth of a second
            frozen = self.job.model.tuning is not None
            flops = model_flops(self.job.model.config, per_device.tokens.shape[1], length, frozen=frozen)
        self._steps[length] = CompiledStep(program, flops // self.axis.row_group, self._predict(program, length))
        log.info(
            "first step with sequences of %d tokens: %.1f s after the start; it took %.1f s and was %s",
            length,
            age,
            seconds,
            "read from the cache" if CACHE_HIT in events else "compiled",
        )
        return True

    def _predict(self, program: Any, length: int) -> float | None:
        """Seconds per step by the compiler's cycles; None if there are none or this length was not planned."""
        if length == self.context.full and self.config.profile.step_time is not None:
            return self.config.profile.step_time
        is_compiled = jax.process_count() == 1 and jax.default_backend() == "tpu"
        predicted = predict(program.as_text(), pmap_devices()) if is_compiled else None
        return predicted and predicted.seconds

    def _count(self, step: int, batch: HostBatch) -> None:
        position = self.position
        position.step, position.cursor, position.unevaluated = step, batch.cursor, None
        first_row = step * position.global_rows + jax.process_index() * len(batch.tokens)
        skipped, checksum = self._uncounted
        for number, row in enumerate(batch.tokens, start=first_row):
            checksum += zlib.crc32(row, zlib.crc32(number.to_bytes(8)))
        self._uncounted = skipped + batch.skipped, checksum

    def due(self, step: int) -> Due:
        """The actions after this step. All hosts call it once per step."""
        training = self.config.training
        is_evaluation = step % training.evaluation_frequency == 0 or step == self.last_step
        is_stop, is_save = self.poll(), self._is_save_due
        is_protect = self.emergency is not None and step % (self.config.zero.emergency_steps or step) == 0
        is_save |= is_protect and not self.checkpoints.steps()  # --resume needs a durable checkpoint
        every = self.config.data.save_every
        is_save |= is_evaluation if every is None else step % every == 0 or step == self.last_step
        is_log = is_evaluation or is_save or is_protect or is_stop or step % training.log_frequency == 0
        is_log |= self.statistics.is_due(step)
        return Due(is_log, is_evaluation, is_save, is_protect, is_stop)

    def poll(self) -> bool:
        """Whether to stop; the same on all hosts, which also learn when a checkpoint is due by the clock of host 0."""
        watchdog.progress()
        minutes = self.config.data.checkpoint_minutes
        is_due = self.tracker is not None and minutes is not None and time.monotonic() > self.saved_at + 60 * minutes
        if is_due:
            self.saved_at = time.monotonic()  # asked for once: hosts may agree on it only at the next call
        is_stop, is_due = self.any_host(self.position.step, bool(self.stop_requests), is_due)
        self._is_save_due |= is_due  # until the next save: an evaluation asks too, and does not save
        return is_stop

    def read_metrics(self) -> dict[str, Any]:
        """The line of metrics of the steps since the last one. All hosts call it at the same step.

        Raises:
          UserError: the run has passed a limit of the configuration, or a background save has failed.
        """
        self.checkpoints.check()
        self._sum_counters()
        position, row_tokens = self.position, self.job.objective.rows * self.context.full
        assert position.cursor is not None
        line = {
            "step": position.step,
            **self.metrics.read(),
            "sequence_length": self.context.at(position.step - 1),
            "tokens_seen": position.step * position.global_rows * row_tokens,
            "samples_checksum": position.samples_checksum,
            **peak_memory(),
            **self.statistics.read(),
        }
        for corpus, rows_seen in self.loader.rows_seen(position.cursor["batches"]).items():
            line[f"tokens_seen/{corpus}"] = rows_seen * row_tokens
        for corpus, epochs in self.loader.epochs_seen(position.cursor["batches"]).items():
            line[f"epochs/{corpus}"] = epochs
        if self.config.data.max_skipped_rows:
            line["skipped_rows"] = position.skipped_rows
        check_limits(self.config, line, self.metrics.skipped_in_a_row)
        return line

    def _sum_counters(self) -> None:
        skipped, checksum = agreement.sum_over_hosts(*self._uncounted)
        self._uncounted = 0, 0
        self.position.skipped_rows += skipped
        self.position.samples_checksum = (self.position.samples_checksum + checksum) % 2**32

    def harness_results(self) -> dict[str, float]:
        """The tasks of `evaluate.harness` on the weights of this step, as `harness/TASK/METRIC`."""
        trained = TrainedModel(self.job.model, self.weights, self.tokenizer, self.position.step)
        scorer = Scorer(trained, self.context.full, self.config.training.batch_size)
        return numbers_of(run_tasks(scorer, self.config.evaluate.harness))

    def log(self, line: dict[str, Any]) -> None:
        """Records a line of metrics, on host 0."""
        if self.tracker is not None:
            self.tracker(line | self.goodput.line())

    @counts_as("checkpoint")
    def save(self, validation_loss: float | None = None) -> None:
        """Begins to save the state; returns when the state may change again.

        Raises:
          UserError: the state or its validation loss is not finite; nothing is saved.
          Unavailable: the state differs between copies; nothing is saved.
        """
        sums = self._examined(validation_loss)
        if self.tracker is not None:  # before the checkpoint: a resume from it finds the metrics up to it
            mirror(self.directory, self.checkpoints.directory)
        # One time for all hosts, so that they keep the same checkpoints.
        saved_at = float(agreement.broadcast(f"saved at {self.position.step}", repr(time.time())))
        meta = {
            **asdict(self.position),
            "saved_at": saved_at,
            "last_step": self.last_step,
            "checksums": sums,
            "config": asdict(self.config),
            "size": asdict(self.job.model.config),
        }
        whole = to_global(self.state, self.job.layout, self.axis, donate=True)
        self.checkpoints.save(self.position.step, whole, self.job.layout, meta, validation_loss=validation_loss)
        self.state = from_global(whole, self.job.layout, self.axis, donate=True)
        self.saved_at, self._is_save_due = time.monotonic(), False

    @counts_as("checkpoint")
    def protect(self) -> None:
        """Begins an emergency checkpoint; returns when the state may change again.

        Raises:
          UserError: the state is not finite; the checkpoints before are kept.
          Unavailable: the state differs between copies; the checkpoints before are kept.
        """
        if self.emergency is not None:
            self._examined()
            self.emergency.save(self.position.step, self.state, asdict(self.position))

    def _examined(self, validation_loss: float | None = None) -> dict[str, int]:
        """Checksums of the state by leaf; raises as `save` does where it must not be saved."""
        try:
            sums, not_finite = examine(self.state, self.job.layout, self.axis)
        except ValueError as error:
            raise Unavailable(
                f"step {self.position.step}: {error}; a device, its memory or a link is faulty, or a program is not "
                "the same everywhere. This state is not saved: --resume continues from the checkpoint before"
            ) from error
        what = ", ".join([*not_finite[:3], "..."][: len(not_finite)])
        if validation_loss is not None and not math.isfinite(validation_loss):
            what = what or f"validation/loss={validation_loss}"
        if what:
            raise UserError(
                f"step {self.position.step}: {what} not finite; this state is not saved. Lower "
                "training.peak_learning_rate and --resume from a checkpoint before (data.resume_step), or start again"
            )
        return sums

    def stop(self) -> int:
        """Logs and saves the steps that are not yet logged and saved.

        Returns:
          The exit status of a run that was stopped by a signal.

        Raises:
          UserError: the state has passed a limit of the configuration, and is not saved.
        """
        if self.metrics.is_empty:
            self._sum_counters()
        else:
            self.log(self.read_metrics())
        if self.position.step not in self.checkpoints.steps():
            self.save()
        self.checkpoints.wait()
        reason = f"signal {self.stop_requests[0]}" if self.stop_requests else "another host"
        log.info("stopped by %s; step %d is saved, --resume continues", reason, self.position.step)
        return signals.PREEMPTED


def split_batch(sequences: np.ndarray, host: int, group: int) -> Batch:
    """This host's sequences `(B, T)` as `(devices, B / groups, T)`, the same for all devices of a group."""
    tokens = split_rows(sequences, jax.local_device_count(), group)
    first_rows = host * len(sequences) + tokens.shape[1] * (np.arange(len(tokens)) // group)
    return Batch(tokens, first_rows.astype(np.int32))


def check_limits(config: Config, line: dict[str, Any], skipped_in_a_row: int) -> None:
    """Checks a line of metrics against the limits of the configuration.

    Raises:
      UserError: too many rows or steps were skipped, or the gradient is not finite where no step may be skipped.
    """
    training, data, step = config.training, config.data, line["step"]
    if data.max_skipped_rows and line["skipped_rows"] > data.max_skipped_rows:
        raise UserError(
            f"step {step}: {line['skipped_rows']} rows of the data had to be skipped, and "
            f"data.max_skipped_rows={data.max_skipped_rows}; the log names their shards and samples"
        )
    if skipped_in_a_row > training.max_skipped_in_a_row:
        spikes = f" or were spikes by training.skip_spikes={training.skip_spikes}" if training.skip_spikes else ""
        raise UserError(
            f"step {step}: {skipped_in_a_row} steps in a row had no finite gradient{spikes}; lower "
            "training.peak_learning_rate and --resume from a step before that (data.resume_step)"
        )
    if not training.skip_bad_steps and not math.isfinite(line["gradient_norm"]):
        raise UserError(
            f"step {step}: the gradient is not finite and training.skip_bad_steps=false; lower "
            "training.peak_learning_rate and --resume"
        )
