"""Emergency checkpoints every `zero.emergency_steps` steps."""

from __future__ import annotations

from dataclasses import asdict

from zero.checkpoints.emergency import EmergencyKeys
from zero.record.metrics_file import Line
from zero.run.feature import Feature, Moment
from zero.run.features.examination import checked_sums
from zero.run.run import Run


class Protect(Feature):
    """Begins an emergency checkpoint, which a thread writes on this host and on the next one."""

    name = "protect"
    phase = "checkpoint"

    def __init__(self, keys: EmergencyKeys, run: Run) -> None:
        self._every = keys.emergency_steps
        self._emergency = run.directory.emergency

    def due(self, now: Moment) -> bool:
        if self._every is None or now.is_stop:
            return False
        return now.step % self._every == 0

    def do(self, run: Run, now: Moment, line: Line) -> None:
        """Returns when the state may change again.

        Raises:
          UserError: the state is not finite; earlier checkpoints are kept.
          Unavailable: the state differs between copies; earlier checkpoints are kept.
        """
        assert self._emergency is not None
        checked_sums(run)
        self._emergency.save(now.step, run.state, asdict(run.position))
