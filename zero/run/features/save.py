"""Durable checkpoints: at evaluations or every n steps, by the clock, and when the run is stopped."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from zero.base.keys import at_least, key, positive
from zero.checkpoints.emergency import EmergencyKeys
from zero.hosts import agreement
from zero.record.metrics_file import Line
from zero.run.feature import Feature, Moment
from zero.run.features.examination import checked_sums
from zero.run.run import Run


class Save(Feature):
    """Begins to save the state; it is durable when `Checkpoints.wait` has returned.

    The metrics up to the step are mirrored first, so that a resume from the checkpoint finds them.
    """

    @dataclass(frozen=True)
    class Keys:
        save_every: int | None = key(
            None,
            at_least(1),
            "Steps between checkpoints, independent of evaluations; null: at every evaluation. The last step is "
            "always saved.",
            in_steps=True,
        )
        checkpoint_minutes: float | None = key(
            30.0,
            positive(),
            "Minutes between checkpoints if evaluations or save_every are further apart; null: off.",
        )

    name = "save"
    phase = "checkpoint"

    def __init__(self, keys: Keys, protecting: EmergencyKeys, run: Run) -> None:
        self._every = keys.save_every
        self._minutes = keys.checkpoint_minutes
        self._emergency_every = protecting.emergency_steps
        self._checkpoints = run.directory.checkpoints
        self._run = run
        self._begun_at = time.monotonic()
        self._was_removed = False  # the directory, which host 0 alone has found
        run.requests.add(self.name, self._is_time)

    def _is_time(self) -> bool:
        """Whether a checkpoint is due by host 0's clock; requested once, since hosts may agree on it one call later.

        One is due as well if host 0 finds that the run directory was removed, with all earlier ones.
        """
        run = self._run
        if run.directory.was_removed(run.config, run.job, run.position.step):
            self._was_removed = True
            return True
        if self._minutes is None or not agreement.is_host_0():
            return False
        if time.monotonic() <= self._begun_at + 60 * self._minutes:
            return False
        self._begun_at = time.monotonic()
        return True

    def due(self, now: Moment) -> bool:
        if now.is_stop:
            return now.step not in self._checkpoints.steps()
        is_protected = self._emergency_every is not None and now.step % self._emergency_every == 0
        if is_protected and not self._checkpoints.steps():
            return True  # a resume from an emergency checkpoint needs a durable one
        if self._every is None:
            return now.is_evaluation
        return now.is_last or now.step % self._every == 0

    def do(self, run: Run, now: Moment, line: Line) -> None:
        """Returns when the state may change again.

        Raises:
          UserError: the state or its validation loss is not finite, or the previous save failed.
          Unavailable: the state differs between copies.
        """
        validation_loss = line.get("validation/loss")
        sums = checked_sums(run, validation_loss)
        run.directory.mirror()
        # One time for all hosts, so that they keep the same checkpoints.
        of_host_0 = agreement.broadcast(f"saved at {now.step}", json.dumps([time.time(), self._was_removed]))
        saved_at, was_removed = json.loads(of_host_0)
        if was_removed:
            run.directory.begin_again()
            self._was_removed = False
        meta = {
            **asdict(run.position),
            "saved_at": saved_at,
            "last_step": run.last_step,
            "checksums": sums,
            "config": run.config,
            "size": asdict(run.job.model.config),
        }
        storage = run.job.storage
        whole = storage.to_global(run.state)
        self._checkpoints.save(now.step, whole, storage.layout, meta, validation_loss=validation_loss)
        run.state = storage.from_global(whole)
        self._begun_at = time.monotonic()
        run.requests.answer(self.name)
