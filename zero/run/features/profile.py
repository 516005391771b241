"""A trace of some steps, for Perfetto and XProf (jax.profiler)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax

from zero.base.keys import Check, key
from zero.run.feature import Feature
from zero.run.run import Run
from zero.training.batch import Batch

log = logging.getLogger(__name__)

PROFILE_DIRECTORY = "profile"


def _is_range(steps: list[int]) -> bool:
    return len(steps) == 2 and 1 <= steps[0] <= steps[1]


class Profile(Feature):
    """Traces this process from the first to the last of `profile.steps` into RUN/profile.

    Steps that share rows are traced together. Several hosts write into RUN/profile/host-NUMBER each.
    """

    @dataclass(frozen=True)
    class Keys:
        steps: list[int] | None = key(
            None,
            Check(_is_range, "the first and the last step, such as [20,25]"),
            "First and last step of a profiler trace, written to profile/ in the run directory, such as [20,25]; "
            "steps that share their rows are included; null: off.",
        )

    name = "profile"
    changes_nothing = True

    def __init__(self, keys: Keys, run: Run) -> None:
        self._steps = keys.steps  # None: no trace, or it is done
        self._directory = run.directory.path / PROFILE_DIRECTORY
        if jax.process_count() > 1:  # jax gives all hosts the same file name, even on a shared disk
            self._directory /= f"host-{jax.process_index()}"
        self._is_tracing = False

    def before_step(self, run: Run, step: int) -> None:
        """Starts the trace if it begins with this step, or with a step that shares its rows."""
        if self._steps is None or self._is_tracing:
            return
        first, last = self._steps
        if step < first or step - run.start.schedule.steps_per_batch >= last:
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python functions would hide the events of the devices
        jax.profiler.start_trace(str(self._directory), create_perfetto_trace=True, profiler_options=options)
        self._is_tracing = True

    def after_step(self, run: Run, step: int, batch: Batch) -> None:
        """Waits for this step and writes the trace, if the trace ends with it."""
        if self._is_tracing and self._steps is not None and step >= self._steps[1]:
            run.metrics.wait()
            self.close()

    def close(self) -> None:
        """Writes the trace if one is being recorded."""
        if self._is_tracing:
            self._is_tracing = False
            self._steps = None
            jax.profiler.stop_trace()
            log.info("profiler trace, for ui.perfetto.dev or XProf: %s", self._directory)
