"""A trace of some steps, for Perfetto and XProf (jax.profiler)."""

from __future__ import annotations

import logging
from pathlib import Path

import jax

log = logging.getLogger(__name__)

PROFILE_DIRECTORY = "profile"


class Profiler:
    """Traces `steps`, the first and the last, of this process into `run_directory/profile`; None: no trace."""

    def __init__(self, steps: list[int] | None, run_directory: Path) -> None:
        self._first, self._last = steps or (1, 0)
        self._directory = run_directory / PROFILE_DIRECTORY
        self._is_tracing = False

    def is_last(self, step: int) -> bool:
        """Whether the trace ends after this step, which the host then waits for."""
        return self._is_tracing and step >= self._last

    def before(self, step: int) -> None:
        """Starts the trace if it begins with this step."""
        if self._first <= step <= self._last and not self._is_tracing:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python functions would hide the events of the devices
            jax.profiler.start_trace(str(self._directory), create_perfetto_trace=True, profiler_options=options)
            self._is_tracing = True

    def stop(self) -> None:
        """Writes the trace, if one is being recorded."""
        if self._is_tracing:
            self._is_tracing, self._first, self._last = False, 1, 0
            jax.profiler.stop_trace()
            log.info("trace of the steps for ui.perfetto.dev and XProf: %s", self._directory)
