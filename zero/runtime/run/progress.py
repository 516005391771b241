"""How far a run has come: saved and restored, told to stop, counted over all hosts."""

from __future__ import annotations

import logging
import time
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from zero.models.gpt import GPTConfig
from zero.partition.collectives import Axis
from zero.partition.layout import Layout
from zero.partition.state import checksums, from_global, to_global
from zero.runtime.checkpoints.checkpoints import Checkpoints, Damaged
from zero.runtime.config.configuration import Config
from zero.runtime.data.loader import Batch
from zero.runtime.errors import UserError
from zero.runtime.hosts import distributed, preemption
from zero.runtime.run import runs
from zero.runtime.tracking.tracking import Tracker
from zero.training.step import TrainState

log = logging.getLogger(__name__)


@dataclass
class Position:
    """Where the data and the counters stand between two steps; a checkpoint holds it beside the state."""

    global_rows: int  # of a batch over all hosts; fixed by the first checkpoint
    step: int = 0
    cursor: dict[str, int] | None = None
    skipped_rows: int = 0
    samples_checksum: int = 0
    unevaluated: dict[str, Any] | None = None  # metrics of this step where a signal came before its evaluation


def restore(
    source: Checkpoints, asked: int | None, layout: Layout, axis: Axis, is_own: bool
) -> tuple[Position, TrainState]:
    """The checkpoint that was asked for, or the newest that can be read; damaged ones of this run are set aside."""
    chosen, damaged = source.choose(asked), []
    for step in [chosen] if asked is not None else source.steps()[::-1]:
        try:
            meta = source.meta(step)
            state = from_global(source.restore(step, layout, axis), layout, axis, donate=True)
            sums = checksums(state, layout, axis)
            bad = [name for name, kept in meta["checksums"].items() if sums[name] != kept]
            if bad:
                del state  # before the next one takes its place
                raise Damaged(f"checkpoint {source.directory}, step {step}: {', '.join(bad)} is not what was saved")
        except Damaged as error:
            if asked is not None:
                raise
            log.error("%s; trying the one before", error)
            damaged.append(step)
            continue
        for step in damaged if is_own else []:
            source.set_aside(step)
        known = {field.name for field in fields(Position)}
        return Position(**{key: value for key, value in meta.items() if key in known}), state
    raise UserError(f"{source.directory}: none of its checkpoints can be read; the lines above say why, one by one")


@dataclass
class Progress:
    """A run under way, as one host sees it: its state, its place in the data, and how both are kept."""

    config: Config
    size: GPTConfig
    run_directory: Path
    checkpoints: Checkpoints
    tracker: Tracker | None  # of host 0
    layout: Layout
    axis: Axis
    stop_requests: list[int]
    agreement: distributed.Agreement
    state: TrainState
    at: Position
    saved_at: float = field(default_factory=time.monotonic)
    uncounted: tuple[int, int] = (0, 0)  # rows skipped and checksum, of this host since the last line of metrics

    def asked(self) -> tuple[bool, bool]:
        """Whether to stop, and whether a checkpoint is due by the clock of host 0; all hosts are told the same."""
        minutes = self.config.data.checkpoint_minutes
        is_due = self.tracker is not None and minutes is not None and time.monotonic() > self.saved_at + 60 * minutes
        if is_due:
            self.saved_at = time.monotonic()  # asked for once: the answer may come a call later
        is_stop, is_due = self.agreement(self.at.step, bool(self.stop_requests), is_due)
        return is_stop, is_due

    def count(self, step: int, batch: Batch, first_row: int) -> None:
        """A step was taken with these rows of this host."""
        self.at.step, self.at.cursor, self.at.unevaluated = step, batch.cursor, None
        first = step * self.at.global_rows + first_row
        skipped, checksum = self.uncounted
        for number, row in enumerate(batch.tokens, start=first):
            checksum += zlib.crc32(row, zlib.crc32(number.to_bytes(8)))
        self.uncounted = skipped + batch.skipped, checksum

    def sum_up(self) -> None:
        """Brings the counters of all hosts together."""
        skipped, checksum = distributed.sum_over_hosts(*self.uncounted)
        self.uncounted = 0, 0
        self.at.skipped_rows += skipped
        self.at.samples_checksum = (self.at.samples_checksum + checksum) % 2**32

    def log(self, line: dict[str, Any]) -> None:
        if self.tracker is not None:
            self.tracker.log(line)

    def save(self, validation_loss: float | None = None) -> None:
        """Begins to save the state; returns when it may change again."""
        if self.tracker is not None:  # before the checkpoint: who resumes from it finds the lines up to it
            runs.mirror(self.run_directory, self.checkpoints.directory)
        try:
            sums = checksums(self.state, self.layout, self.axis)
        except ValueError as error:
            raise UserError(
                f"step {self.at.step}: {error}; a device, its memory or a link is faulty, or a program is not the same "
                "everywhere. This state is not saved: --resume goes on from the checkpoint before"
            ) from error
        meta = {**asdict(self.at), "checksums": sums, "config": asdict(self.config), "size": asdict(self.size)}
        if self.tracker is not None and self.tracker.wandb_run is not None:
            meta["wandb_run_id"] = self.tracker.wandb_run.id
        whole = to_global(self.state, self.layout, self.axis, donate=True)
        self.checkpoints.save(self.at.step, whole, self.layout, meta, validation_loss=validation_loss)
        self.state = from_global(whole, self.layout, self.axis, donate=True)
        self.saved_at = time.monotonic()

    def stop(self) -> int:
        """Saves what is not saved yet, and returns the exit status."""
        self.sum_up()
        if self.at.step not in self.checkpoints.steps():
            self.save()
        self.checkpoints.wait()
        told = f"signal {self.stop_requests[0]}" if self.stop_requests else "another host"
        log.info("stopped by %s; step %d is saved, --resume continues", told, self.at.step)
        return preemption.PREEMPTED
