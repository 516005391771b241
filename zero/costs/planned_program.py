"""A compiled program, taken apart for a plan and its page."""

from __future__ import annotations

from dataclasses import dataclass

from zero.costs.live_arrays import LiveArrays
from zero.costs.predict import Timeline
from zero.costs.source_lines import SourceLines


@dataclass(frozen=True, eq=False)
class PlannedProgram:
    """A compiled program, taken apart.

    Attributes:
      name: of the function.
      timeline: when each instruction occupies what.
      lines: of the user's source.
      live: arrays over the schedule.
      peak_bytes: by the compiler.
    """

    name: str
    timeline: Timeline
    lines: SourceLines
    live: LiveArrays
    peak_bytes: int
